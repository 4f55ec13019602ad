"""Puts into words which variables' gradients overflowed."""

import numpy as np

from tfmp.core.overflow import KINDS


def last_overflow(names: list[str], last: np.ndarray, at_most: int = 4) -> str | None:
    """Return which variables overflowed at the last skipped step, in a sentence; None if none did.

    Args:
        names: The names of the variables.
        last: The counts of their elements that were infinite, NaN and saturated.
        at_most: How many to name; those with the largest counts come first.

    Example:
        >>> last_overflow(["kernel", "scale", "bias"], np.array([[0, 12, 0], [0, 0, 0], [3, 1, 0]]))
        'overflow in kernel: 12 nan; bias: 3 inf, 1 nan'
    """
    totals = np.sum(last, axis=1)
    order = [index for index in np.argsort(-totals, kind="stable") if totals[index]]
    if not order:
        return None
    parts = [f"{names[index]}: {_counts(last[index])}" for index in order[:at_most]]
    if len(order) > at_most:
        parts.append(f"and {len(order) - at_most} more")
    return "overflow in " + "; ".join(parts)


def overflow_table(names: list[str], last: np.ndarray, steps: np.ndarray, at_most: int = 20) -> str | None:
    """Return a table of the variables that overflowed and how often, most often first; None if none did.

    Args:
        names: The names of the variables.
        last: The counts of their elements that were infinite, NaN and saturated at the last skipped step.
        steps: In how many skipped steps each overflowed.
        at_most: How many rows to show.

    Example:
        >>> print(overflow_table(["kernel", "bias"], np.array([[0, 12, 0], [0, 0, 0]]), np.array([3, 10])))
        variable  skipped steps  at the last one
        bias                 10
        kernel                3  12 nan
    """
    order = [index for index in np.argsort(-np.asarray(steps), kind="stable") if steps[index]]
    if not order:
        return None
    shown = order[:at_most]
    width = max(len("variable"), *(len(names[index]) for index in shown))
    rows = [f"{'variable':{width}}  skipped steps  at the last one"]
    rows += [f"{names[index]:{width}}  {steps[index]:13d}  {_counts(last[index])}".rstrip() for index in shown]
    if len(order) > at_most:
        rows.append(f"and {len(order) - at_most} more")
    return "\n".join(rows)


def _counts(row: np.ndarray) -> str:
    return ", ".join(f"{count} {kind}" for count, kind in zip(row, KINDS, strict=True) if count)
