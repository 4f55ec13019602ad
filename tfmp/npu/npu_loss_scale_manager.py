"""The loss-scale managers of the NPU bridge, in a module of the same name as the bridge's."""

from typing import Any

from tfmp.core import managers, settings


class FixedLossScaleManager(managers.FixedLossScaleManager):
    """A loss scale that never changes, with an overflow check that can be turned off.

    Without the check, `NPULossScaleOptimizer` applies every step, even if a gradient is infinite or NaN. That is
    dangerous: the infinity or NaN enters the weights and the optimizer's slots, and training does not recover. Scripts
    for the NPU could turn the check off because the NPU's arithmetic can saturate; float16 on CPU and GPU does not
    saturate. Only `NPULossScaleOptimizer` reads the setting; all other optimizers of tfmp always check.

    Args:
        loss_scale: The loss scale, a finite number of at least 1.
        enable_overflow_check: Whether a step whose gradients overflow is skipped.

    Raises:
        TypeError: `loss_scale` is not a number, or `enable_overflow_check` is not a bool.
        ValueError: `loss_scale` is out of range.

    Examples:
        >>> manager = FixedLossScaleManager(1024, enable_overflow_check=False)
        >>> float(manager.get_loss_scale()), manager.get_enable_overflow_check()
        (1024.0, False)
    """

    def __init__(self, loss_scale: float, enable_overflow_check: bool = True) -> None:
        super().__init__(loss_scale)
        self._enable_overflow_check = settings.flag("enable_overflow_check", enable_overflow_check)

    def get_enable_overflow_check(self) -> bool:
        """Return whether a step whose gradients overflow is skipped."""
        return self._enable_overflow_check

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, by their names."""
        return super().get_config() | {"enable_overflow_check": self._enable_overflow_check}


class ExponentialUpdateLossScaleManager(managers.ExponentialUpdateLossScaleManager):
    """A loss scale that grows after finite steps and shrinks after overflows.

    This is `tfmp.ExponentialUpdateLossScaleManager` with the signature of the NPU bridge. The bridge's manager follows
    the same rule.

    Args:
        init_loss_scale: The loss scale at the start of training.
        incr_every_n_steps: The number of finite steps in a row after which the scale grows.
        decr_every_n_nan_or_inf: The number of overflowed steps after which the scale shrinks, counted since the scale
            last changed.
        incr_ratio: The factor by which the scale grows; greater than 1.
        decr_ratio: The factor by which the scale shrinks; between 0 and 1.
        enable_overflow_check: Must be True, because only overflows lower the scale.
        **others: All other settings of `tfmp.ExponentialUpdateLossScaleManager`, by name.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range, or `enable_overflow_check` is False.

    Examples:
        >>> manager = ExponentialUpdateLossScaleManager(init_loss_scale=2**32, incr_every_n_steps=1000, decr_ratio=0.5)
        >>> float(manager.get_loss_scale())
        4294967296.0
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
        *,
        enable_overflow_check: bool = True,
        **others: Any,  # noqa: ANN401 - of several types; the base class checks them
    ) -> None:
        if not settings.flag("enable_overflow_check", enable_overflow_check):
            raise ValueError(
                "enable_overflow_check must be True for an ExponentialUpdateLossScaleManager, got False: unchecked, "
                "the scale would only grow; leave it out, or use FixedLossScaleManager(scale, "
                "enable_overflow_check=False)."
            )
        super().__init__(init_loss_scale, incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio, **others)

    def get_enable_overflow_check(self) -> bool:
        """Return True: this manager always checks for overflow."""
        return True
