"""A manager from one value, as a configuration file holds it."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from tfmp.core import settings
from tfmp.core.managers.base import LossScaleManager
from tfmp.core.managers.exponential import ExponentialUpdateLossScaleManager
from tfmp.core.managers.fixed import FixedLossScaleManager
from tfmp.core.managers.log_max import LogMaxLossScaleManager

#: What says which manager to make.
Specification: TypeAlias = LossScaleManager | float | str | Mapping[str, Any] | None

#: What the wrappers of Keras and TensorFlow start from, and after how many finite steps they double the scale.
_INITIAL_SCALE, _GROWTH_STEPS = 2**15, 2000


class _Mode(NamedTuple):
    """A kind of manager.

    Attributes:
        make: Its class.
        defaults: The settings that are taken where none is given.
        names: The settings, by each name that they may be given.
    """

    make: Callable[..., LossScaleManager]
    defaults: dict[str, Any]
    names: dict[str, tuple[str, ...]]


def _by_own_names(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: (name,) for name in names}


def get_loss_scale_manager(spec: Specification) -> LossScaleManager:
    """Return the manager that one value describes, as a configuration file holds it.

        a manager    itself
        None         FixedLossScaleManager(1): nothing is scaled, and steps that overflow are skipped
        a number     FixedLossScaleManager of that scale
        "dynamic"    ExponentialUpdateLossScaleManager from 2**16; halves at each overflow, doubles after 2000 finite
                     steps in a row, as PyTorch does
        "log_max"    LogMaxLossScaleManager from 2**15
        a mapping    `mode`, which is "dynamic" where it is left out, "static" (or "fixed") or "log_max", and settings
                     by the names of the manager's own arguments, or those of MMCV or PyTorch:

            init_scale, scale_factor, scale_window             init_loss_scale (static: loss_scale), both incr_ratio and
                                                               1 / decr_ratio, incr_every_n_steps
            growth_factor, backoff_factor, growth_interval     incr_ratio, decr_ratio, incr_every_n_steps

    Where no scale to start from is given, it is that default, or the nearest within the bounds that are given.

    Args:
        spec: The description.

    Returns:
        The manager.

    Raises:
        TypeError: It is none of these, or a setting is of the wrong type.
        ValueError: A mode or a setting is not known, a setting is given twice, missing or out of range.

    Example:
        >>> manager = get_loss_scale_manager({"init_scale": 512.0, "mode": "dynamic"})
        >>> float(manager.get_loss_scale()), manager.get_config()["incr_every_n_steps"]
        (512.0, 2000)
        >>> get_loss_scale_manager({"init_scale": 512.0, "init_loss_scale": 512})
        Traceback (most recent call last):
            ...
        ValueError: init_scale and init_loss_scale are the same setting: give one of them.
    """
    if isinstance(spec, LossScaleManager):
        return spec
    if spec is None:
        return FixedLossScaleManager(1)
    if isinstance(spec, str):
        return _manager_of_mode(spec, {})
    if isinstance(spec, Mapping):
        given = dict(spec)
        return _manager_of_mode(given.pop("mode", "dynamic"), given)
    if settings.is_number(spec):
        return FixedLossScaleManager(spec)
    raise TypeError(
        "a loss scale is described by a tfmp.LossScaleManager, a number, None, a name or a dict with one of the modes "
        f"{', '.join(_MODES)}; got {spec!r} of type {type(spec).__name__}."
    )


def manager_of_wrapper(spec: Specification) -> LossScaleManager:
    """Return the manager that the second argument of a `tfmp.LossScaleOptimizer` describes.

    As `get_loss_scale_manager`, but that "dynamic" starts from 2**15, as it does in the wrappers of Keras and
    TensorFlow, and that None is refused: a wrapper that scales nothing is asked for by the number 1.

    Args:
        spec: The description.

    Returns:
        The manager.

    Raises:
        TypeError: It describes none, or a setting is of the wrong type.
        ValueError: A mode or a setting is not known, a setting is given twice, missing or out of range.

    Example:
        >>> manager_of_wrapper("dynamic").get_config()["init_loss_scale"]
        32768.0
    """
    if isinstance(spec, str) and spec == "dynamic":
        return dynamic_manager()
    if spec is None or isinstance(spec, bool):
        raise TypeError(
            f'loss_scale_manager must be a tfmp.LossScaleManager, "dynamic", or a number for a fixed scale, got '
            f"{spec!r}."
        )
    return get_loss_scale_manager(spec)


def dynamic_manager(
    initial_scale: float = _INITIAL_SCALE, dynamic_growth_steps: int = _GROWTH_STEPS
) -> ExponentialUpdateLossScaleManager:
    """Return a manager that halves at each overflow and doubles after some finite steps, as Keras' wrappers do.

    Args:
        initial_scale: The scale to start from.
        dynamic_growth_steps: Finite steps in a row after which the scale doubles.

    Raises:
        TypeError: One is no number.
        ValueError: One is out of range.

    Example:
        >>> dynamic_manager()
        <ExponentialUpdateLossScaleManager(init_loss_scale=32768.0, incr_every_n_steps=2000,
        decr_every_n_nan_or_inf=1, decr_ratio=0.5): loss_scale=32768.0, good_steps=0, bad_steps=0>
    """
    try:
        return ExponentialUpdateLossScaleManager(
            initial_scale, dynamic_growth_steps, decr_every_n_nan_or_inf=1, incr_ratio=2, decr_ratio=0.5
        )
    except (TypeError, ValueError) as error:
        message = str(error).replace("init_loss_scale", "initial_scale")
        raise type(error)(message.replace("incr_every_n_steps", "dynamic_growth_steps")) from None


def _manager_of_mode(name: object, given: Mapping[str, Any]) -> LossScaleManager:
    if not isinstance(name, str) or name not in _MODES:
        raise ValueError(f"the mode of a loss scale is one of {', '.join(_MODES)}; got {name!r}.")
    mode = _MODES[name]
    unknown = [key for key in given if key not in mode.names]
    if unknown:
        raise ValueError(
            f"a loss scale of mode {name!r} has no setting {unknown[0]!r}; it takes {', '.join(mode.names)}."
        )
    values, given_as = _settings(mode, given)
    if mode.make is FixedLossScaleManager and not values:
        raise ValueError(f"a loss scale of mode {name!r} needs one of {', '.join(mode.names)}.")
    values = mode.defaults | values
    if "init_loss_scale" not in given_as and "init_loss_scale" in values:
        values["init_loss_scale"] = _within_bounds(values["init_loss_scale"], values)
    try:
        return mode.make(**values)
    except (TypeError, ValueError) as error:
        raise type(error)(_in_the_words_given(str(error), mode, given_as)) from None


def _within_bounds(default: float, values: Mapping[str, Any]) -> float:
    """Return the scale to start from where none is given: the default, or the bound that is nearest to it."""
    lowest, highest = (values.get(name) for name in ("min_loss_scale", "max_loss_scale"))
    # What is no number is left to the manager to refuse.
    if lowest is not None and settings.is_number(lowest):
        default = max(default, lowest)
    if highest is not None and settings.is_number(highest):
        default = min(default, highest)
    return default


def _in_the_words_given(message: str, mode: _Mode, given_as: Mapping[str, str]) -> str:
    """Return what a manager says of its settings, with the names that they were given by."""
    own_names = {name for names in mode.names.values() for name in names}

    def named(match: re.Match[str]) -> str:
        name = match[0]
        if name not in own_names:
            return name
        if name not in given_as:
            return f"{name} (by default)"
        return name if given_as[name] == name else f"{given_as[name]} ({name})"

    what, got, value = message.partition(", got ")
    return re.sub(r"[a-z_]+", named, what) + got + value


def _settings(mode: _Mode, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings by the manager's own names, and the names that they were given by."""
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for key, value in given.items():
        for setting in mode.names[key]:
            if setting in given_as:
                raise ValueError(f"{given_as[setting]} and {key} are the same setting: give one of them.")
            given_as[setting] = key
            values[setting] = value
    if given_as.get("decr_ratio") == "scale_factor":
        values["decr_ratio"] = 1 / settings.positive("scale_factor", values["decr_ratio"])
    return values, given_as


_DYNAMIC = _Mode(
    ExponentialUpdateLossScaleManager,
    {
        "init_loss_scale": 2**16,
        "incr_every_n_steps": 2000,
        "decr_every_n_nan_or_inf": 1,
        "incr_ratio": 2,
        "decr_ratio": 0.5,
    },
    {
        **_by_own_names("init_loss_scale", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio"),
        **_by_own_names("min_loss_scale", "max_loss_scale", "hysteresis", "consecutive_hysteresis", "tolerance"),
        "init_scale": ("init_loss_scale",),
        "scale_factor": ("incr_ratio", "decr_ratio"),
        "scale_window": ("incr_every_n_steps",),
        "growth_factor": ("incr_ratio",),
        "backoff_factor": ("decr_ratio",),
        "growth_interval": ("incr_every_n_steps",),
    },
)

_STATIC = _Mode(
    FixedLossScaleManager, {}, dict.fromkeys(("loss_scale", "init_loss_scale", "init_scale"), ("loss_scale",))
)

_LOG_MAX = _Mode(
    LogMaxLossScaleManager,
    {"init_loss_scale": 2**15},
    {
        **_by_own_names("init_loss_scale", "limit", "deviations", "mean_decay", "deviation_decay"),
        **_by_own_names("incr_every_n_steps", "min_loss_scale", "max_loss_scale"),
        "init_scale": ("init_loss_scale",),
        "scale_window": ("incr_every_n_steps",),
        "growth_interval": ("incr_every_n_steps",),
    },
)

_MODES = {"dynamic": _DYNAMIC, "static": _STATIC, "fixed": _STATIC, "log_max": _LOG_MAX}
