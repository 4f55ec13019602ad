"""Keras' own callbacks find in a wrapped optimizer what they find in a bare one."""

import glob
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kerases import SCALE, dense_model, for_every_keras, optimizer

import tfmp

# Of NumPy 2, where Keras makes an array of a variable.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def _fit(keras: ModuleType, inner: Any, wraps: bool, callbacks: list[Any]) -> dict[str, list[float]]:
    model = dense_model(keras, tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(SCALE)) if wraps else inner)
    x = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(8, 3)
    history = model.fit(x, x[:, :1], epochs=3, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
    weights = {f"weight {index}": weight.tolist() for index, weight in enumerate(model.get_weights())}
    return {"learning_rates": list(map(float, _rates(inner))), **history.history, **weights}


def _rates(inner: Any) -> list[Any]:
    return [each.learning_rate for each in getattr(inner, "optimizers", [inner])]


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if list(one) != list(other):
        return False
    return all(np.allclose(one[name], other[name], rtol=1e-5, atol=1e-6) for name in one)


def _scheduler(keras: ModuleType) -> Any:
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)


def _plateau(keras: ModuleType) -> Any:
    return keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1e9, cooldown=0)


def _averages(keras: ModuleType) -> Any:
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)


@pytest.mark.parametrize("callback", [_scheduler, _plateau])
@for_every_keras()
def test_callbacks_set_the_learning_rate(keras: ModuleType, callback: Callable[[ModuleType], Any]) -> None:
    bare, wrapped = (_fit(keras, optimizer(keras, "Adam"), wraps, [callback(keras)]) for wraps in (False, True))
    assert _same(bare, wrapped)
    assert bare["learning_rates"][0] < 0.5


@pytest.mark.parametrize("callback", [_scheduler, _plateau, _averages])
@for_every_keras("keras3")
def test_callbacks_set_the_learning_rates_inside_a_multi_optimizer(
    keras: ModuleType, callback: Callable[[ModuleType], Any]
) -> None:
    def make() -> Any:
        multi = optimizer(keras, "MultiOptimizer", use_ema=True, ema_momentum=0.5)
        for number, each in enumerate(multi.optimizers):
            each.name = f"optimizer_{number}"
        return multi

    try:
        bare = _fit(keras, make(), False, [callback(keras)])
    except (ValueError, AttributeError, TypeError) as error:
        pytest.skip(f"fails in Keras {keras.__version__} without a wrapper too: {error}")
    assert _same(bare, _fit(keras, make(), True, [callback(keras)]))


@for_every_keras("keras3")
def test_only_a_wrapped_multi_optimizer_has_optimizers(keras: ModuleType) -> None:
    multi = optimizer(keras, "MultiOptimizer")
    opt = tfmp.LossScaleOptimizer(multi)
    assert opt.optimizers is multi.optimizers
    assert not hasattr(opt, "learning_rate")
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
        for file in glob.glob(f"{logs}/train/*"):
            for event in loader.EventFileLoader(file).Load():
                for value in event.summary.value:
                    shown.setdefault(value.tag, []).append(list(value.tensor.float_val))
        return shown

    bare, wrapped = written(False), written(True)
    assert wrapped["epoch_learning_rate"] if schedules else True
    assert wrapped.get("epoch_learning_rate") == bare.get("epoch_learning_rate")
    assert list(wrapped) == list(bare)
