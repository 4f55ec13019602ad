import fractions
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tfmp.core import settings

_NUMBERS = (settings.number, settings.positive, settings.count)


@pytest.mark.parametrize(
    ("checks", "values", "error", "message"),
    [
        (_NUMBERS, [None, "8", True, [8], 1j], TypeError, "limit must be a number, got .* of type "),
        (_NUMBERS, [math.inf, -math.inf, math.nan], ValueError, "limit must be finite, got -?(inf|nan)"),
        (
            [settings.count],
            [0, -1, 1.5, 2**31],
            ValueError,
            r"limit must be a whole number from 1 to 2\*\*31 - 1, got ",
        ),
        ([settings.positive], [0, -0.5], ValueError, "limit must be greater than 0, got (0|-0.5)"),
        (
            [settings.real, *_NUMBERS, settings.loss_scale],
            [10**400, fractions.Fraction(10**400)],
            ValueError,
            r"limit must be within the range of a float, got about 2\*\*1329\.$",
        ),
    ],
)
def test_number_out_of_range_or_of_another_type_is_refused_with_its_name(
    checks: Sequence[Any], values: Sequence[Any], error: type[Exception], message: str
) -> None:
    for check, bad in itertools.product(checks, values):
        with pytest.raises(error, match=f"^{message}"):
            check("limit", bad)


@pytest.mark.parametrize("good", [8, 8.0, np.float32(8), np.int64(8)])
def test_python_and_numpy_numbers_are_accepted(good: Any) -> None:
    assert settings.number("limit", good) == settings.positive("limit", good) == settings.count("limit", good) == 8


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
