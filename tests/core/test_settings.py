import math
from typing import Any

import numpy as np
import pytest

from tfmp.core import settings


@pytest.mark.parametrize("check", [settings.number, settings.positive, settings.count])
@pytest.mark.parametrize("bad", [None, "8", True, [8], 1j])
def test_setting_that_is_not_a_number_is_refused_with_its_name(check: Any, bad: Any) -> None:
    with pytest.raises(TypeError, match=r"^limit must be a number, got .* of type "):
        check("limit", bad)


@pytest.mark.parametrize("check", [settings.number, settings.positive, settings.count])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_number_that_is_not_finite_is_refused(check: Any, bad: float) -> None:
    with pytest.raises(ValueError, match=f"^limit must be finite, got {bad}"):
        check("limit", bad)


@pytest.mark.parametrize("good", [8, 8.0, np.float32(8), np.int64(8)])
def test_python_and_numpy_numbers_are_accepted(good: Any) -> None:
    assert settings.number("limit", good) == settings.positive("limit", good) == settings.count("limit", good) == 8


@pytest.mark.parametrize("bad", [0, -1, 1.5, 2**31])
def test_count_out_of_range_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"^limit must be a whole number from 1 to 2\*\*31 - 1, got "):
        settings.count("limit", bad)


@pytest.mark.parametrize("bad", [0, -0.5])
def test_number_not_above_zero_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=f"^limit must be greater than 0, got {bad}"):
        settings.positive("limit", bad)
