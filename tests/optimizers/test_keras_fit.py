"""`fit` with the wrapper in every Keras: its settings, and Keras' own callbacks, which find what a bare one has."""

import contextlib
import glob
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import kerases
import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, dense_model, fit_linear, for_every_keras, linear_model, optimizer, values, wrap

import tfmp


# Keras 3.5 warns by itself with steps_per_execution.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@for_every_keras()
def test_fit_of_several_steps_at_once_skips_those_that_overflow_and_averages_the_others(keras: ModuleType) -> None:
    options = {"momentum": 0.5, "use_ema": True, "ema_momentum": 0.5}
    opt = wrap(optimizer(keras, **options))
    model, plain_model = (
        linear_model(keras, each, steps_per_execution=2) for each in (opt, optimizer(keras, **options))
    )
    fit_linear(model, [1, math.inf, 2, math.nan, -math.inf, -4])
    fit_linear(plain_model, [1, 2, -4])
    assert values(model.weights) == values(plain_model.weights)
    assert (float(opt.loss_scale), int(opt.applied_steps), int(opt.skipped_steps)) == (SCALE / 8, 3, 3)


@contextlib.contextmanager
def _mixed_float16(keras: ModuleType) -> Iterator[None]:
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")


@kerases.for_every_kind
def test_compile_under_a_mixed_policy_does_not_wrap_again_and_batches_are_steps(
    keras: ModuleType, optimizers: ModuleType
) -> None:
    opt = wrap(optimizers.SGD(0.5))
    with _mixed_float16(keras):
        model = linear_model(keras, opt)
    assert model.optimizer is opt
    for target in (2.0, math.inf):
        model.train_on_batch(np.ones([1, 1]), np.full([1, 1], target))
    assert (values(model.weights), int(opt.skipped_steps)) == ([[[-1]]], 1)


@pytest.mark.filterwarnings("ignore:.*does not have any trainable weights:UserWarning")
@kerases.for_every_kind
def test_model_without_trainable_weights_takes_no_step(keras: ModuleType, optimizers: ModuleType) -> None:
    model = keras.Sequential([keras.Input([1]), keras.layers.Rescaling(2.0)])
    model.compile(wrap(optimizers.SGD(0.5)), "mse")
    assert model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0).history["loss"] == [1]
    assert (int(model.optimizer.iterations), int(model.optimizer.applied_steps)) == (0, 0)


def _fit(keras: ModuleType, inner: Any, wraps: bool, callbacks: list[Any]) -> dict[str, list[float]]:
    model = dense_model(keras, tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE)) if wraps else inner)
    x = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(8, 3)
    history = model.fit(x, x[:, :1], epochs=3, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
    weights = {f"weight {index}": weight.tolist() for index, weight in enumerate(model.get_weights())}
    rates = [float(each.learning_rate) for each in getattr(inner, "optimizers", [inner])]
    return {"learning_rates": rates, **history.history, **weights}


_CALLBACKS: dict[str, Callable[[ModuleType], Any]] = {
    "scheduler": lambda keras: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    "plateau": lambda keras: keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=0, min_delta=1e9, cooldown=0
    ),
    "averages": lambda keras: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
}


@pytest.mark.parametrize("name", ["Adam", "MultiOptimizer"])
@pytest.mark.parametrize("callback", _CALLBACKS)
@for_every_keras()
def test_callbacks_do_what_they_do_without_a_wrapper(keras: ModuleType, callback: str, name: str) -> None:
    if not hasattr(keras.callbacks, "SwapEMAWeights") and callback == "averages":
        pytest.skip("Keras 2 has no such callback")

    def make() -> Any:
        made = optimizer(keras, name, use_ema=True, ema_momentum=0.5)
        for number, each in enumerate(getattr(made, "optimizers", [])):
            each.name = f"optimizer_{number}"
        return made

    try:
        bare = _fit(keras, make(), False, [_CALLBACKS[callback](keras)])
    except (ValueError, AttributeError, TypeError) as error:
        if name == "Adam":
            raise
        pytest.skip(f"fails in Keras {keras.__version__} without a wrapper too: {error}")
    wrapped = _fit(keras, make(), True, [_CALLBACKS[callback](keras)])
    assert list(wrapped) == list(bare)
    for each, value in bare.items():
        np.testing.assert_allclose(wrapped[each], value, rtol=1e-5, atol=1e-6, err_msg=each)
    assert callback == "averages" or bare["learning_rates"][0] < 0.5


@for_every_keras("keras3")
def test_only_a_wrapped_multi_optimizer_has_optimizers(keras: ModuleType) -> None:
    multi = optimizer(keras, "MultiOptimizer")
    opt = tfmp.LossScaleOptimizer(multi)
    assert opt.optimizers is multi.optimizers
    with pytest.raises(AttributeError, match="Learning rate cannot be accessed on a MultiOptimizer"):
        _ = opt.learning_rate
    assert not hasattr(tfmp.LossScaleOptimizer(optimizer(keras)), "optimizers")


@pytest.mark.parametrize("schedules", [True, False])
@for_every_keras()
def test_tensorboard_shows_the_learning_rate(keras: ModuleType, schedules: bool, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader", exc_type=ImportError)
    rate = keras.optimizers.schedules.ExponentialDecay(0.25, 2, 0.5, staircase=True) if schedules else 0.25

    def written(wraps: bool) -> dict[str, list[Any]]:
        logs = str(tmp_path / str(wraps))
        _fit(keras, optimizer(keras, learning_rate=rate), wraps, [keras.callbacks.TensorBoard(logs)])
        shown: dict[str, list[Any]] = {}
        events = (event for file in glob.glob(f"{logs}/train/*") for event in loader.EventFileLoader(file).Load())
        for value in (each for event in events for each in event.summary.value):
            shown.setdefault(value.tag, []).append(list(value.tensor.float_val))
        return shown

    bare, wrapped = written(False), written(True)
    assert wrapped["epoch_learning_rate"] if schedules else True
    assert wrapped.get("epoch_learning_rate") == bare.get("epoch_learning_rate")
    assert list(wrapped) == list(bare)


@pytest.mark.graph
@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("kind", ["legacy", "tf1"])
@pytest.mark.parametrize(
    ("wrapped", "fed", "weight", "scale"),
    [
        (wrap, [1.0, math.inf, -4.0, 1.0], 1, 512),
        (lambda inner: tfmp.LossScaleOptimizer(inner, kerases.Halving()), [1.0, math.inf, -4.0, 1.0], 1, 512),
        (
            lambda inner: wrap(inner, accumulation_steps=2, skip_spikes=tfmp.SpikeDetector(max_norm=100.0)),
            [1.0, 3.0, 500.0, 500.0, -4.0, -2.0],
            0.5,
            1024,
        ),
    ],
    ids=["rule", "user's manager", "window and spikes"],
)
@for_every_keras("keras2", "tf_keras")
def test_fit_initializes_what_tfmp_keeps_where_keras_2_builds_a_graph(
    keras: ModuleType, wrapped: Callable[[Any], Any], fed: list[float], weight: float, scale: float, kind: str
) -> None:
    opt = wrapped(
        (keras.optimizers.legacy.SGD if kind == "legacy" else tf.compat.v1.train.GradientDescentOptimizer)(0.5)
    )
    model = linear_model(keras, opt)
    fit_linear(model, fed)
    assert (float(model.get_weights()[0].item()), keras.backend.get_value(opt.loss_scale)) == (weight, scale)


@pytest.mark.graph
@pytest.mark.usefixtures("session")
@for_every_keras("keras2", "tf_keras")
def test_compile_in_a_graph_does_not_wrap_again_and_hyperparameters_are_those_of_the_inner_optimizer(
    keras: ModuleType,
) -> None:
    opt = wrap(keras.optimizers.legacy.Adam(0.5))
    opt.beta_1 = 0.25
    assert np.isclose(keras.backend.get_value(opt.inner_optimizer.beta_1), 0.25)
    assert opt.lr is opt.inner_optimizer.lr
    assert {"beta_1", "lr"} <= set(dir(opt))
    if not tf.compat.v1.resource_variables_enabled():
        pytest.skip("after disable_v2_behavior() Keras refuses a global policy")
    with _mixed_float16(keras):
        model = linear_model(keras, opt)
        fit_linear(model, [1.0, math.inf])
    assert (model.optimizer is opt, keras.backend.get_value(opt.loss_scale)) == (True, 512)
