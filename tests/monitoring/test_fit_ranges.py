"""What only the callback records: ranges in the logs of `fit`, of activations, over epochs, executions and replicas."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reporters import EVERY_KERAS, as_users_compile_it, fit, fit_model, kinds

import tfmp

_KEYS = ("gradients_zero", "gradients_lost", "gradients_subnormal")


def _model(keras: ModuleType, manager: Any = None, **settings: Any) -> Any:
    """Return a model of one weight, which is 1 at first and whose gradient is the target."""
    return fit_model(keras, manager or tfmp.FixedLossScaleManager(1024), inputs=1, **settings)


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


@EVERY_KERAS
def test_logs_of_each_batch_and_the_history_hold_the_shares_of_the_last_look(keras: ModuleType) -> None:
    seen: list[tuple[float, ...]] = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(tuple(logs[key] for key in _KEYS))
    )
    targets = [1, _LOST, 1, _SUBNORMAL, 1, 0, 1, 1]
    # As users compile it: Keras 3 compiles the steps by XLA.
    model = _model(keras, jit_compile=as_users_compile_it(keras))
    fit(model, targets, tfmp.LossScaleCallback(ranges_every_n_steps=2), record)
    # Nothing was seen before the first look.
    assert all(math.isnan(value) for value in seen[0])
    assert seen[1:] == [(0, 1, 0)] * 2 + [(0, 0, 1)] * 2 + [(1, 0, 0)] * 2 + [(0, 0, 0)]
    # Keras 2 does not read the logs of a batch then.
    history = fit(model, [_LOST], tfmp.LossScaleCallback(ranges_every_n_steps=2), epochs=3, verbose=2)
    assert set(history) == {"loss", "loss_scale", "skipped_steps", "gradient_norm", *_KEYS}
    assert math.isnan(history["gradients_lost"][0])
    assert [history[key][1:] for key in _KEYS] == [[0, 0], [1, 1], [0, 0]]


@EVERY_KERAS
@pytest.mark.parametrize(("every", "together"), [(1, 4), (2, 4), (4, 4), (8, 4), (8, 1)])
def test_looks_come_every_n_steps_over_epochs_at_the_first_step_of_an_execution(
    keras: ModuleType, every: int, together: int
) -> None:
    callback = _Recordings(every)
    fit(_model(keras, steps_per_execution=together), 2.0 ** np.arange(12), callback, epochs=2)
    looks = [8, 16, 24] if together == 1 else [5, 9, 13, 17, 21] if every < 8 else [9, 17]
    # Whether the first execution is looked at is not said.
    assert _steps(callback)[-len(looks) :] == looks
    assert callback.found[-len(looks) :] == [{str((step - 1) % 12): 1} for step in looks]


@EVERY_KERAS
def test_model_that_was_fitted_before_without_looks_is_looked_at(keras: ModuleType) -> None:
    model, callback = _model(keras), _Recordings(2)
    fit(model, [1, 1])
    fit(model, [1, 1], tfmp.LossScaleCallback())
    fit(model, [8, 4, 2], callback)
    # `fit` counts from its beginning, and the number is that of the optimizer's steps.
    assert (_steps(callback), callback.found) == ([6], [{"2": 1}])
    # One more callback, and one more `fit` with the same one.
    other = _Recordings(1)
    fit(model, [2], other, callback)
    fit(model, [2, 4], callback)
    assert (_steps(other), other.found) == ([8], [{"1": 1}])
    assert (_steps(callback), callback.found) == ([6, 10], [{"2": 1}, {"2": 1}])


@EVERY_KERAS
def test_windows_are_looked_at_where_they_end_with_their_scale_and_their_weights(keras: ModuleType) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(4, 1, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    callback = _Recordings(1)
    fit(_model(keras, manager, learning_rate=1.0, accumulation_steps=2), [-1, 1, 8, 2.0**126, -1, -5, 1], callback)
    assert (_steps(callback), callback.found[::2]) == ([1, 2, 3], [{"zero": 1}, {"1": 1}])
    assert callback.ranges.to_dict()["loss_scale"] == [4, 8, 4]
    # The weight is 1 + 3 after the last step.
    assert kinds(callback.ranges)["weights"] == {"last/kernel": {"2": 1}}


@EVERY_KERAS
def test_gradients_of_both_replicas_and_a_batch_on_one_are_looked_at(
    keras: ModuleType, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        model = _model(keras)
    callback = _Recordings(2, ranges_batch=(np.full([4, 1], 2, np.float32), np.ones([4, 1], np.float32)))
    history = fit(model, [1, 1, 0, 0, 1, 1, _LOST, _LOST], callback, batch_size=2)
    assert (_steps(callback), callback.found[0]) == ([2, 4], {"zero": 2})
    found = kinds(callback.ranges)
    assert [sum(each.values()) for each in found.pop("gradients").values()] == [2]
    assert found == {
        "weights": {"last/kernel": {"0": 1}},
        "activations": {"last": {"1": 4}},
        "activation_gradients": {"last": {"-2": 4}},
    }
    # The shares are those of weights and activations together.
    assert [history[key] for key in _KEYS] == [[0], [2 / 6], [0]]


@EVERY_KERAS
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
    assert kinds(callback.ranges) == {
        "gradients": {"first/kernel": {"0": 2}, "second/kernel": {"-1": 4}},
        "weights": {"first/kernel": {"0": 2}, "second/kernel": {"0": 4}},
        "activations": {"first": {"2": 2, "zero": 2}, "second": {"3": 2, "zero": 2}},
        "activation_gradients": {"first": {"-41": 4}, "second": {"-42": 4}},
    }
    assert history["gradients_lost"] == [8 / 14]


@EVERY_KERAS
def test_looks_change_nothing_of_the_training(keras: ModuleType) -> None:
    rng = np.random.default_rng(7)
    x, y, *batch = (np.float32(rng.normal(size=shape)) for shape in ([24, 4], [24, 1], [5, 4], [5, 1]))

    def trained(*callbacks: Any) -> list[np.ndarray]:
        """Return all that a training leaves in a model with statistics and random numbers, and what it draws next."""
        keras.utils.set_random_seed(1)
        with tfmp.precision("O2"):
            first, last = (keras.layers.Dense(size, kernel_initializer="ones") for size in (8, 1))
            random = [keras.layers.GaussianNoise(0.25, seed=3), keras.layers.Dropout(0.5, seed=2)]
            model = keras.Sequential([keras.Input([4]), first, keras.layers.BatchNormalization(), *random, last])
        manager = tfmp.ExponentialUpdateLossScaleManager(2.0**10, 4)
        model.compile(tfmp.LossScaleOptimizer(keras.optimizers.Adam(0.5), manager), "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=list(callbacks)).history
        variables = model.optimizer.variables
        held = [*model.variables, *(variables() if callable(variables) else variables)]
        losses = [np.float32(history[name]) for name in ("loss", "mae")]
        return [*losses, *(np.asarray(each.numpy()) for each in held), tf.random.uniform([3]).numpy()]

    callback = tfmp.LossScaleCallback(ranges_every_n_steps=2, ranges_batch=tuple(batch))
    for one, other in zip(trained(callback), trained(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert _steps(callback) == [2, 4, 6, 8, 10, 12]
    totals = [each.total for each in callback.ranges.last.histograms["activations"].values()]
    assert totals == [40, 40, 40, 40, 5]


@EVERY_KERAS
def test_model_without_a_loss_is_refused_for_a_batch(keras: ModuleType) -> None:
    class OwnStep(keras.Sequential):  # type: ignore[name-defined]
        def train_step(self, batch: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(tf.reduce_sum(self(batch[0])))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": tf.constant(0.0)}

    model = OwnStep([keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.0), tfmp.FixedLossScaleManager(8)))
    callback, ones = _Recordings(1), np.ones([1, 1], np.float32)
    fit(model, [1], callback)
    assert callback.found == [{"0": 1}]
    with pytest.raises(ValueError, match=r"No loss to compute|compiled without a loss"):
        fit(model, [1], tfmp.LossScaleCallback(ranges_every_n_steps=1, ranges_batch=(ones, ones)))


@EVERY_KERAS
def test_model_that_is_built_by_its_first_step_is_looked_at(keras: ModuleType) -> None:
    callback = _Recordings(1)
    fit(fit_model(keras, tfmp.FixedLossScaleManager(8), inputs=None), [1, 4], callback)
    assert (_steps(callback), callback.found) == ([1, 2], [{"0": 1}, {"2": 1}])
