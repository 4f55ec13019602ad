"""Tests of the example in which float16 needs a loss scale."""

import re
from pathlib import Path

import example_processes
import keras
import pytest

from estimator_examples import digits_ranges


# On a CPU, TensorFlow 2.15 multiplies float16 matrices hundreds of times slower than float32 matrices.
@pytest.mark.skipif(not keras.__version__.startswith("3."), reason="takes many minutes on TensorFlow 2.15")
def test_branch_learns_in_float16_only_with_the_suggested_scale(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    arguments = ["--seeds=1", "--steps=150", f"--plots={tmp_path / 'pictures'}"]
    # On some CPUs, oneDNN computes a float16 layer 200 times slower than TensorFlow's own kernels do.
    done = example_processes.run("digits_ranges", *arguments, TF_ENABLE_ONEDNN_OPTS="0")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^  (float\S+.*?) {2,}(\S+) % ± 0.0$", done.stdout, re.MULTILINE)
    (_, in_float32), (unscaled, without), (scaled, with_scale) = lines
    assert (unscaled, scaled) == ("float16, no loss scale", "float16, loss scale 131072")
    assert float(in_float32) > 75
    assert float(with_scale) > float(in_float32) - 8
    assert float(without) < 30
    pictures = sorted(path.name for path in (tmp_path / "pictures").iterdir() if path.stat().st_size > 10_000)
    assert pictures == ["ranges_after.png", "ranges_before.png"]


def test_wrong_number_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        digits_ranges.main(["--seeds=0"])
    assert "must be 1 or more, got 0." in capsys.readouterr().err
