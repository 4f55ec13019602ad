"""Estimator beside what tests/contract runs in it: canned models and heads, outer managers, replicas, workers."""

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import replica_processes
import tensorflow as tf
import worker_training
from kit import checks
from kit.hosts import State, V1Graph, from_json
from kit.oracle import combined
from replica_training import SCENARIOS
from scenarios import STRUCTURE

import tfmp

tf1 = tf.compat.v1

pytestmark = pytest.mark.estimator

_X = np.float32([[4, -32], [16, 8], [-8, 32], [-32, 4]])
_Y = np.int32([[1], [1], [0], [0]])

#: A scale at which the first gradients of `_X` overflow, and the number of steps after which they are applied.
_TOO_HIGH, _STEPS = 2.0**127, 30

#: The variables of a loss scale in a checkpoint.
_SCALE = {"loss_scale", "good_steps", "bad_steps"}

_Make: TypeAlias = Callable[[], Any]


def _inputs(steps: int) -> Callable[[], tf.data.Dataset]:
    """Return the same batch for each step: the steps that are skipped then make no difference to the others."""
    return lambda: tf.data.Dataset.from_tensors(({"x": _X}, _Y)).repeat(steps)


def _config(directory: Path) -> Any:
    return tf.estimator.RunConfig(str(directory), tf_random_seed=1, log_step_count_steps=None, save_summary_steps=None)


def _manager(scale: float) -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(scale, 1000, 1, decr_ratio=0.5)


def _wrap(inner: Any, scale: float = _TOO_HIGH) -> Any:
    return tfmp.LossScaleOptimizer(inner, _manager(scale))


def _legacy() -> Any:
    return tf.keras.optimizers.legacy.Adam(0.125)


def _not_legacy() -> Any:
    return tf.keras.optimizers.Adam(0.125)


def _of_v1() -> Any:
    # Adam would have variables of its own, in the scope of the branch that makes them.
    return tf1.train.MomentumOptimizer(2.0**-10, 0.5)


def _values(estimator: Any) -> dict[str, Any]:
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def _columns() -> list[Any]:
    return [tf.feature_column.numeric_column("x", shape=[2])]


def _dense(units: int, activation: str | None = None) -> Any:
    # The random initializers of Keras do not heed the seed of Estimator.
    return tf.keras.layers.Dense(units, activation, kernel_initializer="ones")


def _with_head(make: _Make, config: Any) -> Any:
    def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str) -> Any:
        net, opt = tf.keras.Sequential([_dense(2, "relu"), _dense(1)]), make()
        opt.iterations = tf1.train.get_or_create_global_step()
        logits = net(features["x"])
        settings = {"optimizer": opt, "trainable_variables": net.trainable_variables, "update_ops": net.updates}
        head = tf.estimator.BinaryClassHead()
        return head.create_estimator_spec(features=features, mode=mode, labels=labels, logits=logits, **settings)

    return tf.estimator.Estimator(model_fn, config=config)


def _of_model(make: _Make, config: Any) -> Any:
    model = tf.keras.Sequential([tf.keras.Input([2], name="x"), _dense(2, "relu"), _dense(1)])
    model.compile(make(), "mse")
    return tf.keras.estimator.model_to_estimator(model, config=config)


_MODELS: dict[str, tuple[_Make, Callable[[_Make, Any], Any]]] = {
    "DNNClassifier": (
        _legacy,
        lambda make, config: tf.estimator.DNNClassifier([2], _columns(), optimizer=make, config=config),
    ),
    "DNNClassifier of v1": (
        _of_v1,
        lambda make, config: tf1.estimator.DNNClassifier([2], _columns(), optimizer=make, config=config),
    ),
    "head": (_legacy, _with_head),
    "model of Keras, legacy": (_legacy, _of_model),
    "model of Keras": (_not_legacy, _of_model),
}


def _key(values: dict[str, Any], name: str) -> str:
    """Return the key of a variable: in checkpoints of Keras it has more parts than the name."""
    return next(key for key in values if key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").endswith(name))


def _applied(scale: float) -> int:
    """Return how many of the first steps were applied, by the scale after them."""
    applied = _STEPS - int(np.log2(_TOO_HIGH / scale))
    assert 0 < applied < _STEPS
    return applied


@pytest.mark.filterwarnings("ignore:`tf.keras.backend.set_learning_phase` is deprecated:UserWarning")
@pytest.mark.parametrize("name", _MODELS)
def test_estimator_trains_and_goes_on_as_with_the_bare_optimizer(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, estimator_of = _MODELS[name]
    estimator = estimator_of(lambda: _wrap(make()), _config(tmp_path / "wrapped"))
    scale = applied = 0
    for steps in (_STEPS, 2):
        with caplog.at_level("INFO", logger="tfmp"):
            estimator.train(_inputs(steps), hooks=[tfmp.LossScaleLoggingHook(every_n_steps=100)])
        values = _values(estimator)
        found = [values[_key(values, name)] for name in ("loss_scale", "global_step", "good_steps")]
        scale, applied = scale or found[0], applied + 2 if applied else _applied(found[0])
        assert found == [scale, applied, applied]
    assert f"steps applied {applied - 2}, skipped {_STEPS + 2 - applied} (0 in a row)" in caplog.text

    bare = estimator_of(make, _config(tmp_path / "bare"))
    bare.train(_inputs(applied))
    expected = _values(bare)
    assert values.keys() == expected.keys() | {_key(values, name) for name in _SCALE}
    for key, value in expected.items():
        # A checkpoint of Keras also has the names of the objects that it was saved from.
        if key != "_CHECKPOINTABLE_OBJECT_GRAPH":
            np.testing.assert_allclose(values[key], value, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("is_v1", [False, True], ids=["legacy", "v1"])
def test_two_optimizers_of_a_canned_estimator_have_their_own_scales(is_v1: bool, tmp_path: Path) -> None:
    """Only the network's optimizer overflows here. The global step counts its steps; in v1 every step of training."""
    api, make = (tf1.estimator, _of_v1) if is_v1 else (tf.estimator, _legacy)

    def estimator_of(wide: _Make, deep: _Make, directory: Path) -> Any:
        settings = {"linear_optimizer": wide, "dnn_optimizer": deep, "dnn_hidden_units": [2]}
        columns = {"linear_feature_columns": _columns(), "dnn_feature_columns": _columns()}
        return api.DNNLinearCombinedClassifier(**columns, **settings, config=_config(directory))

    estimator = estimator_of(lambda: _wrap(make(), 1024), lambda: _wrap(make()), tmp_path / "wrapped")
    estimator.train(_inputs(_STEPS))
    first = _values(estimator)
    estimator.train(_inputs(2))
    values, applied = _values(estimator), _applied(first["loss_scale"])
    counted = _STEPS if is_v1 else applied
    assert [first[each] for each in ("global_step", "good_steps", "good_steps_1")] == [counted, applied, _STEPS]
    assert [values[each] for each in ("good_steps", "good_steps_1")] == [applied + 2, _STEPS + 2]
    assert (values["loss_scale"], values["loss_scale_1"]) == (first["loss_scale"], 1024)
    bare = estimator_of(make, make, tmp_path / "bare")
    bare.train(_inputs(1))
    assert values.keys() == set(bare.get_variable_names()) | _SCALE | {f"{name}_1" for name in _SCALE}


@pytest.mark.graph
@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")
@pytest.mark.parametrize("is_shared", [False, True], ids=["manager per replica", "manager made outside"])
@pytest.mark.parametrize("bad_replica", [0, 1])
def test_spike_and_overflow_on_one_replica_skip_both_and_the_hook_tells_of_each_once(
    tmp_path: Path,
    two_replicas: tf.distribute.MirroredStrategy,
    caplog: pytest.LogCaptureFixture,
    is_shared: bool,
    bad_replica: int,
) -> None:
    shared = _manager(1024)

    def model_fn(features: tf.Tensor, mode: str) -> Any:
        inner, spikes = tf1.train.GradientDescentOptimizer(0.5), tfmp.SpikeDetector(max_norm=10)
        manager = shared if is_shared else _manager(1024)
        opt = tfmp.LossScaleOptimizer(inner, manager, is_distributed=True, skip_spikes=spikes)
        loss = tf.reduce_sum(tf1.get_variable("w", initializer=1.0) * features)
        train_op = opt.minimize(loss, tf1.train.get_or_create_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    # Each step takes a row, with a column for each replica.
    rows = np.ones([4, 2], np.float32)
    # The bad loss is infinite and not NaN, because Estimator itself stops at NaN.
    rows[1:3, bad_replica] = 99, np.inf
    config = tf.estimator.RunConfig(str(tmp_path), train_distribute=two_replicas, log_step_count_steps=None)
    estimator = tf.estimator.Estimator(model_fn, config=config)
    hook = tfmp.LossScaleLoggingHook(every_n_steps=1, on_stuck="stop")
    with caplog.at_level("INFO", logger="tfmp"):
        estimator.train(lambda: tf.data.Dataset.from_tensor_slices(rows.ravel()), hooks=[hook])
    names = ("loss_scale", "good_steps", "global_step", "w")
    assert [estimator.get_variable_value(name) for name in names] == [512, 0, 1, 0.5]
    # The next call of `train` makes a new graph.
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices(np.ones([4], np.float32)))
    assert [estimator.get_variable_value(name) for name in names] == [512, 2, 3, -0.5]
    *told, stuck, table = [record.getMessage() for record in caplog.records if record.name == "tfmp"]
    # Estimator takes the mean over the replicas.
    assert told == [
        "loss scale 1024, global step 1, steps applied 1, skipped 0 (0 in a row, 0 as spikes), gradient norm 1",
        "loss scale 1024, global step 1, steps applied 1, skipped 1 (1 in a row, 1 as spikes), gradient norm 50",
        "spike: gradient norm 50 above the bound 10, from w:0 (100 %); 1 skipped so far",
        "loss scale 512, global step 1, steps applied 1, skipped 2 (2 in a row, 1 as spikes), gradient norm inf",
        "overflow in w:0: 1 inf",
    ]
    assert "the loss is infinite before it is scaled" in stuck
    assert table.splitlines()[2:] == ["w:0                   1  1 inf"]


#: What one device is fed: Estimator divides the loss by the number of workers.
_OF_ONE_DEVICE = dataclasses.replace(
    SCENARIOS["random"], fed=[combined(STRUCTURE, feds, 0.5) for feds in SCENARIOS["random"].steps()]
)


def _on_two_workers(directory: Path, *options: str) -> tuple[replica_processes.Finished, list[list[State]]]:
    """Return for each worker the state that it starts from, and the state after each step."""
    # A process can run only one training. In a second training Estimator's copy of the strategy would reuse the numbers
    # of the first one's collectives, and fail, with any optimizer (TensorFlow 2.15.1).
    training = " ".join(["random/strategy --host=Estimator", f"--restore={directory / 'workers'}", *options])
    program = [sys.executable, worker_training.__file__, training]
    finished = replica_processes.run(program, directory, 120, replica_processes.two_workers())
    told = finished.states(rf"\d {re.escape(training)}:")
    return finished, [list(map(from_json, states)) for states in told]


def test_two_workers_with_v1_behavior_hold_equal_states_through_random_overflows(tmp_path: Path) -> None:
    finished, of_workers = _on_two_workers(tmp_path, "--v1-behavior")
    assert set(finished.codes) == {0}, str(finished)
    for states in of_workers:
        assert checks.violations(_OF_ONE_DEVICE.course(), states, V1Graph(STRUCTURE, None)) == []


def test_states_are_equal_until_a_worker_dies_and_from_the_checkpoint_before(tmp_path: Path) -> None:
    # Estimator's session treats the loss of a worker as temporary, logs it at the level INFO and retries for ever
    # (TensorFlow 2.15.1). So the test ends the remaining process, which tells at each retry what it starts from.
    died, of_workers = _on_two_workers(tmp_path, "--die=40")
    assert set(died.codes) <= {3, None}, str(died)
    states = checks.train(V1Graph(STRUCTURE, _OF_ONE_DEVICE.rule, _OF_ONE_DEVICE.settings), _OF_ONE_DEVICE.steps())
    expected = [checks.saved(state) for state in states]
    for found in of_workers:
        assert [checks.saved(state) for state in found[:39]] == expected[:39]
    saved = int(tf.train.latest_checkpoint(tmp_path / "workers").rpartition("-")[2])
    assert saved > 0
    # A checkpoint is saved after an applied step.
    taken = [state.steps for state in states].index(saved)

    resumed, of_workers = _on_two_workers(tmp_path, f"--first={taken}")
    assert set(resumed.codes) == {0}, str(resumed)
    for found in of_workers:
        assert [checks.saved(state) for state in found] == expected[taken:]
