"""What describes a manager: every kind of value, and what is refused with the name of the setting and its value."""

import copy
import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import tfmp
from tfmp.core.managers.from_config import dynamic_manager, manager_of_wrapper

#: Every argument of each manager: its value by default, and another.
_SETTINGS: dict[str, dict[str, tuple[Any, Any]]] = {
    "dynamic": {
        "init_loss_scale": (2**15, 8),
        "incr_every_n_steps": (2000, 7),
        "decr_every_n_nan_or_inf": (1, 3),
        "incr_ratio": (2, 4),
        "decr_ratio": (0.5, 0.25),
        "min_loss_scale": (1, 2),
        "max_loss_scale": (None, 16),
        "hysteresis": (1, 5),
        "consecutive_hysteresis": (False, True),
        "tolerance": (0, 0.5),
    },
    "static": {"loss_scale": (2**15, 8)},
    "log_max": {
        "init_loss_scale": (2**15, 8),
        "limit": (65504, 1000),
        "deviations": (3, 1000),
        "mean_decay": (0.99, 0.5),
        "deviation_decay": (0.999, 0.75),
        "incr_every_n_steps": (1000, 7),
        "min_loss_scale": (1, 2),
        "max_loss_scale": (2**24, 16),
    },
}


_DEFAULTS = {mode: {name: default for name, (default, _) in table.items()} for mode, table in _SETTINGS.items()}


@pytest.mark.graph
@pytest.mark.parametrize("mode", _SETTINGS)
def test_each_mode_has_the_documented_defaults_and_accepts_every_argument_of_its_manager(mode: str) -> None:
    assert tfmp.get_loss_scale_manager(mode).get_config() == _DEFAULTS[mode]
    given = {name: other for name, (_, other) in _SETTINGS[mode].items()}
    manager = tfmp.get_loss_scale_manager({"mode": mode, **given})
    assert manager.get_config() == given
    assert set(given) == set(inspect.signature(type(manager)).parameters)


@pytest.mark.graph
@pytest.mark.parametrize(
    ("spec", "mode", "given"),
    [
        (np.float32(512), "static", {"loss_scale": 512}),
        ({"mode": "static", "init_scale": 512.0}, "static", {"loss_scale": 512}),
        ("fixed", "static", {}),
        ({"mode": "static", "init_loss_scale": 512}, "static", {"loss_scale": 512}),
        ({"mode": "fixed", "loss_scale": 512}, "static", {"loss_scale": 512}),
        ({}, "dynamic", {}),
        ({"init_scale": 512.0, "mode": "dynamic"}, "dynamic", {"init_loss_scale": 512}),
        ({"max_loss_scale": 1024}, "dynamic", {"init_loss_scale": 1024, "max_loss_scale": 1024}),
        ({"min_loss_scale": 2**20}, "dynamic", {"init_loss_scale": 2**20, "min_loss_scale": 2**20}),
        ({"scale_factor": 4.0}, "dynamic", {"incr_ratio": 4, "decr_ratio": 0.25}),
        ({"scale_window": 100, "growth_factor": 3}, "dynamic", {"incr_ratio": 3, "incr_every_n_steps": 100}),
        ({"backoff_factor": 0.75, "growth_interval": 7}, "dynamic", {"decr_ratio": 0.75, "incr_every_n_steps": 7}),
        ({"mode": "log_max", "max_loss_scale": 16}, "log_max", {"init_loss_scale": 16, "max_loss_scale": 16}),
        ({"mode": "log_max", "init_scale": 8, "deviations": 2}, "log_max", {"init_loss_scale": 8, "deviations": 2}),
    ],
)
def test_each_value_describes_its_manager(spec: Any, mode: str, given: dict[str, Any]) -> None:
    before = copy.copy(spec)
    for made in (tfmp.get_loss_scale_manager(spec), manager_of_wrapper(spec)):
        assert type(made) is type(tfmp.get_loss_scale_manager(mode))
        assert made.get_config() == _DEFAULTS[mode] | given
    assert spec == before


@pytest.mark.graph
def test_manager_is_taken_and_that_of_keras_has_numbers_of_numpy_too() -> None:
    assert dynamic_manager().get_config() == _DEFAULTS["dynamic"]
    own = dynamic_manager(initial_scale=np.float32(8), dynamic_growth_steps=np.int64(7))
    assert own.get_config() == _DEFAULTS["dynamic"] | {"init_loss_scale": 8, "incr_every_n_steps": 7}
    assert tfmp.get_loss_scale_manager(own) is own


def _exponential(init_loss_scale: Any = 1024, **settings: Any) -> tfmp.ExponentialUpdateLossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(init_loss_scale, **{"incr_every_n_steps": 3} | settings)


_CALLS: dict[str, Callable[[Any], object]] = {
    "fixed": tfmp.FixedLossScaleManager,
    "exponential": lambda given: _exponential(**given),
    "log max": lambda given: tfmp.LogMaxLossScaleManager(**given),
    "as Keras": lambda given: dynamic_manager(**given),
    "described": tfmp.get_loss_scale_manager,
    "of a wrapper": manager_of_wrapper,
    "continued": lambda given: _exponential(hysteresis=2).continue_from(**{"loss_scale": 8} | given),
    "log max continued": lambda given: tfmp.LogMaxLossScaleManager().continue_from(**{"loss_scale": 8} | given),
    "set": lambda given: _exponential().set_loss_scale(given),
    "updated": lambda given: tfmp.LogMaxLossScaleManager().update_loss_scale(given),
}

_OUT_OF_RANGE = {
    "fixed": [
        (0, "loss_scale must be a float32 number of at least 1, got 0."),
        (0.5, "loss_scale must be a float32 number of at least 1, got 0.5: a manager with a lower min_loss_scale"),
        (1e39, "loss_scale must be a float32 number of at least 1, got 1e+39."),
        (math.inf, "loss_scale must be finite, got inf."),
        (10**400, "loss_scale must be within the range of a float, got about 2**1329."),
        (Fraction(10**400), "loss_scale must be within the range of a float, got about 2**1329."),
    ],
    "exponential": [
        ({"incr_every_n_steps": 1.5}, "incr_every_n_steps must be a whole number from 1 to 2**31 - 1, got 1.5."),
        ({"incr_every_n_steps": 2**31}, "incr_every_n_steps must be a whole number from 1 to 2**31 - 1, got 21474"),
        ({"init_loss_scale": 0.5}, "init_loss_scale must be a float32 number of at least 1, got 0.5: a manager with"),
        ({"incr_every_n_steps": 0}, "incr_every_n_steps must be a whole number from 1 to 2**31 - 1, got 0."),
        ({"decr_every_n_nan_or_inf": -1}, "decr_every_n_nan_or_inf must be a whole number from 1 to 2**31 - 1, got -1"),
        ({"incr_ratio": 1}, "incr_ratio must be greater than 1, got 1."),
        ({"incr_ratio": math.inf}, "incr_ratio must be finite, got inf."),
        ({"decr_ratio": 1}, "decr_ratio must lie between 0 and 1, got 1."),
        ({"decr_ratio": 0}, "decr_ratio must lie between 0 and 1, got 0."),
        ({"decr_ratio": math.nan}, "decr_ratio must be finite, got nan."),
        ({"min_loss_scale": 2.0**-127}, "min_loss_scale must be a float32 number of at least 1.17549e-38, got 5.8"),
        ({"max_loss_scale": math.inf}, "max_loss_scale must be finite, got inf."),
        ({"max_loss_scale": 0.5}, "min_loss_scale must not be greater than max_loss_scale, got 1 and 0.5."),
        ({"min_loss_scale": 2048}, "init_loss_scale must be a float32 number of at least 2048, got 1024"),
        ({"max_loss_scale": 512}, "init_loss_scale must not be greater than max_loss_scale, got 1024 and 512."),
        ({"hysteresis": 0}, "hysteresis must be a whole number from 1 to 2**31 - 1, got 0."),
        ({"tolerance": -0.1}, "tolerance must be at least 0 and less than 1, got -0.1."),
        ({"tolerance": 1}, "tolerance must be at least 0 and less than 1, got 1."),
    ],
    "continued": [
        ({"good_steps": -1}, "good_steps must be a whole number from 0 to 2**31 - 1, got -1."),
        ({"bad_steps": -2}, "bad_steps must be a whole number from -1 to 2**31 - 1, got -2."),
    ],
    "log max": [
        ({"init_loss_scale": 1000}, "init_loss_scale must be a power of two, got 1000.0."),
        ({"min_loss_scale": 0.3}, "min_loss_scale must be a power of two, got 0.3"),
        ({"max_loss_scale": 2**24 + 2}, "max_loss_scale must be a power of two, got 16777218.0."),
        ({"limit": 0}, "limit must be greater than 0, got 0."),
        ({"deviations": -1}, "deviations must lie between 0 and 1000, got -1."),
        ({"deviations": 1001}, "deviations must lie between 0 and 1000, got 1001."),
        ({"deviations": math.inf}, "deviations must be finite, got inf."),
        ({"mean_decay": 1}, "mean_decay must be at least 0 and less than 1, got 1."),
        ({"deviation_decay": -0.5}, "deviation_decay must be at least 0 and less than 1, got -0.5."),
        ({"incr_every_n_steps": 0}, "incr_every_n_steps must be a whole number from 1 to 2**31 - 1, got 0."),
    ],
    "as Keras": [
        ({"initial_scale": 0.5}, "initial_scale must be a float32 number of at least 1, got 0.5"),
        ({"dynamic_growth_steps": 0}, "dynamic_growth_steps must be a whole number from 1 to 2**31 - 1"),
    ],
    "described": [
        ("Dynamic", "the mode of a loss scale is one of dynamic, static, fixed, log_max; got 'Dynamic'."),
        ({"mode": ["dynamic"]}, "the mode of a loss scale is one of dynamic, static, fixed, log_max; got ['dynamic']."),
        ({"mode": "static", "scale_window": 8}, "a loss scale of mode 'static' has no setting 'scale_window'; it take"),
        ({"growth": 8}, "a loss scale of mode 'dynamic' has no setting 'growth'; it takes init_loss_scale, incr_every"),
        ({"mode": "log_max", "scale_factor": 2}, "a loss scale of mode 'log_max' has no setting 'scale_factor'; it "),
        ({"init_scale": 8, "init_loss_scale": 8}, "init_scale and init_loss_scale are the same setting: give one"),
        ({"scale_factor": 2, "growth_factor": 2}, "scale_factor and growth_factor are the same setting: give one"),
        ({"decr_ratio": 0.5, "scale_factor": 2}, "decr_ratio and scale_factor are the same setting: give one"),
        ({"scale_factor": 0}, "scale_factor must be greater than 0, got 0."),
        ({"growth_factor": 0.5}, "growth_factor (incr_ratio) must be greater than 1, got 0.5."),
        ({"scale_factor": 0.5}, "scale_factor (incr_ratio) must be greater than 1, got 0.5."),
        ({"incr_ratio": 0.5}, "incr_ratio must be greater than 1, got 0.5."),
        ({"init_scale": 0, "mode": "fixed"}, "init_scale (loss_scale) must be a float32 number of at least 1, got 0."),
        ({"max_loss_scale": 0.5}, "min_loss_scale (by default) must not be greater than max_loss_scale, got 1 and 0.5"),
        (
            {"init_scale": 4, "max_loss_scale": 2},
            "init_scale (init_loss_scale) must not be greater than max_loss_scale",
        ),
        (
            {"mode": "log_max", "init_scale": 2**25},
            "init_scale (init_loss_scale) must not be greater than max_loss_scale (by default), got ",
        ),
        ({"max_loss_scale": math.nan}, "max_loss_scale must be finite, got nan."),
        ({"mode": "log_max", "max_loss_scale": 1000}, "max_loss_scale must be a power of two, got 1000.0."),
        (0.5, "loss_scale must be a float32 number of at least 1, got 0.5: a manager with a lower min_loss_scale al"),
    ],
}

_OF_ANOTHER_TYPE = {
    "fixed": [(bad, f"loss_scale must be a number, got {bad!r} of type") for bad in (None, "8", True, 1j)],
    "exponential": [
        ({"consecutive_hysteresis": 1}, "consecutive_hysteresis must be True or False, got 1 of type int.")
    ],
    "continued": [
        ({"loss_scale": bad}, f"loss_scale must be a number, got {bad!r} of type") for bad in (None, "8", True, [8])
    ],
    "log max continued": [
        ({"loss_scale": "8"}, "loss_scale must be a number, got '8' of type str."),
        ({"good_steps": None}, "good_steps must be a number, got None of type NoneType."),
        ({"bad_steps": "2"}, "bad_steps must be a number, got '2' of type str."),
    ],
    "set": [(bad, "loss_scale must be a number, got ") for bad in ("8", None, np.array([8.0, 8.0]))],
    "updated": [(True, "LogMaxLossScaleManager.update_loss_scale needs max_abs, got None: pass ")],
    "as Keras": [({"initial_scale": "8"}, "initial_scale must be a number, got '8' of type str.")],
    "described": [
        ({"scale_factor": "2"}, "scale_factor must be a number, got '2' of type str."),
        # What the user gave is shown as it is.
        (
            {"init_scale": "init_loss_scale, got 8"},
            "init_scale (init_loss_scale) must be a number, got 'init_loss_scale, got 8'",
        ),
        ({"max_loss_scale": "8"}, "max_loss_scale must be a number, got '8' of type str."),
        ({"min_loss_scale": "8"}, "min_loss_scale must be a number, got '8' of type str."),
        *((bad, "a loss scale is described by a tfmp.LossScaleManager, a number, a name or ") for bad in (True, [512])),
        (None, 'None describes no loss scale: pass 1 for no scaling, or "dynamic" for the default.'),
        (tfmp.FixedLossScaleManager, "the loss-scale manager is the class FixedLossScaleManager: pass an object of it"),
    ],
    "of a wrapper": [
        (
            bad,
            f'loss_scale_manager must be a tfmp.LossScaleManager, "dynamic", or a number for a fixed scale, got {bad}',
        )
        for bad in (None, True)
    ],
}


@pytest.mark.graph
@pytest.mark.parametrize(
    ("call", "given", "error", "message"),
    [
        pytest.param(call, given, error, message, id=f"{call}: {given}"[:80])
        for error, table in ((ValueError, _OUT_OF_RANGE), (TypeError, _OF_ANOTHER_TYPE))
        for call, rows in table.items()
        for given, message in rows
    ],
)
def test_setting_is_refused_by_name_and_value(call: str, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        _CALLS[call](given)


_BOUNDS = {"min_loss_scale": 2, "max_loss_scale": 16}
_STATEFUL: dict[str, Callable[[], tfmp.LossScaleManager]] = {
    "exponential": lambda: _exponential(8, hysteresis=2, tolerance=0.5, **_BOUNDS),
    "log max": lambda: tfmp.LogMaxLossScaleManager(init_loss_scale=8, **_BOUNDS),
}
#: A state that each kind of manager takes, with the least values. A scale out of LogMax's bounds is corrected later.
_LEAST = {
    "exponential": {"loss_scale": 2.0, "good_steps": 0, "bad_steps": -1, "steps_since_change": 0},
    "log max": {
        **{"loss_scale": 2.0**-126, "log_mean": -3.5, "log_variance": 0.0},
        **{"observations": 0, "margin": 0, "good_steps": 0},
    },
}


_COUNT = "must be a whole number from {} to 2**31 - 1, got {}"


@pytest.mark.parametrize(
    ("kind", "name", "wrong", "message"),
    [
        ("exponential", "loss_scale", 1.5, "must be a float32 number of at least 2, got 1.5"),
        ("exponential", "loss_scale", 17.0, "must not be greater than max_loss_scale, got 17.0."),
        ("exponential", "good_steps", -1, _COUNT.format(0, -1)),
        ("exponential", "bad_steps", -2, _COUNT.format(-1, -2)),
        ("exponential", "steps_since_change", -1, _COUNT.format(0, -1)),
        ("exponential", "good_steps", "none", "must be a number, got 'none' of type str."),
        ("log max", "loss_scale", 0.0, "must be a float32 number of at least 1.17549e-38, got 0.0"),
        ("log max", "log_mean", math.inf, "must be finite, got inf."),
        ("log max", "log_variance", math.nan, "must be finite, got nan."),
        ("log max", "observations", -1, _COUNT.format(0, -1)),
        ("log max", "margin", 0.5, _COUNT.format(0, 0.5)),
        ("log max", "good_steps", -1, _COUNT.format(0, -1)),
    ],
)
def test_state_that_the_rule_cannot_take_is_refused_whole(kind: str, name: str, wrong: Any, message: str) -> None:
    manager = _STATEFUL[kind]()
    before = manager.state_dict()
    with pytest.raises((TypeError, ValueError), match=f"^{name} {re.escape(message)}"):
        manager.load_state_dict(_LEAST[kind] | {name: wrong})
    assert manager.state_dict() == before
    with pytest.raises(TypeError, match=r"^state_dict must be a mapping from names to numbers, as .*, got 8.0 of type"):
        manager.load_state_dict(8.0)  # type: ignore[arg-type]
    manager.load_state_dict(_LEAST[kind])
    assert manager.state_dict() == _LEAST[kind]


def test_state_at_its_highest_is_taken_and_one_without_a_name_is_not() -> None:
    manager, highest = _STATEFUL["exponential"](), {"loss_scale": 16.0, "good_steps": 1, "bad_steps": 1}
    manager.load_state_dict(highest | {"steps_since_change": 3})
    with pytest.raises(ValueError, match="keeps loss_scale, good_steps, bad_steps, steps_since_change, got loss_scale"):
        manager.load_state_dict({"loss_scale": 4.0})
    assert manager.state_dict() == highest | {"steps_since_change": 3}
