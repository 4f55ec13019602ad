"""Models with float16 layers scale their loss when they are compiled, or Keras warns."""

import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kerases import for_every_keras
from levelled_models import CASES, subclassed

import tfmp
from tfmp.hosts.keras.which import is_keras2

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


@pytest.mark.parametrize("level", ["O1", "O2"])
@for_every_keras()
def test_keras_scales_the_loss_of_a_model_made_under_a_level(keras: ModuleType, level: str) -> None:
    model = _net(keras, level)
    assert _warned(model) == []
    assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
    model.fit(_X, _Y, verbose=0)


@for_every_keras()
def test_so_it_does_for_a_model_that_is_set_to_a_level(keras: ModuleType) -> None:
    for model in (_net(keras), subclassed(keras)):
        model(_X)
        tfmp.set_precision(model, "O2")
        assert _warned(model) == []
        assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)


@for_every_keras()
def test_model_without_scaling_is_warned_of(keras: ModuleType) -> None:
    model = _net(keras, "O3")
    assert _warned(model) == [
        "the model 'net' computes in float16 (body, head), and is compiled with an optimizer that does not scale the "
        "loss: small gradients become 0. Pass compile a tfmp.LossScaleOptimizer around the optimizer."
    ]
    assert len(_warned(model, keras.optimizers.Adam())) == 1


@for_every_keras()
def test_float16_island_in_a_float32_model_is_warned_of(keras: ModuleType) -> None:
    with tfmp.precision("O0"):
        head = keras.layers.Dense(2, name="head")
        with tfmp.precision("O2"):
            bodies = [keras.layers.Dense(3, name=f"body{index}") for index in range(5)]
        model = keras.Sequential([keras.Input([3]), *bodies, head], name="net")
    (message,) = _warned(model)
    assert message.startswith("the model 'net' computes in float16 (body")
    assert message.endswith("Pass compile a tfmp.LossScaleOptimizer around the optimizer.")


@for_every_keras()
def test_layers_with_a_mixed_dtype_are_warned_of(keras: ModuleType) -> None:
    assert len(_warned(_net(keras, dtype="mixed_float16"))) == 1


@for_every_keras()
def test_inner_models_are_looked_at(keras: ModuleType) -> None:
    inner = _net(keras, dtype="mixed_float16")
    model = keras.Sequential([keras.Input([3]), inner], name="outer")
    assert len(_warned(model)) == 1


@for_every_keras("keras3")
def test_model_that_is_compiled_without_automatic_scaling_is_warned_of(keras: ModuleType) -> None:
    model = _net(keras, "O2")
    assert len(_warned(model, auto_scale_loss=False)) == 1
    assert (
        _warned(
            model,
            tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.1), tfmp.FixedLossScaleManager(8.0)),
            auto_scale_loss=False,
        )
        == []
    )


@for_every_keras("keras3")
def test_optimizer_of_keras_3_with_a_fixed_factor_scales(keras: ModuleType) -> None:
    assert _warned(_net(keras, "O3"), keras.optimizers.SGD(0.1, loss_scale_factor=128.0)) == []


@pytest.mark.parametrize("level", ["O2", "O3"])
@for_every_keras()
def test_optimizers_that_scale_are_not_warned_of(keras: ModuleType, level: str) -> None:
    for opt in (
        keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.1), tfmp.FixedLossScaleManager(8.0)),
    ):
        model = _net(keras, level)
        assert _warned(model, opt) == []
        assert model.optimizer is opt
    model.fit(_X, _Y, verbose=0)
    assert int(opt.applied_steps) == 1


@pytest.mark.parametrize("level", ["O0", "O1-bfloat16", "O2-bfloat16", "O3-bfloat16"])
@for_every_keras()
def test_models_that_need_no_scaling_are_not_warned_of(keras: ModuleType, level: str) -> None:
    model = _net(keras, level)
    assert _warned(model) == []
    assert not isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)


@for_every_keras()
def test_model_that_is_set_after_it_was_compiled_is_warned_of(keras: ModuleType) -> None:
    model = _net(keras)
    assert _warned(model) == []
    with pytest.warns(UserWarning, match="'net' computes in float16 .body, head., and is compiled with an optimizer"):
        tfmp.set_precision(model, "O2")
    for level in ("O2-bfloat16", "O0"):
        tfmp.set_precision(model, level)
    assert _warned(model) == []


@for_every_keras()
def test_model_with_its_own_compile_is_warned_of(keras: ModuleType) -> None:
    class Own(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.head(x)

        def compile(self, opt: Any, loss: str) -> None:
            super().compile(optimizer=opt, loss=loss)

    with tfmp.precision("O3"):
        model = Own()
    assert len(_warned(model)) == 1


@for_every_keras()
def test_compile_looks_as_before_to_those_who_ask(keras: ModuleType) -> None:
    with tfmp.precision("O0"):
        pass
    assert keras.Model.compile.__name__ == "compile"
    assert "optimizer" in keras.Model.compile.__doc__
    assert is_keras2(keras) or "auto_scale_loss" in keras.Model.compile.__doc__
