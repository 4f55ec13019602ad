"""What may be kept in half precision, and how it may be rounded."""

from typing import Any

import pytest

from tfmp.optimizer_state.settings import half_settings


@pytest.mark.parametrize(
    ("slots", "rounding", "message"),
    [
        ({}, "nearest", "there is nothing to keep in half precision: name the optimizer's slots"),
        ({"momentum": "float16"}, "up", 'rounding must be "nearest" or "stochastic", got \'up\'.'),
        ({"momentum": "float32"}, "nearest", 'momentum must be "float16" or "bfloat16", got \'float32\'.'),
        ({"velocity": "bfloat16"}, "nearest", r"velocity='bfloat16' needs rounding='stochastic': a step changes"),
        ({"velocity": "float16"}, "nearest", r"velocity='float16' is not possible: .* pass velocity='bfloat16'"),
        ({"velocity": "float16"}, "stochastic", r"velocity='float16' is not possible"),
        ({"accumulator": "bfloat16"}, "nearest", r"accumulator='bfloat16' needs rounding='stochastic'"),
        ({"average": "bfloat16"}, "stochastic", "average cannot be kept in half precision: it is the moving average"),
        ({"average_gradient": "bfloat16"}, "stochastic", "average_gradient cannot be kept in half precision: RMSprop"),
        ({"gradient_accumulator": "bfloat16"}, "stochastic", r"or accumulate by tfmp\.LossScaleOptimizer"),
    ],
)
def test_what_is_not_sound_is_refused(slots: dict[str, str], rounding: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        half_settings(slots, rounding, 0)


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (0.5, ValueError), ("1", TypeError), (None, TypeError)])
def test_seed_is_a_whole_number(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="seed must be"):
        half_settings({"momentum": "float16"}, "nearest", seed)


def test_without_slots_all_that_can_be_are_in_bfloat16_with_stochastic_rounding() -> None:
    settings = half_settings(None, None, 3)
    assert (settings.rounding, settings.seed, settings.by_default) == ("stochastic", 3, True)
    slots = ("momentum", "velocity", "accumulator", "average", "average_gradient", "own")
    assert [getattr(settings.dtype_of(slot), "name", None) for slot in slots] == ["bfloat16"] * 3 + [None] * 3
    assert half_settings({"momentum": "bfloat16"}, None, 0).rounding == "nearest"


def test_settings_tell_the_types() -> None:
    settings = half_settings({"momentum": "float16", "velocity": "bfloat16"}, "stochastic", 3)
    assert [getattr(settings.dtype_of(slot), "name", None) for slot in ("momentum", "velocity", "norm")] == [
        "float16",
        "bfloat16",
        None,
    ]
