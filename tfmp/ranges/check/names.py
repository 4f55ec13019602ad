"""Names of layers, probes and variables in a report."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tfmp.ranges.check.passes import Named


def told_apart(names: Iterable[str]) -> list[str]:
    """Number the names that occur again, so that no two are the same.

    Examples:
        >>> told_apart(["kernel", "bias", "kernel"])
        ['kernel', 'bias', 'kernel (2)']
    """
    numbers: Counter[str] = Counter()
    found = []
    for name in names:
        numbers[name] += 1
        found.append(name if numbers[name] == 1 else f"{name} ({numbers[name]})")
    return found


def by_name(named: Iterable[tuple[str, Any]]) -> Named:
    """Return the tensors of each name, in the order of the names' first use.

    Examples:
        >>> by_name([("a", 1), ("b", 2), ("a", 3)])
        {'a': [1, 3], 'b': [2]}
    """
    found: dict[str, list[Any]] = {}
    for name, tensor in named:
        found.setdefault(name, []).append(tensor)
    return found
