"""Decides whether several comparisons of one expression with constants can hold together."""

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import libcst as cst

from tfmp.migrate.analysis.expressions import literal

#: A value that a script writes as a literal.
Constant: TypeAlias = object
_OPERATORS: dict[type[cst.BaseCompOp], Callable[..., bool]] = {
    cst.Equal: operator.eq,
    cst.NotEqual: operator.ne,
    cst.Is: operator.is_,
    cst.IsNot: operator.is_not,
    cst.LessThan: operator.lt,
    cst.LessThanEqual: operator.le,
    cst.GreaterThan: operator.gt,
    cst.GreaterThanEqual: operator.ge,
    cst.In: lambda value, values: value in values,
    cst.NotIn: lambda value, values: value not in values,
}
# Larger integers are no floats, so there is no number between them here.
_LARGE = 1e300
# Values that no literal of a script is, or that every condition may meet.
_ANY = (None, True, False, 0, 1, -1, 0.5, "", "a text that no script has", ())


class Comparison(NamedTuple):
    """A condition on one expression: a comparison with a constant, or the truth of the expression itself."""

    subject: cst.BaseExpression
    constants: tuple[Constant, ...]
    holds: Callable[[Constant], bool]  #: It raises a TypeError for a value that Python cannot compare.


def comparison(code: Callable[[cst.BaseExpression], str], test: cst.BaseExpression) -> Comparison:
    """Return a condition as one on a single expression. `code` returns the source code of a node.

    Examples:
        >>> code = cst.Module([]).code_for_node
        >>> above = comparison(code, cst.parse_expression("0 < rate"))
        >>> code(above.subject), above.holds(0.1), above.holds(0)
        ('rate', True, False)
    """
    compared = test.comparisons if isinstance(test, cst.Comparison) else ()
    compare = _OPERATORS.get(type(compared[0].operator)) if len(compared) == 1 else None
    if isinstance(test, cst.Comparison) and compare is not None:
        left, right = test.left, compared[0].comparator
        for subject, other, is_first in ((left, right, True), (right, left, False)):
            found = literal(code(other))
            if found is None:
                continue
            (constant,) = found
            values = tuple(constant) if isinstance(constant, tuple | list | set | dict) else (constant,)
            return Comparison(subject, values, _comparing(compare, constant, is_first=is_first))
    return Comparison(test, (), bool)


def can_all_hold(answers: Iterable[tuple[Comparison, bool]], values: Sequence[Constant] | None = None) -> bool:
    """Tell whether some value, or one of the given values, gives all conditions on one expression their answers.

    Examples:
        >>> code = cst.Module([]).code_for_node
        >>> zero, above = (comparison(code, cst.parse_expression(text)) for text in ("rate == 0", "rate > 0"))
        >>> can_all_hold([(zero, True), (above, True)]), can_all_hold([(zero, False), (above, False)])
        (False, True)
    """
    pairs = list(answers)
    constants = [constant for each, _ in pairs for constant in each.constants]
    candidates = _candidates(constants) if values is None else values
    return any(all(_has(each, value, answer) for each, answer in pairs) for value in candidates)


def _comparing(compare: Callable[..., bool], constant: Constant, *, is_first: bool) -> Callable[[Constant], bool]:
    return lambda value: compare(value, constant) if is_first else compare(constant, value)


def _has(one: Comparison, value: Constant, answer: bool) -> bool:
    try:
        return one.holds(value) is answer
    except TypeError:
        # The script would stop there with this value.
        return False


def _candidates(constants: Sequence[Constant]) -> list[Constant]:
    """Return values of which at least one meets each set of comparisons with these constants that can be met."""
    numbers = sorted({each for each in constants if isinstance(each, int | float) and abs(each) < _LARGE})
    between = [(low + high) / 2 for low, high in pairwise(numbers)]
    around = [numbers[0] - 1, numbers[-1] + 1] if numbers else []
    return [*constants, *between, *around, *_ANY]
