"""`get_loss_scale_manager` with every kind of value."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tfmp
from tfmp.core.managers.from_config import dynamic_manager, manager_of_wrapper

pytestmark = pytest.mark.graph

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


def _default(mode: str) -> dict[str, Any]:
    return {name: default for name, (default, _) in _SETTINGS[mode].items()}


@pytest.mark.parametrize("mode", _SETTINGS)
def test_each_mode_has_the_documented_defaults_and_accepts_every_argument_of_its_manager(mode: str) -> None:
    assert tfmp.get_loss_scale_manager(mode).get_config() == _default(mode)
    given = {name: other for name, (_, other) in _SETTINGS[mode].items()}
    manager = tfmp.get_loss_scale_manager({"mode": mode, **given})
    assert manager.get_config() == given
    assert set(given) == set(inspect.signature(type(manager)).parameters)


def _dynamic(**settings: Any) -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(**_default("dynamic") | settings)


def _log_max(**settings: Any) -> tfmp.LossScaleManager:
    return tfmp.LogMaxLossScaleManager(**_default("log_max") | settings)


@pytest.mark.parametrize(
    ("spec", "make"),
    [
        (512, lambda: tfmp.FixedLossScaleManager(512)),
        (np.float32(512), lambda: tfmp.FixedLossScaleManager(512)),
        ({"mode": "static", "init_scale": 512.0}, lambda: tfmp.FixedLossScaleManager(512)),
        ({"mode": "static"}, lambda: tfmp.FixedLossScaleManager(2**15)),
        ("fixed", lambda: tfmp.FixedLossScaleManager(2**15)),
        ({"mode": "fixed", "loss_scale": 512}, lambda: tfmp.FixedLossScaleManager(512)),
        ("dynamic", _dynamic),
        ({}, _dynamic),
        ({"init_scale": 512.0, "mode": "dynamic"}, lambda: _dynamic(init_loss_scale=512)),
        ({"max_loss_scale": 1024}, lambda: _dynamic(init_loss_scale=1024, max_loss_scale=1024)),
        ({"min_loss_scale": 2**20}, lambda: _dynamic(init_loss_scale=2**20, min_loss_scale=2**20)),
        (
            {"scale_factor": 4.0, "scale_window": 100},
            lambda: _dynamic(incr_ratio=4, decr_ratio=0.25, incr_every_n_steps=100),
        ),
        (
            {"growth_factor": 3, "backoff_factor": 0.75, "growth_interval": 7, "hysteresis": 2, "min_loss_scale": 0.5},
            lambda: _dynamic(incr_ratio=3, decr_ratio=0.75, incr_every_n_steps=7, hysteresis=2, min_loss_scale=0.5),
        ),
        ("log_max", _log_max),
        ({"mode": "log_max", "max_loss_scale": 16}, lambda: _log_max(init_loss_scale=16, max_loss_scale=16)),
        ({"mode": "log_max", "init_scale": 8, "deviations": 2}, lambda: _log_max(init_loss_scale=8, deviations=2)),
    ],
)
def test_each_value_describes_its_manager(spec: Any, make: Callable[[], tfmp.LossScaleManager]) -> None:
    given = copy.copy(spec)
    expected = make()
    for made in (tfmp.get_loss_scale_manager(spec), manager_of_wrapper(spec)):
        assert type(made) is type(expected)
        assert made.get_config() == expected.get_config()
    assert spec == given


def test_manager_is_returned_unchanged() -> None:
    manager = tfmp.FixedLossScaleManager(8)
    assert tfmp.get_loss_scale_manager(manager) is manager


def test_dynamic_manager_has_the_rule_of_keras() -> None:
    assert dynamic_manager().get_config() == _default("dynamic")
    own = dynamic_manager(initial_scale=8, dynamic_growth_steps=7)
    assert own.get_config() == _default("dynamic") | {"init_loss_scale": 8, "incr_every_n_steps": 7}
