"""The messages name the variables whose gradients overflowed, each overflow once."""

import numpy as np

from tfmp.core.overflow.overflow_counts import OverflowReport
from tfmp.monitoring.overflow_messages import OverflowMessages, last_overflow_sentence, overflow_table


def _report(name: str, nans: int, steps: int) -> OverflowReport:
    return OverflowReport([name], np.array([[0, nans, 0]]), np.array([steps]))


def test_only_what_changed_is_named_and_counted_from_the_start_on() -> None:
    at_start = _report("generator", 1, 3)
    messages = OverflowMessages([at_start])
    assert messages.new_overflows([at_start]) == []
    # A report that is new since the start: all of its overflows count.
    reports = [at_start, _report("discriminator", 2, 1)]
    assert messages.new_overflows(reports) == ["overflow in discriminator: 2 nan"]
    reports[0] = _report("generator", 4, 5)
    assert messages.new_overflows(reports) == ["overflow in generator: 4 nan"]
    assert [table.splitlines()[-1] for table in messages.summary_tables(reports)] == [
        "generator              2  4 nan",
        "discriminator              1  2 nan",
    ]


def test_largest_counts_are_named_first_and_the_rest_counted() -> None:
    names = [f"layer_{index}" for index in range(6)]
    last = np.array([[0, 1, 0], [0, 0, 0], [3, 1, 0], [0, 0, 12], [1, 0, 0], [0, 2, 2]])
    assert last_overflow_sentence(names, last, at_most=3) == (
        "overflow in layer_3: 12 saturated; layer_2: 3 inf, 1 nan; layer_5: 2 nan, 2 saturated; and 2 more"
    )


def test_nothing_is_said_where_nothing_overflowed() -> None:
    assert last_overflow_sentence(["kernel"], np.zeros([1, 3], np.int64)) is None
    assert overflow_table(["kernel"], np.zeros([1, 3], np.int64), np.zeros([1], np.int64)) is None


def test_table_shows_twenty_rows_the_most_often_first() -> None:
    names = [f"layer_{index}" for index in range(30)]
    last = np.zeros([30, 3], np.int64)
    last[29] = [0, 7, 0]
    table = overflow_table(names, last, np.arange(30))
    assert table is not None
    rows = table.splitlines()
    assert rows[:3] == [
        "variable  skipped steps  at the last one",
        "layer_29             29  7 nan",
        "layer_28             28",
    ]
    assert rows[20:] == ["layer_10             10", "and 9 more"]
