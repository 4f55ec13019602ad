"""Runs go on exactly that TensorFlow's own helpers saved, or an earlier tfmp; tests/contract stops every host."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import earlier_runs
import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, skip_before
from kit import checks
from kit.hosts import Host, V1Eager, V1Graph
from kit.oracle import Rule
from kit.structures import STRUCTURES

import tfmp

tf1 = tf.compat.v1

# One overflow alone, two in a row that lower the scale, and one right before the end.
_FACTORS = [float("inf") if step in (1, 4, 5, 8) else 1.0 + step / 7 for step in range(10)]


def _in_monitored_sessions(directory: Path, pieces: list[list[float]]) -> dict[str, Any]:
    """Train in pieces, each in a graph and a session of its own, and return what the last leaves."""
    for factors in pieces:
        with tf.Graph().as_default():
            factor = tf1.placeholder(tf.float32, [])
            w, step = tf1.get_variable("w", initializer=[0.5, -1.0, 2.0]), tf1.train.get_or_create_global_step()
            # The scale grows after steps 2 and 3, and shrinks at the second overflow after that.
            manager = tfmp.ExponentialUpdateLossScaleManager(1024.0, 2, 2, 2, 0.5)
            opt = tfmp.LossScaleOptimizer(tf1.train.AdamOptimizer(tf1.train.polynomial_decay(0.125, step, 20)), manager)
            train_op = opt.minimize(tf.reduce_sum(tf.square(w)) * factor, step)
            each_step = {"save_checkpoint_steps": 1, "save_summaries_steps": None, "log_step_count_steps": None}
            with tf1.train.MonitoredTrainingSession(checkpoint_dir=str(directory), **each_step) as session:
                for value in factors:
                    session.run(train_op, {factor: value})
                values = session.run({variable.op.name: variable for variable in tf1.global_variables()})
    return {name.removesuffix("/value"): value.tolist() for name, value in values.items()}


@pytest.mark.graph
@pytest.mark.parametrize(
    "pieces",
    [
        [_FACTORS[:3], _FACTORS[3:7], _FACTORS[7:]],
        # TensorFlow's hook saves when the global step has moved: what steps 4 and 5 did to the scale is in no
        # checkpoint, and the overflows that it stopped after are repeated.
        [_FACTORS[:6], _FACTORS[4:]],
    ],
    ids=["after applied steps", "after overflows"],
)
def test_monitored_session_resumes_exactly(pieces: list[list[float]], tmp_path: Path) -> None:
    whole = _in_monitored_sessions(tmp_path / "whole", [_FACTORS])
    assert (whole["global_step"], whole["loss_scale"]) == (6, 2048)
    assert _in_monitored_sessions(tmp_path / "pieces", pieces) == whole


@pytest.mark.parametrize("make", [V1Graph, V1Eager])
def test_disk_that_is_full_leaves_a_checkpoint_to_go_on_from(make: type[Host], tmp_path: Path) -> None:
    steps = [[{"position": np.int32([step]), "value": np.float32([_FACTORS[step]])}] for step in range(10)]
    host, resumed = (make(STRUCTURES["million"], Rule()) for _ in range(2))
    host.begin()
    host.train(steps[:5])
    host.save(tmp_path)
    expected = list(map(checks.saved, host.train(steps[5:])[1:]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Less than the weights take: the write fails in the middle, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises((tf.errors.OpError, ValueError)):
            host.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resumed.restore(tmp_path)
    assert list(map(checks.saved, resumed.train(steps[5:])[1:])) == expected
    # The run itself can save again.
    host.save(tmp_path)
    resumed.restore(tmp_path)
    assert checks.saved(resumed.train([])[0]) == expected[-1]


_RECORDINGS = Path(__file__).parent.parent / "recordings" / "earlier"


def _recorded(name: str) -> tuple[list[Any], Path]:
    folder = _RECORDINGS / name
    return json.loads((folder / "expected.json").read_text()), folder / earlier_runs.RUNS[name][1]


def _assert_same(reached: list[Any], expected: list[Any]) -> None:
    tf.nest.assert_same_structure(reached, expected)
    for own, recorded in zip(tf.nest.flatten(reached), tf.nest.flatten(expected), strict=True):
        if isinstance(recorded, float):
            # The order of sums differs between machines.
            np.testing.assert_allclose(own, recorded, rtol=1e-4, atol=1e-7)
        else:
            assert own == recorded


@pytest.mark.parametrize("form", ["", "_checkpoint", "_weights"])
@for_every_keras()
def test_model_of_keras_goes_on_in_the_middle_of_its_window(keras: ModuleType, form: str) -> None:
    skip_before((3, 15), keras, "the file holds layers of Keras 3.15")
    expected, path = _recorded(f"keras{keras.__version__[0]}{form}")
    _assert_same(earlier_runs.of_keras(keras, path, saves=False), expected)


@pytest.mark.parametrize(("name", "run"), [("session", earlier_runs.of_session), ("scaler", earlier_runs.of_scaler)])
def test_checkpoint_goes_on_in_the_middle_of_its_window(name: str, run: Callable[..., list[Any]]) -> None:
    if name == "scaler" and not tf.compat.v1.executing_eagerly_outside_functions():
        pytest.skip("trains eagerly")
    expected, path = _recorded(name)
    _assert_same(run(path, saves=False), expected)
