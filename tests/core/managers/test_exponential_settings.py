"""The settings that the exponential and the fixed manager refuse, and their error messages."""

import math
import re
from typing import Any

import numpy as np
import pytest

import tfmp

pytestmark = pytest.mark.graph


def _manager(init_loss_scale: float = 1024, **settings: Any) -> tfmp.ExponentialUpdateLossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(init_loss_scale, **{"incr_every_n_steps": 3} | settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"good_steps": -1}, "good_steps must be a whole number from 0 to .*, got -1"),
        ({"bad_steps": -2}, "bad_steps must be a whole number from -1 to .*, got -2"),
    ],
)
def test_count_out_of_range_is_refused_by_continue_from(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        _manager(hysteresis=2).continue_from(8, **given)


@pytest.mark.parametrize("bad", [None, "8", True, [8]])
def test_scale_that_is_not_a_number_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"^loss_scale must be a number, got .* of type "):
        _manager().continue_from(bad)
    with pytest.raises(TypeError, match=r"^loss_scale must be a number, got .* of type "):
        tfmp.FixedLossScaleManager(bad)


@pytest.mark.parametrize(
    ("bad", "cure"),
    [
        (0, ""),
        (0.5, ": a manager with a lower min_loss_scale allows it"),
        (-8, ""),
        (math.inf, ""),
        (math.nan, ""),
        (1e39, ""),
    ],
)
def test_scale_out_of_range_is_refused(bad: float, cure: str) -> None:
    with pytest.raises(ValueError, match=rf"^loss_scale must be .*got {re.escape(repr(bad))}{cure}\.$"):
        tfmp.FixedLossScaleManager(bad)
    with pytest.raises(ValueError, match=rf"^init_loss_scale must be .*got {re.escape(repr(bad))}{cure}\.$"):
        _manager(bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"incr_every_n_steps": 0}, "incr_every_n_steps must be a whole number from 1 to .*, got 0"),
        ({"incr_every_n_steps": 2.5}, "incr_every_n_steps must be a whole number from 1 to .*, got 2.5"),
        ({"incr_every_n_steps": 2**31}, "incr_every_n_steps must be a whole number from 1 to .*, got 2147483648"),
        ({"decr_every_n_nan_or_inf": -1}, "decr_every_n_nan_or_inf must be a whole number from 1 to .*, got -1"),
        ({"incr_ratio": 1}, "incr_ratio must be greater than 1, got 1"),
        ({"incr_ratio": 0.5}, "incr_ratio must be greater than 1, got 0.5"),
        ({"incr_ratio": math.inf}, "incr_ratio must be finite, got inf"),
        ({"decr_ratio": 1}, "decr_ratio must lie between 0 and 1, got 1"),
        ({"decr_ratio": 0}, "decr_ratio must lie between 0 and 1, got 0"),
        ({"decr_ratio": 2}, "decr_ratio must lie between 0 and 1, got 2"),
        ({"decr_ratio": math.nan}, "decr_ratio must be finite, got nan"),
        ({"min_loss_scale": 0}, "min_loss_scale must be a float32 number of at least 1.17549e-38, got 0"),
        ({"min_loss_scale": 2.0**-127}, "min_loss_scale must be a float32 number of at least 1.17549e-38, got 5.8"),
        ({"max_loss_scale": math.inf}, "max_loss_scale must be finite, got inf"),
        ({"max_loss_scale": 0.5}, "min_loss_scale must not be greater than max_loss_scale, got 1 and 0.5"),
        ({"min_loss_scale": 2048}, "init_loss_scale must be a float32 number of at least 2048, got 1024"),
        ({"max_loss_scale": 512}, "init_loss_scale must not be greater than max_loss_scale, got 1024 and 512"),
        ({"hysteresis": 0}, "hysteresis must be a whole number from 1 to .*, got 0"),
        ({"tolerance": -0.1}, "tolerance must be at least 0 and less than 1, got -0.1"),
        ({"tolerance": 1}, "tolerance must be at least 0 and less than 1, got 1"),
    ],
)
def test_setting_out_of_range_is_refused(bad: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        _manager(**bad)


def test_consecutive_hysteresis_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^consecutive_hysteresis must be True or False, got 1 of type int\."):
        _manager(consecutive_hysteresis=1)


def test_numpy_numbers_are_accepted_as_settings() -> None:
    manager = _manager(np.float32(8), incr_every_n_steps=np.int64(10), incr_ratio=np.float64(4))
    assert manager.get_config().items() >= {"init_loss_scale": 8, "incr_every_n_steps": 10, "incr_ratio": 4}.items()
