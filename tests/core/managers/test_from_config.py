"""`get_loss_scale_manager` with every kind of value, and the error messages for wrong values."""

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest

import tfmp
from tfmp.core.managers.from_config import dynamic_manager, manager_of_wrapper

pytestmark = pytest.mark.graph

_DYNAMIC: dict[str, Any] = {
    "init_loss_scale": 2**15,
    "incr_every_n_steps": 2000,
    "decr_every_n_nan_or_inf": 1,
    "incr_ratio": 2,
    "decr_ratio": 0.5,
    "min_loss_scale": 1,
    "max_loss_scale": None,
    "hysteresis": 1,
    "consecutive_hysteresis": False,
    "tolerance": 0,
}
_LOG_MAX: dict[str, Any] = {
    "init_loss_scale": 2**15,
    "limit": 65504,
    "deviations": 3,
    "mean_decay": 0.99,
    "deviation_decay": 0.999,
    "incr_every_n_steps": 1000,
    "min_loss_scale": 1,
    "max_loss_scale": 2**24,
}


@pytest.mark.parametrize(
    ("spec", "manager", "config"),
    [
        (512, tfmp.FixedLossScaleManager, {"loss_scale": 512}),
        (np.float32(512), tfmp.FixedLossScaleManager, {"loss_scale": 512}),
        ({"mode": "static", "init_scale": 512.0}, tfmp.FixedLossScaleManager, {"loss_scale": 512}),
        ({"mode": "static"}, tfmp.FixedLossScaleManager, {"loss_scale": 2**15}),
        ("fixed", tfmp.FixedLossScaleManager, {"loss_scale": 2**15}),
        ({"mode": "fixed", "loss_scale": 512}, tfmp.FixedLossScaleManager, {"loss_scale": 512}),
        ("dynamic", tfmp.ExponentialUpdateLossScaleManager, _DYNAMIC),
        ({}, tfmp.ExponentialUpdateLossScaleManager, _DYNAMIC),
        (
            {"init_scale": 512.0, "mode": "dynamic"},
            tfmp.ExponentialUpdateLossScaleManager,
            _DYNAMIC | {"init_loss_scale": 512},
        ),
        (
            {"max_loss_scale": 1024},
            tfmp.ExponentialUpdateLossScaleManager,
            _DYNAMIC | {"init_loss_scale": 1024, "max_loss_scale": 1024},
        ),
        (
            {"min_loss_scale": 2**20},
            tfmp.ExponentialUpdateLossScaleManager,
            _DYNAMIC | {"init_loss_scale": 2**20, "min_loss_scale": 2**20},
        ),
        (
            {"mode": "log_max", "max_loss_scale": 16},
            tfmp.LogMaxLossScaleManager,
            _LOG_MAX | {"init_loss_scale": 16, "max_loss_scale": 16},
        ),
        (
            {"scale_factor": 4.0, "scale_window": 100},
            tfmp.ExponentialUpdateLossScaleManager,
            _DYNAMIC | {"incr_ratio": 4, "decr_ratio": 0.25, "incr_every_n_steps": 100},
        ),
        (
            {"growth_factor": 3, "backoff_factor": 0.75, "growth_interval": 7, "hysteresis": 2, "min_loss_scale": 0.5},
            tfmp.ExponentialUpdateLossScaleManager,
            _DYNAMIC
            | {"incr_ratio": 3, "decr_ratio": 0.75, "incr_every_n_steps": 7, "hysteresis": 2, "min_loss_scale": 0.5},
        ),
        ("log_max", tfmp.LogMaxLossScaleManager, _LOG_MAX),
        (
            {"mode": "log_max", "init_scale": 8, "deviations": 2},
            tfmp.LogMaxLossScaleManager,
            _LOG_MAX | {"init_loss_scale": 8, "deviations": 2},
        ),
    ],
)
def test_each_value_describes_its_manager(spec: Any, manager: type, config: dict[str, Any]) -> None:
    made = tfmp.get_loss_scale_manager(spec)
    assert type(made) is manager
    assert made.get_config() == config


def test_manager_is_returned_unchanged() -> None:
    manager = tfmp.FixedLossScaleManager(8)
    assert tfmp.get_loss_scale_manager(manager) is manager


# Every argument of each manager, with a value that is not the default.
_SETTINGS: dict[str, dict[str, Any]] = {
    "dynamic": {
        "init_loss_scale": 8,
        "incr_every_n_steps": 7,
        "decr_every_n_nan_or_inf": 3,
        "incr_ratio": 4,
        "decr_ratio": 0.25,
        "min_loss_scale": 2,
        "max_loss_scale": 16,
        "hysteresis": 5,
        "consecutive_hysteresis": True,
        "tolerance": 0.5,
    },
    "static": {"loss_scale": 8},
    "log_max": {
        "init_loss_scale": 8,
        "limit": 1000,
        "deviations": 1000,
        "mean_decay": 0.5,
        "deviation_decay": 0.75,
        "incr_every_n_steps": 7,
        "min_loss_scale": 2,
        "max_loss_scale": 16,
    },
}


@pytest.mark.parametrize("mode", _SETTINGS)
def test_each_mode_accepts_every_argument_of_its_manager(mode: str) -> None:
    manager = tfmp.get_loss_scale_manager({"mode": mode, **_SETTINGS[mode]})
    assert manager.get_config() == _SETTINGS[mode]
    assert set(_SETTINGS[mode]) == set(inspect.signature(type(manager)).parameters)
    default = tfmp.get_loss_scale_manager(mode if mode != "static" else 1).get_config()
    assert not set(default.items()) & set(_SETTINGS[mode].items())


def test_given_dict_is_not_changed() -> None:
    spec = {"mode": "static", "init_scale": 8}
    tfmp.get_loss_scale_manager(spec)
    assert spec == {"mode": "static", "init_scale": 8}


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("Dynamic", ValueError, "one of dynamic, static, fixed, log_max; got 'Dynamic'."),
        ({"mode": None}, ValueError, "one of dynamic, static, fixed, log_max; got None."),
        ({"mode": ["dynamic"]}, ValueError, "one of dynamic, static, fixed, log_max; got ['dynamic']."),
        ({"mode": "static", "scale_window": 8}, ValueError, "mode 'static' has no setting 'scale_window'; it takes lo"),
        ({"growth": 8}, ValueError, "mode 'dynamic' has no setting 'growth'; it takes init_loss_scale, incr_every_n"),
        ({"mode": "log_max", "scale_factor": 2}, ValueError, "mode 'log_max' has no setting 'scale_factor'; it takes"),
        ({"init_scale": 8, "init_loss_scale": 8}, ValueError, "init_scale and init_loss_scale are the same setting"),
        ({"scale_factor": 2, "growth_factor": 2}, ValueError, "scale_factor and growth_factor are the same setting"),
        ({"decr_ratio": 0.5, "scale_factor": 2}, ValueError, "decr_ratio and scale_factor are the same setting"),
        ({"scale_window": 1, "growth_interval": 1}, ValueError, "scale_window and growth_interval are the same"),
        ({"scale_factor": 0}, ValueError, "scale_factor must be greater than 0, got 0."),
        ({"scale_factor": "2"}, TypeError, "scale_factor must be a number, got '2' of type str."),
        ({"init_scale": "512"}, TypeError, "init_scale (init_loss_scale) must be a number, got '512'"),
        (
            {"init_scale": "incr_ratio, got 8"},
            TypeError,
            "init_scale (init_loss_scale) must be a number, got 'incr_ratio, got 8' of type str.",
        ),
        ({"growth_factor": 0.5}, ValueError, "growth_factor (incr_ratio) must be greater than 1, got 0.5."),
        ({"scale_factor": 0.5}, ValueError, "scale_factor (incr_ratio) must be greater than 1, got 0.5."),
        ({"incr_ratio": 0.5}, ValueError, "incr_ratio must be greater than 1, got 0.5."),
        ({"init_scale": 0, "mode": "fixed"}, ValueError, "init_scale (loss_scale) must be a float32 number of at"),
        (
            {"max_loss_scale": 0.5},
            ValueError,
            "min_loss_scale (by default) must not be greater than max_loss_scale, got 1 and 0.5.",
        ),
        (
            {"init_scale": 4, "max_loss_scale": 2},
            ValueError,
            "init_scale (init_loss_scale) must not be greater than max_loss_scale, got 4 and 2.",
        ),
        ({"max_loss_scale": "8"}, TypeError, "max_loss_scale must be a number, got '8' of type str."),
        ({"min_loss_scale": "8"}, TypeError, "min_loss_scale must be a number, got '8' of type str."),
        ({"max_loss_scale": math.nan}, ValueError, "max_loss_scale must be finite, got nan."),
        ({"mode": "log_max", "max_loss_scale": 1000}, ValueError, "max_loss_scale must be a power of two, got 1000.0."),
        (
            0.5,
            ValueError,
            "loss_scale must be a float32 number of at least 1, got 0.5: "
            "a manager with a lower min_loss_scale allows it.",
        ),
        (math.nan, ValueError, "loss_scale must be finite, got nan."),
        (
            True,
            TypeError,
            "a number, a name or a dict with one of the modes dynamic, static, fixed, log_max; got",
        ),
        (None, TypeError, 'None describes no loss scale: pass 1 for no scaling, or "dynamic" for the default.'),
        ([512], TypeError, "got [512] of type list."),
        (tfmp.FixedLossScaleManager, TypeError, "pass an object of it, FixedLossScaleManager(...)."),
    ],
)
def test_value_that_describes_no_manager_is_refused(spec: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        tfmp.get_loss_scale_manager(spec)


@pytest.mark.parametrize(
    ("arguments", "config"),
    [({}, {}), ({"initial_scale": 8, "dynamic_growth_steps": 7}, {"init_loss_scale": 8, "incr_every_n_steps": 7})],
)
def test_dynamic_manager_has_the_rule_of_keras(arguments: dict[str, Any], config: dict[str, Any]) -> None:
    assert dynamic_manager(**arguments).get_config() == _DYNAMIC | config


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"initial_scale": 0.5}, ValueError, "initial_scale must be a float32 number of at least 1, got 0.5"),
        ({"initial_scale": "8"}, TypeError, "initial_scale must be a number, got '8' of type str."),
        ({"dynamic_growth_steps": 0}, ValueError, "dynamic_growth_steps must be a whole number from 1 to 2**31 - 1"),
    ],
)
def test_dynamic_manager_refuses_settings_in_the_words_of_keras(
    bad: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        dynamic_manager(**bad)


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        ("dynamic", _DYNAMIC),
        ({"mode": "dynamic"}, _DYNAMIC),
        ("fixed", {"loss_scale": 2**15}),
        (8, {"loss_scale": 8}),
        ("log_max", _LOG_MAX),
    ],
)
def test_each_value_means_the_same_manager_to_a_wrapper(spec: Any, config: dict[str, Any]) -> None:
    assert manager_of_wrapper(spec).get_config() == config


@pytest.mark.parametrize("bad", [None, True, False])
def test_wrapper_does_not_take_what_may_be_meant_otherwise(bad: Any) -> None:
    with pytest.raises(TypeError, match=f'^loss_scale_manager must be a tfmp.LossScaleManager, "dynamic", .*{bad}'):
        manager_of_wrapper(bad)
