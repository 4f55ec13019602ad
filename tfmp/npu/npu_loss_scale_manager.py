"""The NPU bridge's loss-scale managers, by the name of its module."""

from typing import Any

from tfmp.core import managers, settings


class FixedLossScaleManager(managers.FixedLossScaleManager):
    """A loss scale that never changes, with a check for overflow that can be turned off.

    Without the check `NPULossScaleOptimizer` applies every step, whatever its gradients. That is dangerous: an infinity
    or a NaN goes into the weights and the optimizer's slots, and training does not recover. The NPU's arithmetic may
    saturate instead, so that scripts for it could do without; float16 on CPU and GPU does not. Other optimizers of tfmp
    check in any case.

    Args:
        loss_scale: The scale, a finite number of at least 1.
        enable_overflow_check: Whether steps that overflow are skipped.

    Raises:
        TypeError: The scale is not a number, or `enable_overflow_check` no bool.
        ValueError: The scale is out of range.

    Example:
        >>> manager = FixedLossScaleManager(1024, enable_overflow_check=False)
        >>> float(manager.get_loss_scale()), manager.get_enable_overflow_check()
        (1024.0, False)
    """

    def __init__(self, loss_scale: float, enable_overflow_check: bool = True) -> None:
        super().__init__(loss_scale)
        self._enable_overflow_check = settings.flag("enable_overflow_check", enable_overflow_check)

    def get_enable_overflow_check(self) -> bool:
        """Tell whether steps that overflow are skipped."""
        return self._enable_overflow_check

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return super().get_config() | {"enable_overflow_check": self._enable_overflow_check}


class ExponentialUpdateLossScaleManager(managers.ExponentialUpdateLossScaleManager):
    """The `tfmp.ExponentialUpdateLossScaleManager`; what the NPU bridge calls so follows the same rule.

    Args:
        init_loss_scale: As there.
        incr_every_n_steps: As there.
        decr_every_n_nan_or_inf: As there.
        incr_ratio: As there.
        decr_ratio: As there.
        enable_overflow_check: True, or an error: overflows are what lowers the scale.
        **others: The other settings of `tfmp.ExponentialUpdateLossScaleManager`.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range, or `enable_overflow_check` is False.

    Example:
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
        **others: Any,  # noqa: ANN401 - of several types; the manager looks at them
    ) -> None:
        if not settings.flag("enable_overflow_check", enable_overflow_check):
            raise ValueError(
                "enable_overflow_check must be True for an ExponentialUpdateLossScaleManager, got False: unchecked, "
                "the scale would only grow; leave it out, or use FixedLossScaleManager(scale, "
                "enable_overflow_check=False)."
            )
        super().__init__(init_loss_scale, incr_every_n_steps, decr_every_n_nan_or_inf, incr_ratio, decr_ratio, **others)

    def get_enable_overflow_check(self) -> bool:
        """Return True."""
        return True
