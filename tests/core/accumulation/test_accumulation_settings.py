from typing import Any

import pytest

from tfmp.core.accumulation.settings import AccumulationSettings, accumulation_settings


@pytest.mark.parametrize("overflow_drops", ["window", "micro_batch"])
@pytest.mark.parametrize("per_epoch", [None, 1, 2**31 - 1])
def test_settings_within_range_are_returned(overflow_drops: str, per_epoch: int | None) -> None:
    assert accumulation_settings(4, overflow_drops, per_epoch) == AccumulationSettings(4, overflow_drops, per_epoch)


def test_last_window_of_an_epoch_may_be_shorter_than_a_full_one() -> None:
    assert accumulation_settings(4, "window", 3).micro_batches_per_epoch == 3


@pytest.mark.parametrize("bad", [0, -1, 2**31, 1.5])
def test_number_of_micro_batches_out_of_range_is_refused_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match=r"accumulation_steps must be a whole number from 1 to 2\*\*31 - 1, got"):
        accumulation_settings(bad, "window", None)
    with pytest.raises(ValueError, match=r"micro_batches_per_epoch must be a whole number from 1 to 2\*\*31 - 1, got"):
        accumulation_settings(4, "window", bad)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"accumulation_steps must be .*four"):
        accumulation_settings("four", "window", None)


@pytest.mark.parametrize("bad", ["step", "Window", None, True])
def test_policy_that_does_not_exist_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=f'overflow_drops must be "window" or "micro_batch", got {bad!r}'):
        accumulation_settings(4, bad, None)
