"""Makes a manager from one value of a configuration: a name, a number or a dict."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

from tfmp.core import settings
from tfmp.core.managers.base import LossScaleManager
from tfmp.core.managers.exponential import ExponentialUpdateLossScaleManager
from tfmp.core.managers.fixed import FixedLossScaleManager
from tfmp.core.managers.log_max import LogMaxLossScaleManager

#: The values that describe a manager; `get_loss_scale_manager` explains them.
Specification: TypeAlias = LossScaleManager | float | str | Mapping[str, Any]

#: The defaults of the wrappers of Keras and TensorFlow: the first scale, and the finite steps after which it doubles.
_INITIAL_SCALE, _GROWTH_STEPS = 2**15, 2000
_DYNAMIC: dict[str, Any] = {
    "init_loss_scale": _INITIAL_SCALE,
    "incr_every_n_steps": _GROWTH_STEPS,
    "decr_every_n_nan_or_inf": 1,
    "incr_ratio": 2,
    "decr_ratio": 0.5,
}
_STATIC = (FixedLossScaleManager, {"loss_scale": _INITIAL_SCALE})
#: The class of each mode, and the arguments that it gets unless the configuration sets them.
_MODES: dict[str, tuple[type[LossScaleManager], dict[str, Any]]] = {
    "dynamic": (ExponentialUpdateLossScaleManager, _DYNAMIC),
    "static": _STATIC,
    "fixed": _STATIC,
    "log_max": (LogMaxLossScaleManager, {"init_loss_scale": _INITIAL_SCALE}),
}
#: Other names that a configuration may have, and the arguments that they set in a mode whose class has these.
_ALIASES = (
    ("init_loss_scale", ("loss_scale",)),
    ("init_scale", ("loss_scale",)),
    ("init_scale", ("init_loss_scale",)),
    ("scale_factor", ("incr_ratio", "decr_ratio")),
    ("scale_window", ("incr_every_n_steps",)),
    ("growth_factor", ("incr_ratio",)),
    ("backoff_factor", ("decr_ratio",)),
    ("growth_interval", ("incr_every_n_steps",)),
)


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
    """Return the manager that `loss_scale_manager` describes around an optimizer of TF1; errors name that argument."""
    if spec is None or isinstance(spec, bool):
        raise TypeError(
            f'loss_scale_manager must be a tfmp.LossScaleManager, "dynamic", or a number for a fixed scale, got '
            f"{spec!r}."
        )
    return get_loss_scale_manager(spec)


def dynamic_manager(
    initial_scale: float = _INITIAL_SCALE, dynamic_growth_steps: int = _GROWTH_STEPS
) -> ExponentialUpdateLossScaleManager:
    """Return the manager that behaves like the loss scale of Keras' `LossScaleOptimizer`; errors use Keras' names."""
    given = {"init_loss_scale": initial_scale, "incr_every_n_steps": dynamic_growth_steps}
    try:
        return ExponentialUpdateLossScaleManager(**_DYNAMIC | given)
    except (TypeError, ValueError) as error:
        words = {"init_loss_scale": "initial_scale", "incr_every_n_steps": "dynamic_growth_steps"}
        raise _in_words(error, words) from None


def _in_words(error: TypeError | ValueError, words: Mapping[str, str]) -> TypeError | ValueError:
    """Return the error of a manager's constructor with the names of arguments as the user knows them."""
    what, got, value = str(error).partition(", got ")
    for name, word in words.items():
        what = what.replace(name, word)
    return type(error)(what + got + value)


def _manager_of_mode(mode: object, given: Mapping[str, Any]) -> LossScaleManager:
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f"the mode of a loss scale is one of {', '.join(_MODES)}; got {mode!r}.")
    make, defaults = _MODES[mode]
    own = list(inspect.signature(make).parameters)
    names = {name: (name,) for name in own} | {name: sets for name, sets in _ALIASES if set(sets) <= set(own)}
    unknown = [key for key in given if key not in names]
    if unknown:
        raise ValueError(f"a loss scale of mode {mode!r} has no setting {unknown[0]!r}; it takes {', '.join(names)}.")
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for key, value in given.items():
        for setting in names[key]:
            if setting in given_as:
                raise ValueError(f"{given_as[setting]} and {key} are the same setting: give one of them.")
            given_as[setting], values[setting] = key, value
    # In MMCV, the scale grows by `scale_factor` and shrinks by its reciprocal.
    if given_as.get("decr_ratio") == "scale_factor":
        values["decr_ratio"] = 1 / settings.positive("scale_factor", values["decr_ratio"])
    values = defaults | values
    if "init_loss_scale" not in given_as:
        for bound, nearer in (("min_loss_scale", max), ("max_loss_scale", min)):
            # The constructor refuses a bound that is not a number with a better message.
            if settings.is_number(values.get(bound)):
                values["init_loss_scale"] = nearer(values["init_loss_scale"], values[bound])
    try:
        return make(**values)
    except (TypeError, ValueError) as error:
        # Of the defaults, an error can only name a bound that the other one contradicts.
        words = {name: f"{name} (by default)" for name in ("min_loss_scale", "max_loss_scale") if name not in given_as}
        words |= {name: f"{word} ({name})" for name, word in given_as.items() if word != name}
        raise _in_words(error, words) from None
