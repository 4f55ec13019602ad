"""Tests of the digits example with Keras."""

import json
import pathlib
import re
import sys
import types

import example_processes
import keras
import numpy as np
import pytest
import tensorflow as tf

from estimator_examples import digits_keras

PYPROJECT = pathlib.Path(__file__).parents[2] / "pyproject.toml"
KERAS_3 = keras.__version__.startswith("3.")


def _summary(*options: str) -> dict[str, str]:
    """Run the example in a separate process, because it configures devices, and return its summary."""
    pytest.importorskip("sklearn")
    done = example_processes.run("digits_keras", *options)
    assert done.returncode == 0, done.stderr
    _, summary = done.stdout.split("\nSummary\n")
    return dict(re.split(r"  +", line.strip()) for line in summary.splitlines())


def _comparison(*options: str) -> dict[str, tuple[str, str]]:
    """Run the command of `tox run -e digits` with further options, and return Keras' and tfmp's columns."""
    pytest.importorskip("sklearn")
    [defaults] = re.findall(r'digits_keras", { replace = "posargs", default = (\[.*?\])', PYPROJECT.read_text("utf-8"))
    done = example_processes.run("digits_keras", *json.loads(defaults), *options)
    assert done.returncode == 0, done.stderr
    assert f"\nWith the loss scaling of Keras {keras.__version__}:\nEpoch 1/" in done.stdout
    # The reports are in the same stream as Keras' output. tox prints the other stream in red.
    assert "\noverflow in " in done.stdout
    _, comparison = done.stdout.split("\nComparison\n")
    heads, *lines = (re.split(r"  +", line.strip()) for line in comparison.splitlines())
    assert heads == [f"Keras {keras.__version__}", "tfmp"]
    return {name: (stock, ours) for name, stock, ours in lines}


def test_one_replica_learns() -> None:
    summary = _summary()
    assert float(summary.pop("test accuracy").removesuffix("%")) > 90
    assert summary == {
        "loss scale": "32768",
        "steps applied": "210",
        "steps skipped": "0",
        "weights finite": "yes",
        "replicas equal": "there is only one",
    }


def test_overflow_on_the_last_replica_is_skipped_by_all() -> None:
    # The number of test images is not a multiple of four.
    summary = _summary("--replicas=4", "--inject-overflow", "--epochs=3")
    assert float(summary.pop("test accuracy").removesuffix("%")) > 80
    assert summary == {
        "loss scale": "16384",
        "steps applied": "62",
        "steps skipped": "1",
        "weights finite": "yes",
        "replicas equal": "yes",
    }


@pytest.mark.skipif(not KERAS_3, reason="the defect is of Keras 3")
def test_overflow_on_the_last_replica_ends_the_training_of_stock_keras_3_and_not_that_of_tfmp(
    tmp_path: pathlib.Path,
) -> None:
    picture = tmp_path / "picture.png"
    comparison = _comparison("--epochs=3", f"--plot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    stock, ours = (float(accuracy.removesuffix("%")) for accuracy in comparison.pop("test accuracy"))
    assert stock < 30
    assert ours > 80
    assert comparison.pop("loss scale")[1] == "16384"
    assert comparison == {
        "steps applied": ("not counted by Keras", "62"),
        "steps skipped": ("not counted by Keras", "1"),
        "weights finite": ("no", "yes"),
        "replicas equal": ("yes", "yes"),
    }


@pytest.mark.skipif(KERAS_3, reason="Keras 3 has a defect")
@pytest.mark.home("tf215")
def test_overflow_on_the_last_replica_is_skipped_by_stock_keras_2() -> None:
    summary = _summary("--replicas=2", "--inject-overflow", "--epochs=3", "--stock")
    assert float(summary["test accuracy"].removesuffix("%")) > 80
    assert summary["weights finite"] == "yes"
    assert summary["loss scale"] == "16384"


def test_the_last_image_of_one_batch_overflows() -> None:
    images = np.zeros([50, 8, 8, 1], np.float32)
    overflowing = tf.cast(digits_keras.with_overflow(images, batch_size=8), tf.float16).numpy()
    assert set(np.argwhere(overflowing)[:, 0]) == {31}
    assert np.isinf(overflowing[31]).all()
    assert not images.any()


def test_each_replica_is_on_a_gpu_of_its_own_if_gpus_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda devices, **_: made.extend(devices))
    assert digits_keras.strategy_of("gpu", 1) is tf.distribute.get_strategy()
    digits_keras.strategy_of("gpu", 2)
    assert made == ["gpu:0", "gpu:1"]


def test_every_replica_shows_its_own_weights(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        weights = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
    two_replicas.experimental_local_results(weights[1])[1].assign(4.0)
    model = types.SimpleNamespace(weights=weights)
    first, second = digits_keras.weights_of_replicas(model, two_replicas)
    assert [weight.tolist() for weight in first] == [[1, 2], 3]
    assert [weight.tolist() for weight in second] == [[1, 2], 4]


@pytest.mark.parametrize(
    ("second", "finite", "equal"),
    [([1, 2], True, True), ([1, 3], True, False), ([1, np.nan], False, False)],
)
def test_the_outcome_tells_whether_weights_are_finite_and_equal(second: list[float], finite: bool, equal: bool) -> None:
    weights = [[np.float32([1, 2])], [np.float32(second)]]
    outcome = digits_keras.Outcome(accuracy=0.5, loss_scale=1.0, steps=None, weights=weights)
    assert outcome.finite is finite
    assert outcome.equal is equal


def test_replicas_that_hold_the_same_nan_are_equal() -> None:
    nan = np.float32([1, np.nan])
    outcome = digits_keras.Outcome(accuracy=0.1, loss_scale=0.0, steps=None, weights=[[nan], [nan.copy()]])
    assert outcome.equal
    assert not outcome.finite


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas=0"], "argument --replicas: must be 1 or more, got 0."),
        (["--epochs=0"], "argument --epochs: must be 1 or more, got 0."),
        (["--batch-size=many"], "argument --batch-size: must be a whole number, got 'many'."),
        (["--learning-rate=nan"], "argument --learning-rate: must be a finite number above 0, got nan."),
        (["--init-loss-scale=0.5"], "argument --init-loss-scale: must be 1 or more, and finite in float32, got 0.5."),
        (["--seed=-1"], "argument --seed: must be 0 or more, got -1."),
        (["--replicas=3"], "argument --batch-size: must be a multiple of --replicas"),
        (["--device=gpu"], "argument --device: TensorFlow must see a GPU for each replica, got 0."),
    ],
)
def test_a_wrong_argument_ends_the_program(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        digits_keras.main(options)
    assert message in capsys.readouterr().err


def test_without_scikit_learn_the_extra_that_brings_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert digits_keras.main([]) == 2
    assert "install tfmp with its extra, e.g. `pip install '.[examples]'` from the clone" in capsys.readouterr().err
