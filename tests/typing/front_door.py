"""What type checkers must make of the front door; the lane `lint` gives it to mypy and pyright, and nothing runs it.

An error that is expected has a `type: ignore` of its kind, which mypy reports if there is no such error.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from typing import TYPE_CHECKING, Any

import tfmp

if TYPE_CHECKING:
    from typing_extensions import assert_type


def _what_is_accepted(adam: Any, loss: Any, variables: list[Any]) -> None:
    opt = tfmp.LossScaleOptimizer(adam)
    assert_type(opt, tfmp.LossScaleOptimizer)
    tfmp.LossScaleOptimizer(adam, tfmp.FixedLossScaleManager(8), is_distributed=True)
    tfmp.LossScaleOptimizer(adam, "dynamic", accumulation_steps=4)
    assert_type(tfmp.ranges.RangeHistogram(), tfmp.ranges.RangeHistogram)
    tfmp.LossScaleOptimizer(inner_optimizer=adam, initial_scale=2**10, dynamic_growth_steps=500, name="mine")
    assert_type(tfmp.LossScaleOptimizer.from_keras(opt), tfmp.LossScaleOptimizer)
    assert_type(tfmp.LossScaleOptimizer.from_config(opt.get_config()), tfmp.LossScaleOptimizer)
    assert_type(opt.dynamic_growth_steps, int | None)
    opt.minimize(loss, global_step=None)
    opt.apply_gradients(opt.compute_gradients(loss, variables))
    opt.apply_gradients(zip(opt.get_unscaled_gradients([loss]), variables, strict=True))
    opt.learning_rate = 0.5
    _like_compile(opt)
    _like_compile(tfmp.LossScaleOptimizer(adam), loss="mse")


def _like_compile(optimizer="rmsprop", loss=None):  # noqa: ANN001, ANN202 - as that of Keras
    """Stand for Keras' `compile`, whose parameters have no types: pyright reads them from the defaults."""


def _what_is_refused(adam: Any) -> None:
    opt = tfmp.LossScaleOptimizer(adam, loss_scale=8)  # type: ignore[call-arg]
    tfmp.LossScaleOptimizer(adam, accumulation_steps="4")  # type: ignore[arg-type]
    tfmp.GradScalar()  # type: ignore[attr-defined]
    opt.initial_scale = 8  # type: ignore[misc]
