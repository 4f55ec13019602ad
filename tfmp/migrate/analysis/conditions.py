"""Decides from the conditions of a script which of its nodes can run together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TypeAlias

import libcst as cst

from tfmp.migrate.analysis.comparisons import Comparison, can_all_hold, comparison
from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tree import children, once_per_argument

#: Conditions, each with the answer that it has where a node runs.
Conditional: TypeAlias = Sequence[tuple[cst.BaseExpression, bool]]
Branches: TypeAlias = Sequence[tuple[cst.If, bool]]
_Question: TypeAlias = tuple[str, tuple[int, ...]]
_CONDS = ("cond", "smart_cond")
_FUNCTIONS, _LOOPS = (cst.FunctionDef,), (cst.For, cst.While)
# Conditions of more unknown parts than this are not compared: each part doubles the number of cases.
_MOST_PARTS = 8
# The node that each of these statements ends or leaves.
_LEFT: Mapping[type, tuple[type[cst.CSTNode], ...]] = {
    cst.Return: _FUNCTIONS,
    cst.Raise: _FUNCTIONS,
    cst.Continue: _LOOPS,
    cst.Break: _LOOPS,
}


class Conditions:
    """Tells which nodes never run together, because of `if`, `x if y else z`, early returns, or `tf.cond`.

    `assigned` returns how often a name was assigned before the place where it is read. Two equal conditions are only
    the same condition if this number is equal for each of their names.
    """

    def __init__(self, script: Script, assigned: Callable[[cst.BaseExpression], int]) -> None:
        self._script = script
        self._assigned = assigned
        self._comparisons: dict[_Question, Comparison] = {}

    def is_exclusive(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Tell whether no run of the code, or of the graph, executes both of two nodes."""
        arms = self._arms(one)
        if any(arms.get(call, arm) is not arm for call, arm in self._arms(other).items()):
            return True
        return self.contradict(self.of(one), self.of(other)) or self._is_left(one, other) or self._is_left(other, one)

    @once_per_argument
    def of(self, node: cst.CSTNode) -> Conditional:
        """Return the conditions that hold where a node stands, each with True or False.

        `not` is removed. For an `and` that is true and an `or` that is false, the operands are returned too.
        """
        found = []
        for above, part in self._script.around(node):
            if isinstance(above, cst.If | cst.IfExp) and part is not above.test:
                found.append((above.test, part is above.body))
            elif isinstance(above, cst.IndentedBlock | cst.Module):
                start = self._script.span(part)[0]
                found += [(test, answer) for end, test, answer in self._known(above) if end <= start]
        return [each for test, answer in found for each in parts_of(test, answer)]

    @once_per_argument
    def branches(self, node: cst.CSTNode) -> Branches:
        """Return the `if` statements around a node, the outermost first, each with whether the node is in its body."""
        around = ((above, part) for above, part in self._script.around(node) if isinstance(above, cst.If))
        return [(above, part is above.body) for above, part in around if part is not above.test][::-1]

    def is_ended(self, above: cst.If, in_body: bool) -> bool:
        """Tell whether a branch of an `if` ends its function, by `return` or `raise`, so that nothing follows it."""
        return _LEFT.get(type(_last(above, in_body))) is _FUNCTIONS

    def contradict(self, one: Conditional, other: Conditional) -> bool:
        """Tell whether no values of what they compare, and of the parts of `and` and `or`, make all conditions hold."""
        known: dict[_Question, bool] = {}
        for test, answer in (*one, *other):
            if known.setdefault(self._question(test), answer) != answer:
                return True
        if not self._can_hold(known):
            return True
        tests = [pair for pair in (*one, *other) if isinstance(pair[0], cst.BooleanOperation)]
        parts = dict.fromkeys(self._question(part) for test, _ in tests for part in _operands(test))
        unknown = [part for part in parts if part not in known]
        if not tests or len(unknown) > _MOST_PARTS:
            return False
        cases = (
            {**known, **dict(zip(unknown, case, strict=True))} for case in product((True, False), repeat=len(unknown))
        )
        return not any(
            all(self._value(test, case) is answer for test, answer in tests) and self._can_hold(case) for case in cases
        )

    def _can_hold(self, answers: Mapping[_Question, bool]) -> bool:
        """Tell whether comparisons of the same expressions with constants can have these answers together."""
        by_subject: dict[_Question, list[tuple[Comparison, bool]]] = {}
        for question, answer in answers.items():
            compared = self._comparisons[question]
            by_subject.setdefault(self._question(compared.subject), []).append((compared, answer))
        return all(len(each) == 1 or can_all_hold(each) for each in by_subject.values())

    def _value(self, test: cst.BaseExpression, case: Mapping[_Question, bool]) -> bool:
        """Return the value of a condition, given those of its parts."""
        if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
            return not self._value(test.expression, case)
        if isinstance(test, cst.BooleanOperation):
            both = (self._value(test.left, case), self._value(test.right, case))
            return all(both) if isinstance(test.operator, cst.And) else any(both)
        return case[self._question(test)]

    @once_per_argument
    def _question(self, test: cst.BaseExpression) -> _Question:
        """Return a condition in a form that can be compared: its code, and how often its names were assigned before."""
        versions: list[int] = []
        stack: list[cst.CSTNode] = [test]
        while stack:
            node = stack.pop()
            if isinstance(node, cst.Name | cst.Attribute) and dotted(node):
                versions.append(self._assigned(node))
            else:
                stack.extend(children(node))
        question = self._script.text[slice(*self._script.span(test))], tuple(versions)
        self._comparisons.setdefault(question, comparison(self._script.code, test))
        return question

    @once_per_argument
    def _known(self, block: cst.IndentedBlock | cst.Module) -> Sequence[tuple[int, cst.BaseExpression, bool]]:
        """Return the conditions that hold after an `if` that returns: the position, the condition, and its value."""
        ifs = (each for each in block.body if isinstance(each, cst.If))
        return [(self._script.span(each)[1], *known) for each in ifs for known in _known_below(each)]

    def _is_left(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Tell whether a node is in a branch that returns, breaks or continues before another node is reached."""
        shared = self.branches(other)
        for above, in_body in self.branches(one):
            last = None if (above, in_body) in shared else _last(above, in_body)
            left = _LEFT.get(type(last))
            if last is None or left is None or self._script.span(above)[1] > self._script.span(other)[0]:
                continue
            around = next(each for each in self._script.ancestors(last) if isinstance(each, (*left, cst.Module)))
            if around in self._script.ancestors(other):
                return True
        return False

    @once_per_argument
    def _arms(self, node: cst.CSTNode) -> Mapping[cst.CSTNode, cst.CSTNode]:
        """Return the `tf.cond` calls around a node, each with the `lambda` argument that contains the node."""
        calls = (
            (above, part)
            for above, part in self._script.around(node)
            if isinstance(above, cst.Call) and isinstance(part, cst.Arg)
        )
        conds = ((call, arg) for call, arg in calls if self._script.last_word(call) in _CONDS)
        return {call: arg for call, arg in conds if isinstance(arg.value, cst.Lambda)}


def parts_of(test: cst.BaseExpression, answer: bool) -> Iterator[tuple[cst.BaseExpression, bool]]:
    """Yield the conditions that follow from one condition: without `not`, and for the operands of `and` and `or`."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        yield from parts_of(test.expression, not answer)
        return
    yield test, answer
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And if answer else cst.Or):
        yield from parts_of(test.left, answer)
        yield from parts_of(test.right, answer)


def _operands(test: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield the parts of a condition that `and`, `or` and `not` join."""
    if isinstance(test, cst.BooleanOperation):
        yield from (*_operands(test.left), *_operands(test.right))
    elif isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        yield from _operands(test.expression)
    else:
        yield test


def _known_below(above: cst.If) -> Iterator[tuple[cst.BaseExpression, bool]]:
    """Yield the conditions that hold after an `if` because one of its branches returns."""
    if _LEFT.get(type(_last(above, True))) is _FUNCTIONS:
        yield above.test, False
        if isinstance(above.orelse, cst.If):
            yield from _known_below(above.orelse)
    elif _LEFT.get(type(_last(above, False))) is _FUNCTIONS:
        yield above.test, True


def _last(above: cst.If, in_body: bool) -> cst.CSTNode | None:
    """Return the last statement of a branch; its small statement if it is a simple line."""
    block = above.body if in_body else above.orelse.body if isinstance(above.orelse, cst.Else) else None
    last = block.body[-1] if block is not None and block.body else None
    # In `if a: return`, the body itself holds the small statement.
    return last.body[-1] if isinstance(last, cst.SimpleStatementLine) else last
