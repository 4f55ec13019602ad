"""The table of TensorFlow's names, against TensorFlow."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tfmp.migrate.tables import api_names
from tfmp.migrate.tables.api_names import Standing, standing


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="the table is of TensorFlow 2.15")
def test_the_tables_are_what_tensorflow_has(tmp_path: Path) -> None:
    # In a process of its own: what other tests imported changes what TensorFlow's lazy modules list.
    subprocess.run([sys.executable, "-m", "tools.api_names", str(tmp_path)], check=True, capture_output=True)
    for name in ("api_names.txt", "python_names.txt"):
        assert Path(api_names.__file__).with_name(name).read_text() == tmp_path.joinpath(name).read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("placeholder", Standing.OLD),
        ("app.flags.DEFINE_string", Standing.OLD),
        ("flags.FLAGS.batch_size", Standing.OLD),
        ("random.set_seed", Standing.NEW),
        ("reduce_sum", Standing.AMBIGUOUS),
        ("math.exp", Standing.SAME),
        ("float32.name", Standing.SAME),
        ("train", Standing.UNTOLD),
        ("logging", Standing.OLD),
        ("app", Standing.OLD),
        ("mixed_precision", Standing.OLD),
        ("logging.no_such_name", Standing.MISSING),
        ("keras.layers.Dense", Standing.SAME),
        ("keras.layers.LSTM", Standing.AMBIGUOUS),
        ("keras.backend.set_session", Standing.OLD),
        ("keras.utils.multi_gpu_model", Standing.MISSING),
        ("train.AdamOptimiser", Standing.MISSING),
        ("placehodler", Standing.MISSING),
    ],
)
def test_a_name_stands_where_its_longest_known_start_stands(name: str, expected: Standing) -> None:
    assert standing(name) is expected


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="later ones want Keras 2, and have no Estimator")
def test_modules_whose_names_differ_can_be_imported_below_compat_v1() -> None:
    rows = (line.split(" ", 2) for line in Path(api_names.__file__).with_suffix(".txt").read_text().splitlines())
    # Importing the module of the cells would change what `tf.nn.rnn_cell` is for the tests that follow.
    modules = {module for module, sign, _ in rows if module and sign in "1!" and module != "nn.rnn_cell"}
    assert modules
    for module in sorted(modules):
        importlib.import_module(f"tensorflow.compat.v1.{module}")
