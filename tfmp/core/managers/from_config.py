"""Makes a manager from one value of a configuration: a name, a number or a dict."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from tfmp.core import settings
from tfmp.core.managers.base import LossScaleManager
from tfmp.core.managers.exponential import ExponentialUpdateLossScaleManager
from tfmp.core.managers.fixed import FixedLossScaleManager
from tfmp.core.managers.log_max import LogMaxLossScaleManager

#: The values that describe a manager; `get_loss_scale_manager` explains them.
Specification: TypeAlias = LossScaleManager | float | str | Mapping[str, Any]

#: The defaults of the loss-scale wrappers of Keras and TensorFlow: the first scale, and the number of consecutive
#: finite steps after which the scale doubles.
_INITIAL_SCALE, _GROWTH_STEPS = 2**15, 2000


class _Mode(NamedTuple):
    """A mode of a configuration, such as "dynamic"."""

    #: The class of the manager.
    make: Callable[..., LossScaleManager]
    #: The arguments of the class that are used if the configuration does not set them.
    defaults: dict[str, Any]
    #: For each setting that a configuration may contain, the arguments of the class that it sets.
    names: dict[str, tuple[str, ...]]


def _by_own_names(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: (name,) for name in names}


def get_loss_scale_manager(spec: Specification) -> LossScaleManager:
    """Return the loss-scale manager that one value describes, for example a value of a configuration file.

    The values are:

        a manager    returned unchanged
        a number     FixedLossScaleManager(number); with 1 nothing is scaled, but steps that overflow are skipped
        "dynamic"    ExponentialUpdateLossScaleManager, which starts from 2**15, halves at each overflow, and doubles
                     after 2000 consecutive finite steps, like the wrappers of Keras and TensorFlow
        "log_max"    LogMaxLossScaleManager, which starts from 2**15
        "fixed"      FixedLossScaleManager(2**15); "static" is another name for it
        a dict       the key `mode` ("dynamic" if left out, "static" or "fixed", or "log_max") and settings

    Settings in a dict have the names of the manager's own arguments, or these names of MMCV and PyTorch:

        init_scale                         init_loss_scale; in a static mode loss_scale
        scale_factor                       incr_ratio, and at the same time 1 / decr_ratio
        scale_window, growth_interval      incr_every_n_steps
        growth_factor                      incr_ratio
        backoff_factor                     decr_ratio

    If a dict sets no first scale, the default above is used; if it lies outside the bounds that the dict sets, the
    nearer bound is used.

    Args:
        spec: One of the values above.

    Returns:
        The manager.

    Raises:
        TypeError: `spec` is none of these values, or a setting has the wrong type.
        ValueError: A mode or a setting is unknown; or a setting is given twice, missing or out of range.

    Examples:
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
        raise TypeError('None describes no loss scale: pass 1 for no scaling, or "dynamic" for the default.')
    if isinstance(spec, str):
        return _manager_of_mode(spec, {})
    if isinstance(spec, Mapping):
        given = dict(spec)
        return _manager_of_mode(given.pop("mode", "dynamic"), given)
    if settings.is_number(spec):
        return FixedLossScaleManager(spec)
    settings.refuse_class("the loss-scale manager", spec)
    raise TypeError(
        "a loss scale is described by a tfmp.LossScaleManager, a number, a name or a dict with one of the modes "
        f"{', '.join(_MODES)}; got {spec!r} of type {type(spec).__name__}."
    )


def manager_of_wrapper(spec: Specification) -> LossScaleManager:
    """Return the manager that the second argument of `tfmp.LossScaleOptimizer` describes, around TF1's optimizers.

    It is as `get_loss_scale_manager`, but that its errors name the argument.
    """
    if spec is None or isinstance(spec, bool):
        raise TypeError(
            f'loss_scale_manager must be a tfmp.LossScaleManager, "dynamic", or a number for a fixed scale, got '
            f"{spec!r}."
        )
    return get_loss_scale_manager(spec)


def dynamic_manager(
    initial_scale: float = _INITIAL_SCALE, dynamic_growth_steps: int = _GROWTH_STEPS
) -> ExponentialUpdateLossScaleManager:
    """Return the manager that behaves like the loss scale of Keras' `LossScaleOptimizer`; errors use Keras' names.

    It halves the scale at each overflow and doubles it after `dynamic_growth_steps` consecutive finite steps.

    Examples:
        >>> dynamic_manager()
        <ExponentialUpdateLossScaleManager(init_loss_scale=32768.0, incr_every_n_steps=2000,
        decr_every_n_nan_or_inf=1, decr_ratio=0.5): loss_scale=32768.0, good_steps=0, bad_steps=0>
    """
    try:
        return ExponentialUpdateLossScaleManager(
            initial_scale, dynamic_growth_steps, decr_every_n_nan_or_inf=1, incr_ratio=2, decr_ratio=0.5
        )
    except (TypeError, ValueError) as error:
        # The caller knows the arguments by the names in Keras, so the message should use them.
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
    values = mode.defaults | values
    if "init_loss_scale" not in given_as and "init_loss_scale" in values:
        values["init_loss_scale"] = _within_bounds(values["init_loss_scale"], values)
    try:
        return mode.make(**values)
    except (TypeError, ValueError) as error:
        raise type(error)(_in_the_words_given(str(error), mode, given_as)) from None


def _within_bounds(default: float, values: Mapping[str, Any]) -> float:
    """Return the default first scale, moved to the nearer bound if it lies outside the bounds in `values`."""
    lowest, highest = (values.get(name) for name in ("min_loss_scale", "max_loss_scale"))
    # A bound that is not a number is ignored here: the manager's constructor refuses it with a better message.
    if lowest is not None and settings.is_number(lowest):
        default = max(default, lowest)
    if highest is not None and settings.is_number(highest):
        default = min(default, highest)
    return default


def _in_the_words_given(message: str, mode: _Mode, given_as: Mapping[str, str]) -> str:
    """Return a manager's error message with its argument names replaced by the names in the user's configuration."""
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
    """Return the values by the manager's argument names, and for each argument the name that the user wrote."""
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for key, value in given.items():
        for setting in mode.names[key]:
            if setting in given_as:
                raise ValueError(f"{given_as[setting]} and {key} are the same setting: give one of them.")
            given_as[setting] = key
            values[setting] = value
    # In MMCV, the scale grows by `scale_factor` and shrinks by its reciprocal.
    if given_as.get("decr_ratio") == "scale_factor":
        values["decr_ratio"] = 1 / settings.positive("scale_factor", values["decr_ratio"])
    return values, given_as


_DYNAMIC = _Mode(
    ExponentialUpdateLossScaleManager,
    {
        "init_loss_scale": _INITIAL_SCALE,
        "incr_every_n_steps": _GROWTH_STEPS,
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
    FixedLossScaleManager,
    {"loss_scale": _INITIAL_SCALE},
    dict.fromkeys(("loss_scale", "init_loss_scale", "init_scale"), ("loss_scale",)),
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
