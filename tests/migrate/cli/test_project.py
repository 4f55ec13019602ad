"""What files are by the others of a run, and what is said of them."""

import json
from pathlib import Path

import pytest

from tests.migrate.cli.scripts import Run, write
from tfmp.migrate.cli import workers

_TF = "import tensorflow as tf\n"
_MODEL = f"{_TF}\n\ndef train():\n    return tf.Session().run(tf.placeholder(tf.float32))\n"
_NEW_MODEL = f"{_TF}\n\n@tf.function\ndef train():\n    return 1\n"
_LAYERS = f"{_TF}\n\ndef drop(x, keep):\n    return tf.nn.dropout(x, keep)\n"
_MAIN = "\nif __name__ == '__main__':\n    train()\n"
_OLD = "import tensorflow.compat.v1 as tf\n"
_IMPORTS = "import layers\n"


def _upgraded(text: str) -> str:
    return text.replace(_TF, _OLD)


def test_a_script_without_tensorflow_is_told_to_turn_the_behaviour_on(run: Run) -> None:
    write(main="import os\nfrom model import train\n" + _MAIN, model=_MODEL)
    for _ in range(2):  # the second time model.py is written by the first
        ran = run("main.py", "model.py")
        assert ran.status == 1
        assert "main.py:2: R1: This script is run, and it imports files that work only with" in ran.out
        assert "It imports model.py.\n    | from model import train\n" in ran.out
        found = run("--write", "--json", "main.py", "model.py").findings()
        assert [one[:3] for one in found] == [("main.py", 2, "fails")]
    assert Path("model.py").read_text().startswith(_OLD)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            f"{_TF}tf.compat.v1.disable_eager_execution()\nx = tf.compat.v1.placeholder('float')\n", id="eager is off"
        ),
        pytest.param(f"{_TF}tf.enable_eager_execution()\nx = tf.get_variable('x', [])\n", id="eager is on"),
        pytest.param(_MODEL + _MAIN, id="it has the call"),
        pytest.param(_NEW_MODEL, id="of TensorFlow 2"),
        pytest.param(f"{_TF}tf.logging.info('read')\n", id="nothing that needs a graph"),
    ],
)
def test_a_script_that_needs_no_call_is_told_nothing(model: str, run: Run) -> None:
    write(main="from model import train\n" + _MAIN, model=model)
    assert [one for one in run("--json", ".").findings() if one[0] == "./main.py"] == []


def test_a_package_of_tensorflow_2_needs_no_call_for_its_uses_of_compat_v1(run: Run) -> None:
    model = f"{_TF}\n\ndef model_fn():\n    return tf.compat.v1.get_variable('x', [])\n"
    main = "from pack.model import model_fn\nmodel_fn()\n"
    write({"main.py": main, "pack/__init__.py": "", "pack/model.py": model})
    assert [level for _, _, level, _ in run("--json", ".").findings()] == ["fails"]
    write({"pack/core/__init__.py": "", "pack/core/train.py": _NEW_MODEL})
    assert [(path, level) for path, _, level, _ in run("--json", ".").findings()] == [("./pack/core/train.py", "note")]


def test_a_script_of_neither_gets_the_call_if_what_it_imports_needs_it(run: Run) -> None:
    main = f"{_TF}from model import train\n\ntf.get_logger().info('go')\n{_MAIN}"
    write(main=main, upgraded=main.replace("tf.get_logger", "tf.compat.v1.get_logger"), model=_MODEL)
    assert run("--write", "--json", ".").findings() == []
    assert Path("main.py").read_text() == f"{_OLD}tf.disable_v2_behavior()\n{main.partition(_TF)[2]}"
    # What is of TensorFlow 1 it says already: its other names may be of TensorFlow 2.
    assert Path("upgraded.py").read_text().startswith(f"{_TF}tf.compat.v1.disable_v2_behavior()\n")
    assert run("--json", ".").findings() == []


def test_a_script_may_be_known_by_what_it_does_alone(run: Run) -> None:
    write(
        predict="from model import train\nresult = train()\nresult.show()\n",
        registered="import registry\nfrom model import train\nregistry.register(train)\n",
        config="from model import train\nsteps = 3\n",
        model=_MODEL,
    )
    assert [one[:2] for one in run("--json", ".").findings()] == [("./predict.py", 1)]


def test_a_library_is_told_of_once_and_only_if_it_is_more_than_a_file(run: Run) -> None:
    write({"library/model.py": _MODEL, "library/other.py": f'"""Other."""\n{_MODEL}'})
    ran = run("library")
    assert ran.status == 0
    assert "library/model.py:1: R1: These files work only with the behavior of TensorFlow 1" in ran.out
    assert "This file and 1 more.\n" in ran.out
    assert len(run("--json", "library").findings()) == 1
    assert run("--json", "library/model.py").findings() == []


def test_what_a_script_of_tensorflow_1_imports_is_of_tensorflow_1(run: Run) -> None:
    layers = "from . import basic\n" + _LAYERS
    nets = {"__init__": "", "layers": layers, "basic": _LAYERS, "unused": _LAYERS}
    write({f"nets/{name}.py": text for name, text in nets.items()}, train=f"from nets import layers\n{_MODEL}{_MAIN}")
    for _ in range(2):
        found = run("--write", "--json", ".").findings()
        assert [one[:3] for one in found] == [("./nets/unused.py", 5, "wrong")]
        written = {**nets, "layers": _upgraded(layers), "basic": _upgraded(_LAYERS)}
        assert {name: Path(f"nets/{name}.py").read_text() for name in nets} == written


@pytest.mark.parametrize(
    ("others", "is_left"),
    [
        pytest.param({"new.py": _IMPORTS + _NEW_MODEL}, False, id="of TensorFlow 2"),
        pytest.param({"new.py": _IMPORTS + _NEW_MODEL, "old.py": _IMPORTS + _MODEL}, True, id="of both"),
        pytest.param({"old.py": _IMPORTS + _upgraded(_MODEL)}, True, id="upgraded"),
        pytest.param({"elsewhere/old.py": "import other\n" + _MODEL}, True, id="none"),
    ],
)
def test_what_scripts_around_it_do_not_tell_is_left(others: dict[str, str | bytes], is_left: bool, run: Run) -> None:
    write(others, layers=_LAYERS)
    found = [one[:3] for one in run("--write", "--json", ".").findings()]
    assert [one for one in found if one[0] == "./layers.py"] == [("./layers.py", 5, "wrong")] * is_left
    assert Path("layers.py").read_text() == _LAYERS


def test_what_is_told_by_others_is_reported_with_all_that_is_done(run: Run) -> None:
    layers = f"{_LAYERS}tf.keras.mixed_precision.experimental.set_policy('mixed_float16')\n"
    write(train=_IMPORTS + _MODEL, layers=layers, alone=layers)
    assert "+tf.keras.mixed_precision.set_global_policy(" in run("--diff", "alone.py").out
    reports = json.loads(run("--write", "--json", "layers.py", "train.py", "alone.py").out)["files"]
    rules = {report["path"]: [edit["rule"] for edit in report["edits"]] for report in reports}
    assert (rules["layers.py"], rules["alone.py"]) == (["R1", "R7"], ["R7"])
    assert "set_global_policy" in Path("alone.py").read_text()


def test_many_processes_say_the_same_in_the_order_of_the_files(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    files = {"main": "from model import train\n" + _MAIN, "model": _IMPORTS + _MODEL, "layers": _LAYERS}
    folders = [f"p{number}" for number in range(40)]
    write({f"{folder}/{name}.py": text for folder in folders for name, text in files.items()})
    write({"p7/old.py": "import hccl\nprint 'x'\n"})
    ran = run("--write", "--json", *folders)
    assert [one[:3] for one in ran.findings()] == [(f"{folder}/main.py", 1, "fails") for folder in folders]
    assert [file["path"] for file in json.loads(ran.out)["files"] if file["error"]] == ["p7/old.py"]
    # Progress is for terminals.
    assert ran.err == ""
    assert all(Path(f"{folder}/layers.py").read_text().startswith(_OLD) for folder in folders)


_BRIDGE = "from npu_bridge.npu_init import *\n"


def test_names_that_star_imports_take_from_the_project_do_not_keep_the_star_import_of_the_bridge(run: Run) -> None:
    rest = "from nets.shapes import *\nopt = NPULossScaleOptimizer(Feeder(tidy(sizes)), SCALE)\n"
    write(
        {
            "run.py": f"{_BRIDGE}{rest}",
            "nets/__init__.py": "",
            "nets/shapes.py": "from .base import *\nclass Feeder: pass\nfor sizes in ([1], [2]): pass\n",
            "nets/base.py": "from nets.shapes import *\nimport os as SCALE\nif SCALE:\n    def tidy(v): return v\n",
        }
    )
    assert run("--write", ".").status == 0
    assert Path("run.py").read_text() == f"from tfmp.npu import NPULossScaleOptimizer\n{rest}"


_MAY_BIND = "Only the star import of shapes may bind Feeder (line 3), _hidden (line 3)."


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ("class Feeder: pass\n", "Nothing binds _hidden (line 3)."),
        ("from elsewhere import *\n", _MAY_BIND),
        ("class Feeder:\n", _MAY_BIND),
    ],
)
def test_a_name_that_no_file_is_known_to_bind_keeps_the_star_import_of_the_bridge(
    shapes: str, told: str, run: Run
) -> None:
    write(run=f"{_BRIDGE}from shapes import *\nopt = Feeder(_hidden)\n", shapes=f"_hidden = 1\n{shapes}")
    ((path, line, _, message),) = run("--json", "run.py").findings()
    assert (path, line) == ("run.py", 1)
    assert told in message


@pytest.mark.parametrize(
    ("base", "text", "is_reported"),
    [
        ("import tensorflow as T\n", "from base import T\nT.placeholder(x)\n", True),
        ("import tensorflow as T\nB = T\n", "from base import B\nB.placeholder(x)\n", True),
        ("import tensorflow\ntf = tensorflow\nlib = tf\n", "from base import lib\nlib.placeholder(x)\n", True),
        ("import tensorflow as T\n", "from base import *\nT.placeholder(x)\n", True),
        ("import tensorflow as T\n", "from base import *\nx = 1\n", False),
        ("import tensorflow as T\n", "from base import other\n", False),
        ("import tensorflow as T\n", f"from base import T\n{_NEW_MODEL}", False),
        ("import tensorflow as T\nT.Session()\n", "from base import T\nT.placeholder(x)\n", False),
        ("import tensorflow.compat.v1 as T\n", "from base import T\nT.placeholder(x)\n", False),
        ("import numpy as T\nB = T\n", "from base import B\nB.placeholder(x)\n", False),
    ],
)
def test_tensorflow_of_another_file_under_a_name_of_its_own_is_reported(
    base: str, text: str, is_reported: bool, run: Run
) -> None:
    write(base=base, model=text)
    found = run("--json", "base.py", "model.py").findings()
    reported = [one[:3] for one in found if one[3].startswith("TensorFlow comes from another")]
    assert reported == [("model.py", 1, "fails")] * is_reported
