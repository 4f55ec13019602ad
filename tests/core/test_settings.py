import fractions
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


@pytest.mark.parametrize(
    "check", [settings.real, settings.number, settings.positive, settings.count, settings.loss_scale]
)
@pytest.mark.parametrize("bad", [10**400, fractions.Fraction(10**400)])
def test_number_beyond_a_float_is_refused_like_one_that_is_not_finite(check: Any, bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^steps must be within the range of a float, got about 2\*\*1329\.$"):
        check("steps", bad)


@pytest.mark.parametrize(
    ("first", "keywords", "message"),
    [
        ("cuda", {}, r"^tfmp.autocast takes no device, got 'cuda', .* write tfmp.autocast\(\)\.$"),
        ("cuda:1", {"dtype": "float16"}, "takes no device, got 'cuda:1'"),
        (
            None,
            {"device_type": "cpu"},
            "^tfmp.autocast takes no device_type, got 'cpu', which is an argument of torch: ",
        ),
        ("float16", {"cache_enabled": True}, "takes no cache_enabled, got True"),
    ],
)
def test_argument_of_torch_is_refused_with_the_call_without_it(
    first: str | None, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        settings.refuse_arguments_of_torch("tfmp.autocast()", first, keywords)


@pytest.mark.parametrize("first", ["float16", "bfloat16", None, 8.0])
def test_other_arguments_are_not_taken_for_those_of_torch(first: Any) -> None:
    settings.refuse_arguments_of_torch("tfmp.autocast()", first, {"enabled": False, "dtype": "float16"})
