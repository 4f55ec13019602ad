"""Tests of the digits example in a session loop."""

import re
import sys
from types import ModuleType

import numpy as np
import pytest
import tensorflow as tf

from estimator_examples import digits_keras, digits_session

tf1 = tf.compat.v1


def test_a_short_run_skips_first_and_then_learns(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_skipped_step_moves_no_weight(session: tf1.Session) -> None:
    network = digits_session.build(learning_rate=0.1, init_loss_scale=2.0**60)
    session.run(tf1.global_variables_initializer())
    weights = tf1.trainable_variables()
    before = session.run(weights)
    rng = np.random.default_rng(0)
    feed = {
        network.images: rng.uniform(size=(8, 8, 8, 1)),
        network.labels: rng.integers(10, size=8),
        network.training: True,
    }
    session.run(network.train_op, feed)
    for old, new in zip(before, session.run(weights), strict=True):
        np.testing.assert_array_equal(old, new)
    assert session.run(network.optimizer.skipped_steps) == 1


@pytest.mark.graph
def test_the_moving_averages_move_with_every_step(session: tf1.Session) -> None:
    network = digits_session.build(learning_rate=0.1, init_loss_scale=1.0)
    session.run(tf1.global_variables_initializer())
    (mean,) = (v for v in tf1.global_variables() if v.op.name == "net/conv_0/moving_mean")
    images = np.random.default_rng(0).uniform(size=(8, 8, 8, 1))
    feed = {network.images: images, network.labels: np.zeros(8), network.training: True}
    session.run(network.train_op, feed)
    assert (session.run(mean) != 0).any()
    unmoved = session.run(mean)
    session.run(network.loss, {**feed, network.training: False})
    np.testing.assert_array_equal(session.run(mean), unmoved)


@pytest.mark.graph
def test_activations_that_overflow_leave_the_moving_averages_finite(session: tf1.Session) -> None:
    network = digits_session.build(learning_rate=0.1, init_loss_scale=1.0)
    session.run(tf1.global_variables_initializer())
    averages = [v for v in tf1.global_variables() if "/moving_" in v.op.name]
    images = np.full((8, 8, 8, 1), 1e5)  # infinite in float16
    session.run(network.train_op, {network.images: images, network.labels: np.zeros(8), network.training: True})
    assert session.run(network.optimizer.skipped_steps) == 1
    for value in session.run(averages):
        assert np.isfinite(value).all()


def test_without_scikit_learn_the_extra_that_brings_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert digits_session.main([]) == 2
    assert "install tfmp with its extra, e.g. `pip install '.[examples]'` from the clone" in capsys.readouterr().err


@pytest.mark.parametrize(("example", "option"), [(digits_session, "--batch_size"), (digits_keras, "--batch-size")])
def test_a_batch_of_more_images_than_there_are_is_refused(
    example: ModuleType, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    assert example.main([f"{option}=1348"]) == 2
    assert "a batch holds at most the 1347 training images, got 1348." in capsys.readouterr().err


def test_batches_are_shuffled_and_cover_all_images_in_a_pass() -> None:
    digits = digits_session.Digits(np.arange(10.0), np.arange(10))
    batches = digits.batches(5, np.random.default_rng(0))
    labels = [next(batches).labels for _ in range(4)]
    assert sorted(np.concatenate(labels[:2])) == sorted(np.concatenate(labels[2:])) == list(range(10))
    assert not np.array_equal(labels[0], labels[2])


@pytest.mark.parametrize(
    ("option", "value"), [("--steps", "0"), ("--init_loss_scale", "0.5"), ("--learning_rate", "nan")]
)
def test_a_wrong_argument_ends_the_program(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        digits_session.main([option, value])
    assert f"argument {option}: must be " in capsys.readouterr().err
