"""The examples on images of digits, in a session and with Keras: what the README says of their runs."""

import json
import pathlib
import re

import keras
import numpy as np
import pytest
import python_process
import tensorflow as tf

from estimator_examples import digits_session

tf1 = tf.compat.v1

PYPROJECT = pathlib.Path(__file__).parents[2] / "pyproject.toml"
KERAS_3 = keras.__version__.startswith("3.")


def _printed(name: str, *options: str) -> str:
    """Return what an example prints in a process of its own, in which it may configure devices."""
    pytest.importorskip("sklearn")
    # On some CPUs, oneDNN computes a float16 layer 200 times slower than TensorFlow's own kernels do.
    done = python_process.run("-m", f"estimator_examples.{name}", *options, TF_ENABLE_ONEDNN_OPTS="0")
    assert done.returncode == 0, done.stderr
    return done.stdout


def _percent(cell: str) -> float:
    return float(cell.partition("%")[0])


def _rows(lines: str) -> dict[str, list[str]]:
    """Return the cells of a table behind the first of each row, by the first."""
    return {row[0]: row[1:] for row in (re.split(r"  +", line.strip()) for line in lines.splitlines())}


def test_a_session_skips_first_and_then_learns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert digits_session.main(["--steps=120"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"attempt 20: loss 2\.\d+, loss scale 2\^22, applied 0, skipped 20", lines[0])
    last = re.fullmatch(r"attempt 120: loss ([\d.]+), loss scale 2\^\d+, applied (\d+), skipped (\d+)", lines[-2])
    assert last is not None
    assert float(last[1]) < 0.3
    assert int(last[2]) + int(last[3]) == 120
    accuracy = re.fullmatch(r"test accuracy ([\d.]+)%", lines[-1])
    assert accuracy is not None
    assert float(accuracy[1]) > 95


@pytest.mark.graph
@pytest.mark.parametrize("overflows", ["gradients", "activations"])
def test_an_overflow_in_the_session_moves_no_weight_and_leaves_the_moving_averages_finite(
    overflows: str, session: tf1.Session
) -> None:
    network = digits_session.build(learning_rate=0.1, init_loss_scale=2.0**60 if overflows == "gradients" else 1.0)
    session.run(tf1.global_variables_initializer())
    weights, averages = tf1.trainable_variables(), [v for v in tf1.global_variables() if "/moving_" in v.op.name]
    before, unmoved = session.run([weights, averages])
    rng = np.random.default_rng(0)
    images = rng.uniform(size=(8, 8, 8, 1)) if overflows == "gradients" else np.full((8, 8, 8, 1), 1e5)
    feed = {network.images: images, network.labels: rng.integers(10, size=8), network.training: True}
    session.run(network.train_op, feed)
    assert session.run(network.optimizer.skipped_steps) == 1
    for old, new in zip(before, session.run(weights), strict=True):
        np.testing.assert_array_equal(old, new)
    moved = session.run(averages)
    assert all(np.isfinite(value).all() for value in moved)
    # They move with every step whose activations are finite, and not when the net is evaluated.
    assert overflows == "activations" or not np.array_equal(moved[0], unmoved[0])
    session.run(network.loss, {**feed, network.training: False})
    np.testing.assert_array_equal(session.run(averages)[0], moved[0])


def test_overflow_on_the_last_replica_ends_the_training_of_stock_keras_3_and_not_that_of_tfmp(
    tmp_path: pathlib.Path,
) -> None:
    # The command of `tox run -e digits`, with further options.
    [defaults] = re.findall(r'digits_keras", { replace = "posargs", default = (\[.*?\])', PYPROJECT.read_text("utf-8"))
    picture = tmp_path / "picture.png"
    printed = _printed("digits_keras", *json.loads(defaults), "--epochs=3", f"--plot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"\nWith the loss scaling of Keras {keras.__version__}:\nEpoch 1/" in printed
    # The reports are in the same stream as Keras' output. tox prints the other stream in red.
    assert "\noverflow in " in printed
    heads, _, lines = printed.split("\nComparison\n")[1].partition("\n")
    assert re.split(r"  +", heads.strip()) == [f"Keras {keras.__version__}", "tfmp"]
    comparison = _rows(lines)
    stock, ours = map(_percent, comparison.pop("test accuracy"))
    # Keras 2 is correct.
    assert stock < 30 if KERAS_3 else stock > 80
    assert ours > 80
    scales = comparison.pop("loss scale")
    assert scales[1] == "16384" == scales[KERAS_3]
    assert comparison == {
        "steps applied": ["not counted by Keras", "62"],
        "steps skipped": ["not counted by Keras", "1"],
        "weights finite": ["no" if KERAS_3 else "yes", "yes"],
        "replicas equal": ["yes", "yes"],
    }


def test_bursts_of_corrupt_batches_do_harm_unless_their_steps_are_skipped(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    options = ["--seeds=1", "--steps=207", "--every=100", "--in-a-row=8", "--start=128", f"--plot={picture}"]
    printed = _printed("digits_spikes", *options, "--corruptions", "next-labels", "noise")
    tables = {name: _rows(lines) for name, lines in re.findall(r"(?m)^Corruption: (\S+) .*\n((?:  .*\n)+)", printed)}
    assert tables.keys() == {"next-labels", "noise"}
    rows = tables["next-labels"]
    assert list(rows) == ["clean batches only", "nothing done", "clipped at 1", "spikes skipped", "both"]
    # The last steps are those of a burst.
    assert _percent(rows["nothing done"][0]) < 80
    for name in ("spikes skipped", "both"):
        assert _percent(rows[name][0]) > 90
        assert rows[name][2:] == ["8 of 8", "0 of 8", "0"]
    assert rows["nothing done"][2:] == rows["clipped at 1"][2:] == ["0 of 8", "0 of 8", "0"]
    assert rows["clean batches only"] == tables["noise"]["clean batches only"]
    skipped, overflowed = (int(cell.partition(" of 8")[0]) for cell in tables["noise"]["spikes skipped"][2:4])
    assert skipped + overflowed == 8
    assert picture.stat().st_size > 10_000


# On a CPU, TensorFlow 2.15 multiplies float16 matrices hundreds of times slower than float32 matrices.
@pytest.mark.skipif(not KERAS_3, reason="takes many minutes on TensorFlow 2.15")
def test_branch_learns_in_float16_only_with_the_suggested_scale(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    printed = _printed("digits_ranges", "--seeds=1", "--steps=150", f"--plots={tmp_path / 'pictures'}")
    lines = re.findall(r"^  (float\S+.*?) {2,}(\S+) % ± 0.0$", printed, re.MULTILINE)
    (_, in_float32), (unscaled, without), (scaled, with_scale) = lines
    assert (unscaled, scaled) == ("float16, no loss scale", "float16, loss scale 131072")
    assert float(in_float32) > 75
    assert float(with_scale) > float(in_float32) - 8
    assert float(without) < 30
    pictures = sorted(path.name for path in (tmp_path / "pictures").iterdir() if path.stat().st_size > 10_000)
    assert pictures == ["ranges_after.png", "ranges_before.png"]
