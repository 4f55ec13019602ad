"""What files are by the others of a run, and what is said of them."""

import ast
import json
from pathlib import Path

import pytest

from tfmp.migrate.cli import command, files, modules
from tfmp.migrate.cli.processing import Job
from tfmp.migrate.cli.project import process_run


def test_imports_inside_functions_are_read_too() -> None:
    module = modules.read(ast.parse("import a.b\ndef f():\n    from ..c import d\n"))
    assert [(one.level, one.names, one.line) for one in module.imports] == [(0, ("a.b",), 1), (2, ("c.d", "c"), 3)]


@pytest.mark.parametrize(
    ("text", "has_main", "calls"),
    [
        ("if '__main__' == __name__:\n    pass\n", True, False),
        ("def f(): pass\nf()\n", False, True),
        ("import registry\nregistry.register(f)\n", False, False),
        ("import tensorflow as tf\ntf.app.run()\n", False, True),
        ("print(1)\n", False, False),
    ],
)
def test_a_main_block_or_a_call_shows_that_a_file_is_run(text: str, has_main: bool, calls: bool) -> None:
    module = modules.read(ast.parse(text))
    assert (module.has_main, module.calls) == (has_main, calls)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import tensorflow as T\nB = T\n", {"T", "B"}),
        ("import tensorflow\ntf = tensorflow\nlib = tf\n", {"lib"}),
        ("import tensorflow as tf\n", set()),
        ("import tensorflow.compat.v1 as T\n", set()),
        ("import numpy as T\nB = T\n", set()),
    ],
)
def test_words_that_are_tensorflow_are_read_for_other_files(text: str, words: set[str]) -> None:
    assert modules.read(ast.parse(text)).tensorflow == words


def test_the_words_of_a_file_are_kept_if_a_star_may_bind_them() -> None:
    assert modules.read(ast.parse("from base import *\nx = T.y\n")).starred == {"x", "T"}
    assert modules.read(ast.parse("from base import T\nx = T.y\n")).starred == set()


_MODEL = "import tensorflow as tf\n\n\ndef train():\n    return tf.Session().run(tf.placeholder(tf.float32))\n"
_NEW_MODEL = "import tensorflow as tf\n\n\n@tf.function\ndef train():\n    return 1\n"
_LAYERS = "import tensorflow as tf\n\n\ndef drop(x, keep):\n    return tf.nn.dropout(x, keep)\n"
_MAIN = "\nif __name__ == '__main__':\n    train()\n"
_OLD = "import tensorflow.compat.v1 as tf\n"
_UPGRADE = ("import tensorflow as tf\n", _OLD)
_IMPORTS = "import layers\n"


def _write(texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _found(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str, int, str, str]]:
    """Run the command; return its findings."""
    command.main([*arguments, "--json"])
    reports = json.loads(capsys.readouterr().out)["files"]
    return [
        (report["path"], one["line"], one["level"], one["message"]) for report in reports for one in report["findings"]
    ]


def test_a_script_without_tensorflow_is_told_to_turn_the_behaviour_on(capsys: pytest.CaptureFixture[str]) -> None:
    _write({"main.py": "import os\nfrom model import train\n" + _MAIN, "model.py": _MODEL})
    for _ in range(2):  # the second time model.py is written by the first
        assert command.main(["main.py", "model.py"]) == 1
        shown = capsys.readouterr().out
        assert "main.py:2: R1: This script is run, and it imports files that work only with" in shown
        assert "It imports model.py.\n    | from model import train\n" in shown
        ((path, line, level, _),) = _found(capsys, "--write", "main.py", "model.py")
        assert (path, line, level) == ("main.py", 2, "fails")
    assert Path("model.py").read_text().startswith(_OLD)


@pytest.mark.parametrize(
    "model",
    [
        "import tensorflow as tf\ntf.compat.v1.disable_eager_execution()\nx = tf.compat.v1.placeholder('float')\n",
        "import tensorflow as tf\ntf.enable_eager_execution()\nx = tf.get_variable('x', [])\n",
        _MODEL + _MAIN,
        _NEW_MODEL,
        "import tensorflow as tf\ntf.logging.info('read')\n",
    ],
    ids=["eager is off", "eager is on", "it has the call", "of TensorFlow 2", "nothing that needs a graph"],
)
def test_a_script_that_needs_no_call_is_told_nothing(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _write({"main.py": "from model import train\n" + _MAIN, "model.py": model})
    assert [message for path, *_, message in _found(capsys, ".") if path == "./main.py"] == []


def test_a_package_of_tensorflow_2_needs_no_call_for_its_uses_of_compat_v1(capsys: pytest.CaptureFixture[str]) -> None:
    model = "import tensorflow as tf\n\n\ndef model_fn():\n    return tf.compat.v1.get_variable('x', [])\n"
    _write({"main.py": "from pack.model import model_fn\nmodel_fn()\n", "pack/__init__.py": "", "pack/model.py": model})
    assert [level for _, _, level, _ in _found(capsys, ".")] == ["fails"]
    _write({"pack/core/__init__.py": "", "pack/core/train.py": _NEW_MODEL})
    assert [(path, level) for path, _, level, _ in _found(capsys, ".")] == [("./pack/core/train.py", "note")]


def test_a_script_of_neither_gets_the_call_if_what_it_imports_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    main = "import tensorflow as tf\nfrom model import train\n\ntf.get_logger().info('go')\n" + _MAIN
    _write(
        {"main.py": main, "upgraded.py": main.replace("tf.get_logger", "tf.compat.v1.get_logger"), "model.py": _MODEL}
    )
    assert _found(capsys, "--write", ".") == []
    rest = main.partition("\n")[2]
    assert Path("main.py").read_text() == f"{_OLD}tf.disable_v2_behavior()\n{rest}"
    # What is of TensorFlow 1 it says already: its other names may be of TensorFlow 2.
    assert Path("upgraded.py").read_text().startswith("import tensorflow as tf\ntf.compat.v1.disable_v2_behavior()\n")
    assert _found(capsys, ".") == []


def test_a_script_may_be_known_by_what_it_does_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _write(
        {
            "predict.py": "from model import train\nresult = train()\nresult.show()\n",
            "registered.py": "import registry\nfrom model import train\nregistry.register(train)\n",
            "config.py": "from model import train\nsteps = 3\n",
            "model.py": _MODEL,
        }
    )
    assert [(path, line) for path, line, *_ in _found(capsys, ".")] == [("./predict.py", 1)]


def test_a_library_is_told_of_once_and_only_if_it_is_more_than_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    _write({"library/model.py": _MODEL, "library/other.py": f'"""Other."""\n{_MODEL}'})
    assert command.main(["library"]) == 0
    shown = capsys.readouterr().out
    assert "library/model.py:1: R1: These files work only with the behavior of TensorFlow 1" in shown
    assert "This file and 1 more.\n" in shown
    assert len(_found(capsys, "library")) == 1
    assert _found(capsys, "library/model.py") == []


def test_what_a_script_of_tensorflow_1_imports_is_of_tensorflow_1(capsys: pytest.CaptureFixture[str]) -> None:
    _write(
        {
            "train.py": "from nets import layers\n" + _MODEL + _MAIN,
            "nets/__init__.py": "",
            "nets/layers.py": "from . import basic\n" + _LAYERS,
            "nets/basic.py": _LAYERS,
            "nets/unused.py": _LAYERS,
        }
    )
    found = _found(capsys, "--write", ".")
    assert [(path, line, level) for path, line, level, _ in found] == [("./nets/unused.py", 5, "wrong")]
    assert Path("nets/layers.py").read_text() == "from . import basic\n" + _LAYERS.replace(*_UPGRADE)
    assert Path("nets/basic.py").read_text() == _LAYERS.replace(*_UPGRADE)
    assert Path("nets/unused.py").read_text() == _LAYERS
    assert _found(capsys, "--write", ".") == found
    assert Path("nets/layers.py").read_text() == "from . import basic\n" + _LAYERS.replace(*_UPGRADE)


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ({"new.py": _IMPORTS + _NEW_MODEL}, []),
        (
            {"new.py": _IMPORTS + _NEW_MODEL, "old.py": _IMPORTS + _MODEL},
            [("./layers.py", 5, "wrong")],
        ),
        ({"old.py": _IMPORTS + _MODEL.replace(*_UPGRADE)}, [("./layers.py", 5, "wrong")]),
        ({"elsewhere/old.py": "import other\n" + _MODEL}, [("./layers.py", 5, "wrong")]),
    ],
    ids=["of TensorFlow 2", "of both", "upgraded", "none"],
)
def test_what_scripts_around_it_do_not_tell_is_left(
    others: dict[str, str], left: list[tuple[str, int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    _write({"layers.py": _LAYERS, **others})
    found = _found(capsys, "--write", ".")
    assert [tuple(one[:3]) for one in found if one[0] == "./layers.py"] == left
    assert Path("layers.py").read_text() == _LAYERS


def test_what_is_told_by_others_is_reported_with_all_that_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    policy = "tf.keras.mixed_precision.experimental.set_policy('mixed_float16')\n"
    _write({"train.py": _IMPORTS + _MODEL, "layers.py": _LAYERS + policy, "alone.py": _LAYERS + policy})
    command.main(["--write", "--json", "layers.py", "train.py", "alone.py"])
    layers, _, alone = json.loads(capsys.readouterr().out)["files"]
    assert [edit["rule"] for edit in layers["edits"]] == ["R1", "R7"]
    assert [edit["rule"] for edit in alone["edits"]] == ["R7"]
    assert "set_global_policy" in Path("alone.py").read_text()


def test_many_processes_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    _write({f"p{number}/main.py": "from model import train\n" + _MAIN for number in range(40)})
    _write({f"p{number}/model.py": _IMPORTS + _MODEL for number in range(40)})
    _write({f"p{number}/layers.py": _LAYERS for number in range(40)})
    found = _found(capsys, "--write", *(f"p{number}" for number in range(40)))
    assert [one[:3] for one in found] == [(f"p{number}/main.py", 1, "fails") for number in range(40)]
    assert all(Path(f"p{number}/layers.py").read_text().startswith(_OLD) for number in range(40))


def test_a_file_without_a_version_is_rewritten_in_the_second_pass(tmp_path: Path) -> None:
    for name, text in {"model.py": f"import layers\n{_MODEL}", "layers.py": _LAYERS}.items():
        (tmp_path / name).write_text(text)
    passes: list[None] = []
    found = [files.Found(str(tmp_path / name)) for name in ("layers.py", "model.py")]
    reports, _ = process_run(found, Job(write=True), lambda: passes.append(None))
    assert [Path(report.path).name for report in reports] == ["layers.py", "model.py"]
    assert all(report.changes for report in reports)
    assert "tensorflow.compat.v1" in (tmp_path / "layers.py").read_text()
    assert len(passes) == 2


def test_the_diff_has_the_rewrites_of_a_file_without_a_version(tmp_path: Path) -> None:
    path = tmp_path / "layers.py"
    path.write_text(f"{_LAYERS}tf.keras.mixed_precision.experimental.set_policy('mixed_float16')\n")
    (report,), _ = process_run([files.Found(str(path))], Job(diff=True))
    assert b"+tf.keras.mixed_precision.set_global_policy(" in report.diff


_BRIDGE = "from npu_bridge.npu_init import *\n"


def test_names_that_star_imports_take_from_the_project_do_not_keep_the_star_import_of_the_bridge() -> None:
    _write(
        {
            "run.py": f"{_BRIDGE}from nets.shapes import *\nopt = NPULossScaleOptimizer(Feeder(tidy(sizes)), SCALE)\n",
            "nets/__init__.py": "",
            "nets/shapes.py": "from .base import *\nclass Feeder: pass\nfor sizes in ([1], [2]): pass\n",
            "nets/base.py": "from nets.shapes import *\nimport os as SCALE\nif SCALE:\n    def tidy(v): return v\n",
        }
    )
    assert command.main(["--write", "."]) == 0
    assert Path("run.py").read_text() == (
        "from tfmp.npu import NPULossScaleOptimizer\nfrom nets.shapes import *\n"
        "opt = NPULossScaleOptimizer(Feeder(tidy(sizes)), SCALE)\n"
    )


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ("class Feeder: pass\n", "Nothing binds _hidden (line 3)."),
        ("from elsewhere import *\n", "Only the star import of shapes may bind Feeder (line 3), _hidden (line 3)."),
        ("class Feeder:\n", "Only the star import of shapes may bind Feeder (line 3), _hidden (line 3)."),
    ],
)
def test_a_name_that_no_file_is_known_to_bind_keeps_the_star_import_of_the_bridge(shapes: str, told: str) -> None:
    _write({"run.py": f"{_BRIDGE}from shapes import *\nopt = Feeder(_hidden)\n", "shapes.py": f"_hidden = 1\n{shapes}"})
    (report,), _ = process_run([files.Found("run.py")], Job())
    (finding,) = report.findings
    assert (finding.rule, finding.line) == ("R5*", 1)
    assert told in finding.text


@pytest.mark.parametrize(
    ("base", "text", "is_reported"),
    [
        ("import tensorflow as T\n", "from base import T\nT.placeholder(x)\n", True),
        ("import tensorflow as T\n", "from base import *\nT.placeholder(x)\n", True),
        ("import tensorflow as T\n", "from base import *\nx = 1\n", False),
        ("import tensorflow as T\n", "from base import other\n", False),
        ("import tensorflow as T\n", f"from base import T\n{_NEW_MODEL}", False),
        ("import tensorflow as T\nT.Session()\n", "from base import T\nT.placeholder(x)\n", False),
    ],
)
def test_tensorflow_of_another_file_under_a_name_of_its_own_is_reported(
    base: str, text: str, is_reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _write({"base.py": base, "model.py": text})
    found = [one for one in _found(capsys, "base.py", "model.py") if one[3].startswith("TensorFlow comes from another")]
    assert [(path, line, level) for path, line, level, _ in found] == [("model.py", 1, "fails")] * is_reported
