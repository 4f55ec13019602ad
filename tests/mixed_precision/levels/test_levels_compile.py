"""Models with float16 layers scale their loss when they are compiled, or are warned of."""

import re
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras
from levelled_models import CASES, policies, subclassed

import tfmp
from tfmp.any_keras.which import is_keras2

_X, _Y = CASES["sequential"].batch, np.ones([4, 2], np.float32)


def _net(keras: ModuleType, level: str = "O0", dtype: str | None = None) -> Any:
    with tfmp.precision(level):
        layers = [keras.layers.Dense(4, dtype=dtype, name="body"), keras.layers.Dense(2, dtype=dtype, name="head")]
        return keras.Sequential([keras.Input([3]), *layers], name="net")


def _warned(model: Any, opt: Any = "sgd", **settings: Any) -> list[str]:
    """Return the warnings of compiling a model, all of which are to name the line of the call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(opt, "mse", **settings)
    assert {each.category for each in caught} <= {UserWarning}
    assert {each.filename for each in caught} <= {__file__}
    return [str(each.message) for each in caught]


def _set(model: Any) -> Any:
    model(_X)
    tfmp.set_precision(model, "O2")
    return model


def _of_tfmp(keras: ModuleType) -> Any:
    return tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.1), tfmp.FixedLossScaleManager(8.0))


def _of_keras(keras: ModuleType) -> Any:
    return keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))


def _islands(keras: ModuleType) -> Any:
    head = keras.layers.Dense(2, name="head")
    with tfmp.precision("O2"):
        bodies = [keras.layers.Dense(3, name=f"body{index}") for index in range(5)]
    return keras.Sequential([keras.Input([3]), *bodies, head], name="net")


def _with_its_own_compile(keras: ModuleType) -> Any:
    def compile(self: Any, opt: Any, loss: str) -> None:
        keras.Sequential.compile(self, optimizer=opt, loss=loss)

    with tfmp.precision("O3"):
        layers = [keras.Input([3]), keras.layers.Dense(2, name="head")]
        return type("Own", (keras.Sequential,), {"compile": compile})(layers, name="net")


class _Row(NamedTuple):
    """What is compiled and with what; a pattern of the layers that are named, if any; whether Keras then scales."""

    model: Callable[[ModuleType], Any]
    named: str | None
    optimizer: Callable[[ModuleType], Any] = lambda keras: "sgd"
    is_scaled_by_keras: bool = False
    settings: dict[str, Any] = {}  # noqa: RUF012 - it is not changed
    only: str = ""


_MIXED, _UNSCALED = "mixed_float16", {"auto_scale_loss": False}
_ROWS: dict[str, _Row] = {
    "O1": _Row(lambda keras: _net(keras, "O1"), None, is_scaled_by_keras=True),
    "O2": _Row(lambda keras: _net(keras, "O2"), None, is_scaled_by_keras=True),
    "set": _Row(lambda keras: _set(_net(keras)), None, is_scaled_by_keras=True),
    "subclassed and set": _Row(lambda keras: _set(subclassed(keras)), None, is_scaled_by_keras=True),
    "O3": _Row(lambda keras: _net(keras, "O3"), "body, head"),
    "island": _Row(_islands, r"body\d, body\d, body\d and 2 more"),
    "inner model": _Row(
        lambda keras: keras.Sequential([keras.Input([3]), _net(keras, dtype=_MIXED)], name="net"),
        "body, head|head, body",
    ),
    "compile of its own": _Row(_with_its_own_compile, "head"),
    "without automatic scaling": _Row(lambda keras: _net(keras, "O2"), "body, head", settings=_UNSCALED, only="keras3"),
    "scaled by tfmp instead": _Row(lambda keras: _net(keras, "O2"), None, _of_tfmp, settings=_UNSCALED, only="keras3"),
    "fixed factor of Keras 3": _Row(
        lambda keras: _net(keras, "O3"),
        None,
        lambda keras: keras.optimizers.SGD(0.1, loss_scale_factor=128.0),
        only="keras3",
    ),
    **{
        f"{level}, scaled by {by}": _Row(lambda keras, level=level: _net(keras, level), None, opt)  # type: ignore[misc]
        for level in ("O2", "O3")
        for by, opt in {"tfmp": _of_tfmp, "Keras": _of_keras}.items()
    },
    **{
        level: _Row(lambda keras, level=level: _net(keras, level), None)  # type: ignore[misc] # the default argument
        for level in ("O0", "O1-bfloat16", "O2-bfloat16", "O3-bfloat16")
    },
}


@pytest.mark.parametrize("name", _ROWS)
@for_every_keras()
def test_model_with_float16_layers_scales_its_loss_or_is_warned_of(keras: ModuleType, name: str) -> None:
    row = _ROWS[name]
    if row.only and is_keras2(keras):
        pytest.skip("needs Keras 3")
    model, opt = row.model(keras), row.optimizer(keras)
    found = _warned(model, opt, **row.settings)
    message = (
        f"the model 'net' computes in float16 \\(({row.named})\\), and is compiled with an optimizer that does not "
        r"scale the loss: small gradients become 0\. Pass compile a tfmp\.LossScaleOptimizer around the optimizer\."
    )
    assert [bool(re.fullmatch(message, each)) for each in found] == [True] * bool(row.named)
    if isinstance(opt, str):
        is_of_keras = isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
        assert is_of_keras == row.is_scaled_by_keras
    else:
        assert model.optimizer is opt
    if row.is_scaled_by_keras or row.optimizer is _of_tfmp:
        model.fit(_X, _Y, verbose=0)
    if row.optimizer is _of_tfmp:
        assert int(opt.applied_steps) == 1


@for_every_keras()
def test_model_that_is_set_after_it_was_compiled_is_warned_of(keras: ModuleType) -> None:
    model = _net(keras)
    assert _warned(model) == []
    with pytest.warns(UserWarning, match="'net' computes in float16 .body, head., and is compiled with an optimizer"):
        tfmp.set_precision(model, "O2")
    for level in ("O2-bfloat16", "O0"):
        tfmp.set_precision(model, level)
    assert _warned(model) == []


@pytest.mark.parametrize("level", ["O0", "O2"], ids=["set", "made"])
@for_every_keras()
def test_replicas_train_at_a_level_and_skip_an_overflow_of_one_together(
    keras: ModuleType, level: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    with two_replicas.scope():
        model, opt = _net(keras, level), _of_tfmp(keras)
    tfmp.set_precision(model, "O2")
    model.compile(opt, "mse")
    model.fit(_X, _Y, verbose=0)
    before = model.get_weights()
    # The last row is the second replica's.
    model.fit(np.concatenate([_X[:3], np.full([1, 3], np.inf, np.float32)]), _Y, verbose=0)
    assert (int(opt.applied_steps), int(opt.skipped_steps)) == (1, 1)
    assert {each for _, each, _, _ in policies(model)} == {"mixed_float16"}
    for one, other in zip(before, model.get_weights(), strict=True):
        assert (one.dtype, one.tolist()) == (np.float32, other.tolist())
