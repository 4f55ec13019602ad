"""Tells for which optimizers a script does not increment the global step, by the conditions around the increment."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.comparisons import Comparison, can_all_hold, comparison
from tfmp.migrate.analysis.conditions import Conditional, parts_of
from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import dotted, literal
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.global_step_updates import GlobalStepUpdate
from tfmp.migrate.analysis.training.optimizer_types import class_answer
from tfmp.migrate.analysis.tree import children

# A condition that is a name may be assigned from another, and so on.
_MOST_NAMES = 4
# Calls of a function beyond this number are not compared.
_MOST_CALLS = 8
_SETTING = (cst.Assign, cst.AnnAssign, cst.NamedExpr)


class IncrementGuards:
    """The conditions under which a script increments the global step beside a step of an optimizer."""

    def __init__(self, script: Script, update: GlobalStepUpdate, optimizer: cst.BaseExpression) -> None:
        self._script = script
        self._flow = script.cached(DataFlow)
        self._update = update
        self._optimizer = optimizer

    def exclude(self, node: cst.CSTNode, local: frozenset[str] = frozenset()) -> bool:
        """Tell whether the increment and a node never run together.

        Of a node in another function, `local` are the names that are of other variables there. Conditions with them are
        left out.
        """
        return self._update.is_everywhere(lambda move: self._is_apart(move, node, local))

    def exclude_class(self, construction: cst.Call) -> bool:
        """Tell whether the script does not increment if the optimizer is what a call constructs, by its class."""

        def asks_for_another(tests: Conditional) -> bool:
            answers = ((class_answer(self._script, test, construction, self._is_it), answer) for test, answer in tests)
            return any(found is not None and found is not answer for found, answer in answers)

        return self._update.is_everywhere(lambda move: all(map(asks_for_another, self._ways(move))))

    def _is_it(self, node: cst.BaseExpression) -> bool:
        is_named = self._flow.is_same_name(node, self._optimizer)
        return is_named and self._flow.bindings(node) == self._flow.bindings(self._optimizer)

    def _is_apart(self, move: cst.CSTNode, node: cst.CSTNode, local: frozenset[str]) -> bool:
        conditions = self._flow.conditions
        if not local and conditions.is_exclusive(node, move):
            return True
        own = [each for each in self._named(conditions.of(node)) if local.isdisjoint(_words(each[0]))]
        return all(
            conditions.contradict(tests, own) or any(self._is_set_elsewhere(*each, own) for each in tests)
            for tests in self._ways(move)
        )

    def _ways(self, move: cst.CSTNode) -> Iterator[Conditional]:
        """Yield the conditions on each way to an increment: those around it, with those around a call of its function.

        Only a function is left by its calls in which the optimizer's step is not.
        """
        own, function = self._named(self._flow.conditions.of(move)), self._script.function_of(move)
        is_left = function is not None and function not in [*self._script.ancestors(self._optimizer)]
        calls = self._calls(function) if function is not None and is_left else ()
        for call in calls:
            yield [*own, *self._named(self._flow.conditions.of(call))]
        if not calls:
            yield own

    def _calls(self, function: cst.FunctionDef) -> Sequence[cst.Call]:
        names = (function.name.value, f"self.{function.name.value}")
        calls = [call for call in self._script.nodes(cst.Call) if dotted(call.func) in names]
        return calls if len(calls) <= _MOST_CALLS else ()

    def _named(self, tests: Conditional) -> Conditional:
        """Return conditions, and those that they stand for: `a > 0` for a name that was assigned `a > 0`."""
        found, new = [*tests], [*tests]
        for _ in range(_MOST_NAMES):
            values = ((self._flow.values(test), answer) for test, answer in new)
            single = [(each.nodes[0], answer) for each, answer in values if each.complete and len(each.nodes) == 1]
            single = [(value, answer) for value, answer in single if _is_condition(value)]
            new = [part for value, answer in single for part in parts_of(value, answer)]
            found += new
        return found

    def _is_set_elsewhere(self, test: cst.BaseExpression, answer: bool, own: Conditional) -> bool:
        """Tell whether a condition on a variable has this answer only where it was set under other conditions."""
        compared = comparison(self._script.code, test)
        bindings = self._flow.bindings(compared.subject)
        if not bindings or not all(each.replaces and isinstance(each.node, _SETTING) for each in bindings):
            return False
        conditions = self._flow.conditions
        able = (each.node for each in bindings if self._may_answer(compared, each.value, answer))
        return all(conditions.contradict(conditions.of(each), own) for each in able)

    def _may_answer(self, compared: Comparison, value: cst.BaseExpression | None, answer: bool) -> bool:
        """Tell whether a condition may have an answer after its variable was set to a value."""
        constant = literal(self._script.code(value)) if value is not None else None
        return constant is None or can_all_hold([(compared, answer)], constant)


def _is_condition(value: cst.BaseExpression) -> bool:
    """Tell whether an assigned value has the same truth wherever it is written. A call may return another one."""
    is_class_test = isinstance(value, cst.Call) and dotted(value.func) == "isinstance"
    kinds = (cst.Comparison, cst.BooleanOperation, cst.UnaryOperation, cst.Name, cst.Attribute)
    return is_class_test or isinstance(value, kinds)


def _words(test: cst.CSTNode) -> set[str]:
    """Return the words in a condition."""
    found, stack = set(), [test]
    while stack:
        node = stack.pop()
        stack += children(node)
        if isinstance(node, cst.Name):
            found.add(node.value)
    return found
