"""The two passes over the files of a run."""

from pathlib import Path

from tfmp.migrate.cli import files
from tfmp.migrate.cli.processing import Job
from tfmp.migrate.cli.runs import process_run

_MODEL = "import tensorflow as tf\nimport layers\n\n\ndef train():\n    return tf.placeholder(tf.float32)\n"
_LAYERS = "import tensorflow as tf\n\n\ndef drop(x, keep):\n    return tf.nn.dropout(x, keep)\n"


def test_a_file_without_a_version_is_rewritten_in_the_second_pass(tmp_path: Path) -> None:
    for name, text in {"model.py": _MODEL, "layers.py": _LAYERS}.items():
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
