"""The wrapper around legacy optimizers under tf.estimator, whose heads and canned models take them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

pytestmark = pytest.mark.estimator

_X = np.float32([[4, -32], [16, 8], [-8, 32], [-32, 4]])
_Y = np.int32([[1], [1], [0], [0]])

#: A scale at which the first gradients of `_X` overflow, and the number of steps after which they are applied.
_TOO_HIGH, _STEPS = 2.0**127, 30

#: The variables of a loss scale in a checkpoint.
_SCALE = {"loss_scale", "good_steps", "bad_steps"}


def _inputs(steps: int) -> Callable[[], tf.data.Dataset]:
    """Return the same batch for each step: the steps that are skipped then make no difference to the others."""
    return lambda: tf.data.Dataset.from_tensors(({"x": _X}, _Y)).repeat(steps)


def _config(directory: Path) -> Any:
    return tf.estimator.RunConfig(str(directory), tf_random_seed=1, log_step_count_steps=None, save_summary_steps=None)


def _wrap(inner: Any, scale: float = _TOO_HIGH) -> Any:
    manager = tfmp.ExponentialUpdateLossScaleManager(scale, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return tfmp.LossScaleOptimizer(inner, manager)


def _adam() -> Any:
    return tf.keras.optimizers.legacy.Adam(0.125)


def _values(estimator: Any) -> dict[str, Any]:
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def _assert_equal(values: dict[str, Any], expected: dict[str, Any], of_scale: set[str]) -> None:
    """Assert that a checkpoint has the values of the bare optimizer, under their names, and those of the loss scale."""
    assert values.keys() == expected.keys() | of_scale
    for name, value in expected.items():
        # A checkpoint of Keras also has the names of the objects that it was saved from.
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH":
            np.testing.assert_allclose(values[name], value, rtol=1e-5, err_msg=name)


def _columns() -> list[Any]:
    return [tf.feature_column.numeric_column("x", shape=[2])]


_Make = Callable[[], Any]


def _of_v1() -> Any:
    # Adam would have variables of its own, in the scope of the branch that makes them.
    return tf1.train.MomentumOptimizer(2.0**-10, 0.5)


_CANNED: dict[str, tuple[_Make, Callable[[_Make, Any], Any]]] = {
    "DNNClassifier": (
        _adam,
        lambda make, config: tf.estimator.DNNClassifier([2], _columns(), optimizer=make, config=config),
    ),
    "DNNRegressor": (
        _adam,
        lambda make, config: tf.estimator.DNNRegressor([2], _columns(), optimizer=make, config=config),
    ),
    "LinearClassifier": (
        _adam,
        lambda make, config: tf.estimator.LinearClassifier(_columns(), optimizer=make, config=config),
    ),
    "DNNClassifier of v1": (
        _of_v1,
        lambda make, config: tf1.estimator.DNNClassifier([2], _columns(), optimizer=make, config=config),
    ),
}


def _applied(first: dict[str, Any]) -> int:
    """Return how many of the first steps were applied, by the scale after them."""
    applied = _STEPS - int(np.log2(_TOO_HIGH / first["loss_scale"]))
    assert 0 < applied < _STEPS
    return applied


@pytest.mark.parametrize("name", _CANNED)
def test_canned_estimator_trains_and_goes_on_as_with_the_bare_optimizer(name: str, tmp_path: Path) -> None:
    make, estimator_of = _CANNED[name]
    estimator = estimator_of(lambda: _wrap(make()), _config(tmp_path / "wrapped"))
    estimator.train(_inputs(_STEPS))
    first = _values(estimator)
    applied = _applied(first)
    assert (first["global_step"], first["good_steps"]) == (applied, applied)
    estimator.train(_inputs(2))
    values = _values(estimator)
    assert (values["global_step"], values["good_steps"]) == (applied + 2, applied + 2)
    assert values["loss_scale"] == first["loss_scale"]

    bare = estimator_of(make, _config(tmp_path / "bare"))
    bare.train(_inputs(applied + 2))
    _assert_equal(values, _values(bare), _SCALE)


@pytest.mark.parametrize("is_v1", [False, True], ids=["legacy", "v1"])
def test_two_optimizers_of_a_canned_estimator_have_their_own_scales(is_v1: bool, tmp_path: Path) -> None:
    """Only the network's optimizer overflows here. The global step counts its steps; in v1 every step of training."""
    api, make = (tf1.estimator, _of_v1) if is_v1 else (tf.estimator, _adam)

    def estimator_of(wide: _Make, deep: _Make, directory: Path) -> Any:
        settings = {"linear_optimizer": wide, "dnn_optimizer": deep, "dnn_hidden_units": [2]}
        columns = {"linear_feature_columns": _columns(), "dnn_feature_columns": _columns()}
        return api.DNNLinearCombinedClassifier(**columns, **settings, config=_config(directory))

    estimator = estimator_of(lambda: _wrap(make(), 1024), lambda: _wrap(make()), tmp_path / "wrapped")
    estimator.train(_inputs(_STEPS))
    first = _values(estimator)
    estimator.train(_inputs(2))
    values = _values(estimator)
    applied = _applied(first)
    counted = _STEPS if is_v1 else applied
    assert [first[each] for each in ("global_step", "good_steps", "good_steps_1")] == [counted, applied, _STEPS]
    assert [values[each] for each in ("good_steps", "good_steps_1")] == [applied + 2, _STEPS + 2]
    assert (values["loss_scale"], values["loss_scale_1"]) == (first["loss_scale"], 1024)
    bare = estimator_of(make, make, tmp_path / "bare")
    bare.train(_inputs(1))
    assert values.keys() == set(bare.get_variable_names()) | _SCALE | {f"{name}_1" for name in _SCALE}


@tf.custom_gradient
def _times(x: tf.Tensor, factor: tf.Tensor) -> Any:
    """Return `x` with its gradient times a factor, so that the loss stays finite if the factor is infinite."""
    return tf.identity(x), lambda upstream: (upstream * factor, None)


def _dense(units: int, activation: str | None = None) -> Any:
    # The random initializers of Keras do not heed the seed of Estimator.
    return tf.keras.layers.Dense(units, activation, kernel_initializer="ones")


def _with_head(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: dict[str, Any]) -> Any:
    net = tf.keras.Sequential([_dense(2, "relu"), _dense(1)])
    logits = _times(net(features["x"]), features["factor"])
    opt = params["make"]()
    opt.iterations = tf1.train.get_or_create_global_step()
    return tf.estimator.BinaryClassHead().create_estimator_spec(
        features=features,
        mode=mode,
        labels=labels,
        logits=logits,
        optimizer=opt,
        trainable_variables=net.trainable_variables,
        update_ops=net.updates,
    )


def _factors(*factors: float) -> Callable[[], tf.data.Dataset]:
    rows = ({"x": np.stack([_X] * len(factors)), "factor": np.float32(factors)}, np.stack([_Y] * len(factors)))
    return lambda: tf.data.Dataset.from_tensor_slices(rows)


def test_head_skips_an_overflow_and_the_hook_logs_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrapped = tf.estimator.Estimator(
        _with_head, config=_config(tmp_path / "wrapped"), params={"make": lambda: _wrap(_adam(), 1024)}
    )
    with caplog.at_level(logging.INFO, logger="tfmp"):
        wrapped.train(_factors(1, np.inf, 1), hooks=[tfmp.LossScaleLoggingHook(every_n_steps=1)])
    messages = [record.getMessage() for record in caplog.records if record.name == "tfmp"]
    assert [message.splitlines()[0] for message in messages] == [
        "loss scale 1024, global step 1, steps applied 1, skipped 0 (0 in a row)",
        "loss scale 512, global step 1, steps applied 1, skipped 1 (1 in a row)",
        "overflow in sequential/dense/kernel:0: 4 nan; sequential/dense/bias:0: 2 nan; "
        "sequential/dense_1/kernel:0: 2 nan; sequential/dense_1/bias:0: 1 nan",
        "loss scale 512, global step 2, steps applied 2, skipped 1 (0 in a row)",
        "overflows by variable:",
    ]
    wrapped.train(_factors(1))
    values = _values(wrapped)
    assert [values[name] for name in ("global_step", "loss_scale", "good_steps")] == [3, 512, 2]

    bare = tf.estimator.Estimator(_with_head, config=_config(tmp_path / "bare"), params={"make": _adam})
    bare.train(_factors(1, 1, 1))
    _assert_equal(values, _values(bare), _SCALE)


@pytest.mark.filterwarnings("ignore:`tf.keras.backend.set_learning_phase` is deprecated:UserWarning")
@pytest.mark.parametrize("is_legacy", [True, False], ids=["legacy", "not_legacy"])
def test_model_to_estimator_keeps_the_wrapper(is_legacy: bool, tmp_path: Path) -> None:
    adam = _adam if is_legacy else lambda: tf.keras.optimizers.Adam(0.125)

    def estimator(opt: Any, directory: Path) -> Any:
        model = tf.keras.Sequential([tf.keras.Input([2], name="x"), _dense(2, "relu"), _dense(1)])
        model.compile(opt, "mse")
        return tf.keras.estimator.model_to_estimator(model, config=_config(directory))

    keys = {
        name: f"{holder}/.ATTRIBUTES/VARIABLE_VALUE"
        for name, holder in {
            "global_step": "estimator_global_step",
            **{name: f"optimizer/loss_scale_manager/state/values/{name}" for name in _SCALE},
        }.items()
    }
    wrapped = estimator(_wrap(adam()), tmp_path / "wrapped")
    states = []
    for steps in (_STEPS, 2):
        wrapped.train(_inputs(steps))
        values = _values(wrapped)
        states.append([values[keys[name]] for name in ("global_step", "good_steps", "loss_scale")])
    applied = _applied({"loss_scale": states[0][-1]})
    assert states == [[applied, applied, states[0][-1]], [applied + 2, applied + 2, states[0][-1]]]

    bare = estimator(adam(), tmp_path / "bare")
    bare.train(_inputs(applied + 2))
    _assert_equal(values, _values(bare), {keys[name] for name in _SCALE})
