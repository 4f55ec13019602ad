"""The messages say to which gradients a spike is due, each spike once."""

import numpy as np
import pytest

from tfmp.core.spikes.reports import SpikeReport
from tfmp.monitoring.spike_messages import SpikeMessages


def _report(spikes: int, *shares: float) -> SpikeReport:
    names = [f"layer_{index}" for index in range(len(shares))]
    return SpikeReport(names, *map(np.array, (shares, 123456.0, 8.25, spikes)))


def _named(*shares: float) -> str:
    (sentence,) = SpikeMessages().new_spikes([_report(1, *shares)])
    return sentence.partition(", from ")[2].partition(";")[0]


def test_last_spike_is_told_with_its_norm_and_its_bound() -> None:
    assert SpikeMessages().new_spikes([_report(3, 0.25, 0.75)]) == [
        "spike: gradient norm 1.235e+05 above the bound 8.25, from layer_1 (75 %), layer_0 (25 %); 3 skipped so far"
    ]


def test_only_what_is_new_is_told() -> None:
    old, none = _report(2, 1.0), _report(0, 0.0)
    messages = SpikeMessages([old])
    assert messages.new_spikes([old]) == []
    # A report that is new since the start, without a spike at first.
    assert messages.new_spikes([old, none]) == []
    (sentence,) = messages.new_spikes([old, _report(1, 0.5, 0.5)])
    assert sentence.endswith("from layer_0 (50 %), layer_1 (50 %); 1 skipped so far")
    (sentence,) = messages.new_spikes([_report(3, 1.0), _report(1, 0.5, 0.5)])
    assert sentence.endswith("from layer_0 (100 %); 3 skipped so far")


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ((0.1, 0.4, 0.2, 0.3), "layer_1 (40 %), layer_3 (30 %), layer_2 (20 %)"),
        ((0.996, 0.004), "layer_0 (100 %)"),
        # In a model of many variables, no share need be large.
        ((0.002, 0.004) * 200, "layer_1 (below 1 %)"),
    ],
)
def test_largest_shares_are_named_first(shares: tuple[float, ...], named: str) -> None:
    assert _named(*shares) == named


def test_change_that_lasts_is_told_once() -> None:
    messages = SpikeMessages(lasting_changes=1)
    assert messages.new_changes(1, 10) == []
    (sentence,) = messages.new_changes(2, 10)
    assert sentence.startswith("the number of spikes in a row reached max_consecutive_skips=10: the gradients have")
    assert messages.new_changes(2, 10) == []
