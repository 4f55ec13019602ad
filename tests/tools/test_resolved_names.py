"""The look-up of TensorFlow's names in files that are parsed but not run."""

import json
from pathlib import Path

import pytest

from tools import resolved_names
from tools.resolved_names import names_in, resolves

_TRY = """
import tensorflow as tf
try:
    from tensorflow.contrib import slim
except ImportError:
    tf.contrib.layers.layer_norm(x)
try:
    tf.Session()
except ValueError:
    pass
"""


@pytest.mark.parametrize(
    ("source", "unresolved"),
    [
        ("import tensorflow as tf\ntf.Session()\ntf.train.Checkpoint()", ["tensorflow.Session"]),
        (
            "import tensorflow.compat.v1 as tf\ntf.Session()\ntf.contrib.layers.layer_norm(x)",
            ["tensorflow.compat.v1.contrib.layers.layer_norm"],
        ),
        (
            "from tensorflow.python.ops import array_ops\nfrom tensorflow.contrib import slim\n"
            "import tensorflow.contrib.tpu",
            ["tensorflow.contrib.slim", "tensorflow.contrib.tpu"],
        ),
        ("from tensorflow.core.protobuf import rewriter_config_pb2, no_pb2", ["tensorflow.core.protobuf.no_pb2"]),
        ("from tensorflow.contrib.layers import *\nfrom tensorflow.compat.v1 import *", ["tensorflow.contrib.layers"]),
        # The body of a try is left out, but not its handlers.
        (_TRY, ["tensorflow.contrib.layers.layer_norm", "tensorflow.Session"]),
        # Attributes of objects are not followed.
        ("import tensorflow.compat.v1 as tf\ntf.flags.FLAGS.learning_rate\ntf.float32.name", []),
        ("import tfmp\ntfmp.LossScaleOptimizer\ntfmp.LossScaler2", ["tfmp.LossScaler2"]),
        ("import numpy as np\nnp.nothing\ntf.nothing\nfrom . import tensorflow", []),
    ],
)
def test_names_of_tensorflow_and_tfmp_are_looked_up(source: str, unresolved: list[str]) -> None:
    assert [str(name) for name in names_in(source) if not resolves(name)] == unresolved


def test_files_are_counted_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolved_names.main([str(tmp_path)]) == 2
    assert "no Python file" in capsys.readouterr().err
    (tmp_path / "old.py").write_text("import tensorflow as tf\nraise SystemExit(tf.Session())")
    (tmp_path / "new.py").write_text("import tensorflow.compat.v1 as tf\nraise SystemExit(tf.Session())")
    (tmp_path / "python2.py").write_text('print "no"')
    (tmp_path / "binary.py").write_bytes(b"\0\1")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    path = tmp_path / "names.json"
    assert resolved_names.main([str(tmp_path), "--json", str(path)]) == 1
    figures = json.loads(path.read_text())["figures"][str(tmp_path)]
    assert [figures[name] for name in ("files", "using", "resolved")] == [5, 2, 1]
    assert [Path(name).name for name in figures["unparsed"]] == ["binary.py", "python2.py"]
    assert figures["lines"] == [f"{tmp_path / 'old.py'}:2: tensorflow.Session"]
    printed = capsys.readouterr().out
    assert "| tensorflow.Session | 1 " in printed
    assert "does not parse: " in printed
