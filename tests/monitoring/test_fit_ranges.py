"""The ranges of gradients, weights and activations that the callback records, in the `fit` of every Keras there is."""

import importlib
import importlib.util
import math
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

_KERASES = [name for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]
_KEYS = ("gradients_zero", "gradients_lost", "gradients_subnormal")


@pytest.fixture(params=_KERASES)
def keras(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def _model(keras: ModuleType, *, manager: Any = None, learning_rate: float = 0.0, **settings: Any) -> Any:
    """Return a model of one weight, which stays 1 unless there is a learning rate. Its gradient is the target.

    By default its steps are not compiled by XLA, which takes long.
    """
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="last")
    model = keras.Sequential([keras.Input([1]), layer])
    of_compile = {"jit_compile", "steps_per_execution"}
    compiled = {"jit_compile": False} | {name: settings.pop(name) for name in of_compile & settings.keys()}
    manager = manager or tfmp.FixedLossScaleManager(1024)
    opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(learning_rate), manager, **settings)
    model.compile(opt, loss=lambda target, output: target * output, **compiled)
    return model


def _fit(model: Any, targets: Any, *callbacks: Any, **settings: Any) -> dict[str, list[float]]:
    """Fit a model, to one target a step unless told otherwise, and return the history."""
    y = np.float32(targets).reshape(-1, 1)
    settings = {"batch_size": 1, "shuffle": False, "verbose": 0} | settings
    return model.fit(np.ones_like(y), y, callbacks=list(callbacks), **settings).history


def _found(callback: tfmp.LossScaleCallback) -> dict[str, dict[str, dict[str, int]]]:
    """Return what the last recording found, by kinds and names; those of variables without the name of the model."""
    return {
        kind: {"/".join(name.split("/")[-2:]): found.to_dict() for name, found in histograms.items()}
        for kind, histograms in callback.ranges.last.histograms.items()
    }


def _steps(callback: tfmp.LossScaleCallback) -> list[int]:
    return callback.ranges.to_dict()["step"]


class _Recordings(tfmp.LossScaleCallback):
    """Keeps what each recording finds of the gradients."""

    def __init__(self, every_n_steps: int, **settings: Any) -> None:
        super().__init__(ranges_every_n_steps=every_n_steps, **settings)
        self.found: list[dict[str, int]] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        before = len(_steps(self))
        super().on_train_batch_end(batch, logs)
        if len(_steps(self)) > before:
            (gradients,) = self.ranges.last.histograms["gradients"].values()
            self.found.append(gradients.to_dict())


# Multiplied by the scale of 1024, float16 loses the first, and keeps fewer bits of the second.
_LOST, _SUBNORMAL = 2.0**-40, 2.0**-27


def test_logs_of_each_batch_hold_the_shares_of_the_last_look(keras: ModuleType) -> None:
    seen: list[tuple[float, ...]] = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(tuple(logs[key] for key in _KEYS))
    )
    targets = [1, _LOST, 1, _SUBNORMAL, 1, 0, 1, 1]
    # As users compile it: Keras 3 compiles the steps by XLA.
    model = _model(keras, jit_compile="auto" if keras.__version__.startswith("3.") else None)
    _fit(model, targets, tfmp.LossScaleCallback(ranges_every_n_steps=2), record)
    assert all(math.isnan(value) for value in seen[0])
    assert seen[1:] == [(0, 1, 0)] * 2 + [(0, 0, 1)] * 2 + [(1, 0, 0)] * 2 + [(0, 0, 0)]


@pytest.mark.parametrize("verbose", [0, 2])
def test_history_holds_the_last_look_of_every_epoch(keras: ModuleType, verbose: int) -> None:
    callback = tfmp.LossScaleCallback(ranges_every_n_steps=2)
    history = _fit(_model(keras), [_LOST], callback, epochs=3, verbose=verbose)
    assert set(history) == {"loss", "loss_scale", "skipped_steps", "gradient_norm", *_KEYS}
    assert [math.isnan(value) for value in history["gradients_lost"]] == [True, False, False]
    assert history["gradients_lost"][1:] == [1, 1]
    assert history["gradients_zero"][1:] == history["gradients_subnormal"][1:] == [0, 0]


def test_nothing_was_seen_before_the_first_look(keras: ModuleType) -> None:
    callback = tfmp.LossScaleCallback(ranges_every_n_steps=100)
    history = _fit(_model(keras), [1, 1], callback)
    assert all(math.isnan(history[key][0]) for key in _KEYS)
    assert callback.ranges.last is None


def test_logs_have_no_shares_unless_asked_for(keras: ModuleType) -> None:
    history = _fit(_model(keras), [1], tfmp.LossScaleCallback())
    assert set(history) == {"loss", "loss_scale", "skipped_steps", "gradient_norm"}


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4]), (7, [])])
def test_looks_come_every_n_steps_over_epochs(keras: ModuleType, every: int, expected: list[int]) -> None:
    callback = _Recordings(every)
    _fit(_model(keras), [1, 2, 4], callback, epochs=2)
    assert _steps(callback) == expected
    assert callback.found == [{str((step - 1) % 3): 1} for step in expected]


def test_looks_at_steps_of_one_execution_are_at_its_first_step(keras: ModuleType) -> None:
    callback = _Recordings(4)
    _fit(_model(keras, steps_per_execution=2), 2.0 ** np.arange(1, 13), callback)
    assert callback.found == [{"5": 1}, {"9": 1}]


@pytest.mark.parametrize("every", [1, 2, 4])
def test_each_execution_of_n_steps_or_more_is_looked_at(keras: ModuleType, every: int) -> None:
    callback = _Recordings(every)
    _fit(_model(keras, steps_per_execution=4), np.ones([24]), callback)
    # Whether the first one is looked at is not said.
    assert np.diff(_steps(callback)).tolist() in ([4] * 4, [4] * 5)


@pytest.mark.essential
def test_model_that_was_fitted_before_without_looks_is_looked_at(keras: ModuleType) -> None:
    model, callback = _model(keras), _Recordings(2)
    _fit(model, [1, 1])
    _fit(model, [1, 1], tfmp.LossScaleCallback())
    _fit(model, [8, 4, 2], callback)
    # `fit` counts from its beginning, and the number is that of the optimizer's steps.
    assert (_steps(callback), callback.found) == ([6], [{"2": 1}])
    # One more callback, and one more `fit` with the same one.
    other = _Recordings(1)
    _fit(model, [2], other, callback)
    _fit(model, [2, 4], callback)
    assert (_steps(other), other.found) == ([8], [{"1": 1}])
    assert (_steps(callback), callback.found) == ([6, 10], [{"2": 1}, {"2": 1}])


def test_step_has_its_loss_scale_and_its_weights(keras: ModuleType) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(4, 1, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    callback = tfmp.LossScaleCallback(ranges_every_n_steps=1)
    model = _model(keras, manager=manager, learning_rate=1.0)
    _fit(model, [-1, 2.0**126, -2], callback)
    found = callback.ranges.to_dict()
    assert (found["step"], found["loss_scale"]) == ([1, 2, 3], [4, 8, 4])
    assert (found["gradients_normal"], found["gradients_nonfinite"]) == ([1, 0, 1], [0, 1, 0])
    # The weight is 1 + 1 + 2 after the last step.
    assert _found(callback) == {"gradients": {"last/kernel": {"1": 1}}, "weights": {"last/kernel": {"2": 1}}}


def test_windows_are_looked_at_where_they_end(keras: ModuleType) -> None:
    callback = _Recordings(1)
    _fit(_model(keras, accumulation_steps=2), [1, 3, 8, 24, 1], callback)
    assert (_steps(callback), callback.found) == ([1, 2], [{"1": 1}, {"4": 1}])


def test_gradients_of_both_replicas_are_looked_at(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        model = _model(keras)
    callback = _Recordings(2)
    history = _fit(model, [1, 1, 0, 0, 1, 1, _LOST, _LOST], callback, batch_size=2)
    (found,) = callback.ranges.last.histograms["gradients"].values()
    assert (_steps(callback), callback.found[0], found.total) == ([2, 4], {"zero": 2}, 2)
    assert [history[key] for key in _KEYS] == [[0], [1], [0]]


def test_batch_is_run_on_one_replica(keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        model = _model(keras)
    callback = _Recordings(2, ranges_batch=(np.full([4, 1], 2, np.float32), np.ones([4, 1], np.float32)))
    history = _fit(model, [1, 1, 0, 0], callback, batch_size=2)
    assert _found(callback) == {
        "gradients": {"last/kernel": {"zero": 2}},
        "weights": {"last/kernel": {"0": 1}},
        "activations": {"last": {"1": 4}},
        "activation_gradients": {"last": {"-2": 4}},
    }
    assert history["gradients_zero"] == [2 / 6]


@pytest.mark.essential
def test_batch_shows_activations_by_their_layers(keras: ModuleType) -> None:
    def layer(name: str) -> Any:
        return keras.layers.Dense(2, use_bias=False, kernel_initializer="ones", name=name)

    model = keras.Sequential([keras.Input([1]), layer("first"), layer("second")])
    opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.0), tfmp.FixedLossScaleManager(2.0**10))
    model.compile(opt, loss=lambda target, output: target * output, jit_compile=False)
    batch = (np.float32([[4], [0]]), np.full([2, 2], 2.0**-40, np.float32))
    callback = tfmp.LossScaleCallback(ranges_every_n_steps=1, ranges_batch=batch)
    ones = np.ones([1, 1], np.float32)
    history = model.fit(ones, np.ones([1, 2], np.float32), verbose=0, callbacks=[callback]).history
    # The mean of the loss is over 2 examples with 2 outputs each in the batch, and over 2 outputs in the step.
    assert _found(callback) == {
        "gradients": {"first/kernel": {"0": 2}, "second/kernel": {"-1": 4}},
        "weights": {"first/kernel": {"0": 2}, "second/kernel": {"0": 4}},
        "activations": {"first": {"2": 2, "zero": 2}, "second": {"3": 2, "zero": 2}},
        "activation_gradients": {"first": {"-41": 4}, "second": {"-42": 4}},
    }
    assert history["gradients_lost"] == [8 / 14]


def _training_of_many_layers(keras: ModuleType, callbacks: list[Any]) -> list[np.ndarray]:
    """Return all that a training leaves in a model with statistics and random numbers, and what it draws next."""
    keras.utils.set_random_seed(1)
    float16 = {"dtype": "mixed_float16"}
    layers = [
        keras.layers.Dense(8, name="dense", **float16, kernel_initializer="ones"),
        keras.layers.BatchNormalization(name="norm", **float16),
        keras.layers.GaussianNoise(0.25, name="noise", seed=3, **float16),
        keras.layers.Dropout(0.5, name="dropout", seed=2, **float16),
        keras.layers.Dense(1, name="last", **float16, kernel_initializer="ones"),
    ]
    model = keras.Sequential([keras.Input([4]), *layers])
    manager = tfmp.ExponentialUpdateLossScaleManager(2.0**10, 4)
    model.compile(tfmp.LossScaleOptimizer(keras.optimizers.Adam(0.5), manager), "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x, y = np.float32(rng.normal(size=[24, 4])), np.float32(rng.normal(size=[24, 1]))
    settings = {"batch_size": 4, "epochs": 2, "verbose": 0, "callbacks": callbacks}
    history = model.fit(x, y, **settings).history
    metrics = [np.float32(history["loss"]), np.float32(history["mae"])]
    optimizer_variables = model.optimizer.variables
    optimizer_variables = optimizer_variables() if callable(optimizer_variables) else optimizer_variables
    held = [np.asarray(each.numpy()) for each in [*model.variables, *optimizer_variables]]
    return [*metrics, *held, tf.random.uniform([3]).numpy()]


def test_looks_change_nothing_of_the_training(keras: ModuleType) -> None:
    rng = np.random.default_rng(7)
    batch = (np.float32(rng.normal(size=[5, 4])), np.float32(rng.normal(size=[5, 1])))
    callback = tfmp.LossScaleCallback(ranges_every_n_steps=2, ranges_batch=batch)
    expected, found = (_training_of_many_layers(keras, callbacks) for callbacks in ([], [callback]))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert _steps(callback) == [2, 4, 6, 8, 10, 12]
    activations = callback.ranges.last.histograms["activations"]
    assert {name: each.total for name, each in activations.items()} == {
        "dense": 40,
        "norm": 40,
        "noise": 40,
        "dropout": 40,
        "last": 5,
    }


def _scaler_model(keras: ModuleType, scaler: tfmp.GradScaler, names: tuple[str, str]) -> Any:
    """Return a model whose `train_step` trains two weights, the second with twice the gradient of the first."""

    class Model(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            # In a tuple, because Keras would track the scaler as an attribute.
            self._train = (scaler, [tf.Variable(0.0, name=name) for name in names])

        def train_step(self, batch: Any) -> dict[str, Any]:
            scaler, (first, second) = self._train
            grad = scaler.scale(tf.reduce_mean(batch))
            scaler.step(self.optimizer, [(grad, first), (2 * grad, second)])
            scaler.update()
            return {"loss": tf.constant(0.0)}

    model = Model()
    model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    return model


def _fit_scaler_model(model: Any, grads: list[float], callback: Any) -> dict[str, list[float]]:
    return model.fit(tf.constant(grads), batch_size=1, shuffle=False, verbose=0, callbacks=[callback]).history


def test_steps_of_a_scaler_are_looked_at(keras: ModuleType) -> None:
    scaler = tfmp.GradScaler(8)
    callback = tfmp.LossScaleCallback(scaler=scaler, ranges_every_n_steps=2)
    history = _fit_scaler_model(_scaler_model(keras, scaler, ("one", "two")), [1.0, math.inf, 0.0, 4.0], callback)
    found = callback.ranges.to_dict()
    assert (found["step"], found["loss_scale"]) == ([2, 4], [8, 4])
    assert found["gradients_nonfinite"] == [1, 0]
    gradients = callback.ranges.last.histograms["gradients"]
    assert {name: each.to_dict() for name, each in gradients.items()} == {"one": {"2": 1}, "two": {"3": 1}}
    assert [history[key] for key in _KEYS] == [[0], [0], [0]]


def test_variables_of_one_name_are_counted_together(keras: ModuleType) -> None:
    scaler = tfmp.GradScaler(8)
    callback = tfmp.LossScaleCallback(scaler=scaler, ranges_every_n_steps=1)
    _fit_scaler_model(_scaler_model(keras, scaler, ("same", "same")), [1.0], callback)
    gradients = callback.ranges.last.histograms["gradients"]
    assert {name: each.to_dict() for name, each in gradients.items()} == {"same": {"0": 1, "1": 1}}


def test_model_without_a_loss_is_refused_for_a_batch(keras: ModuleType) -> None:
    class OwnStep(keras.Sequential):  # type: ignore[name-defined]
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, _ = batch
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(tf.reduce_sum(self(x)))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": tf.constant(0.0)}

    model = OwnStep([keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.0), tfmp.FixedLossScaleManager(8)))
    callback = _Recordings(1)
    _fit(model, [1], callback)
    assert callback.found == [{"0": 1}]
    ones = np.ones([1, 1], np.float32)
    with pytest.raises(ValueError, match=r"No loss to compute|compiled without a loss"):
        _fit(model, [1], tfmp.LossScaleCallback(ranges_every_n_steps=1, ranges_batch=(ones, ones)))


def test_model_that_is_built_by_its_first_step_is_looked_at(keras: ModuleType) -> None:
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="last")])
    opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.0), tfmp.FixedLossScaleManager(8))
    model.compile(opt, loss=lambda target, output: target * output, jit_compile=False)
    callback = _Recordings(1)
    _fit(model, [1, 4], callback)
    assert (_steps(callback), callback.found) == ([1, 2], [{"0": 1}, {"2": 1}])


def test_model_that_needs_no_scaling_is_not_looked_at(keras: ModuleType) -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse", jit_compile=False)
    callback = tfmp.LossScaleCallback(ranges_every_n_steps=1)
    assert set(_fit(model, [1, 1], callback)) == {"loss"}
    assert callback.ranges.last is None


def test_batch_without_an_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="ranges_batch is looked at every ranges_every_n_steps steps: pass that, too"):
        tfmp.LossScaleCallback(ranges_batch=(np.ones([1, 1]), np.ones([1, 1])))


def test_ranges_without_an_interval_are_refused() -> None:
    with pytest.raises(ValueError, match="no ranges are looked at: pass ranges_every_n_steps to LossScaleCallback"):
        _ = tfmp.LossScaleCallback().ranges


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (0, ValueError, "ranges_every_n_steps must be a whole number from 1 to 2**31 - 1, got 0."),
        (-3, ValueError, "ranges_every_n_steps must be a whole number from 1 to 2**31 - 1, got -3."),
        (1.5, ValueError, "ranges_every_n_steps must be a whole number from 1 to 2**31 - 1, got 1.5."),
        ("10", TypeError, "ranges_every_n_steps must be a number, got '10' of type str."),
        (True, TypeError, "ranges_every_n_steps must be a number, got True of type bool."),
    ],
)
def test_bad_interval_of_looks_is_refused(bad: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        tfmp.LossScaleCallback(ranges_every_n_steps=bad)
