"""Finds the optimizer steps with which a script increments the global step itself."""

from collections.abc import Iterator
from enum import Enum
from functools import partial
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.expressions import argument, dotted
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.global_step_updates import (
    GlobalStepUpdate,
    global_step_updates,
    is_run_with,
    is_same_counter,
)
from tfmp.migrate.analysis.training.increment_guards import IncrementGuards
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.optimizer_classes import counts, is_berts

# Functions around an optimizer that neither scale the loss nor count.
_AROUND = ("CrossShardOptimizer", "npu_tf_optimizer")


class Given(Enum):
    """The counter that an optimizer's step receives as `global_step`, compared with the one that is incremented."""

    SAME = 1
    OTHER = 2
    NONE = 3


class Optimizer(NamedTuple):
    """What is known of an optimizer that a script constructs; `counts` is None if it is not known."""

    counts: bool | None
    is_berts: bool
    is_wrapped: bool


class OptimizerStep:
    """A step of an optimizer, and an increment of the global step beside it.

    Attributes:
        given: The counter that the step receives.
        wrapping: The wrappers around the optimizer in the whole script.
        wrappers: The calls that construct those which may be around it when the counter is incremented.
        optimizers: The optimizers that may be constructed then; empty if the script does not show all of them.
    """

    def __init__(self, script: Script, update: GlobalStepUpdate, call: cst.Call, optimizer: cst.BaseExpression) -> None:
        self._script = script
        self._known = script.cached(WrappedOptimizers)
        self.update = update
        self.call = call
        self.optimizer = optimizer
        self._guards = IncrementGuards(script, update, optimizer)
        self.given = _given(script, update, call)
        self.wrapping = self._known.wrapping(optimizer)
        calls = self.wrapping.calls if self.wrapping is not None else ()
        self._of_other_class: set[cst.Call] = set()  # the outermost ones that a guard leaves out by their class
        self.optimizers = self._optimizers()
        self.wrappers = [each for each in calls if not self._guards.exclude(each) and each not in self._of_other_class]

    def is_run_with_update(self) -> bool | None:
        """Tell whether one run of the graph executes the step and the increment; None if that is not known."""
        together = is_run_with(self._script, self.update, self.call)
        return together if together is not None or _is_beside(self._script, self.update, self.call) else False

    def _optimizers(self) -> list[Optimizer]:
        """Return the optimizers that may be constructed where the counter is incremented; empty if one is not known."""
        found: list[Optimizer] = []
        stack = [_Candidate(self.optimizer)]
        seen, is_known = set(), True
        while stack:
            one = stack.pop()
            node = one.node
            if node is None:
                is_known = False
                continue
            is_seen = (node, one.is_wrapped) in seen
            seen.add((node, one.is_wrapped))
            if is_seen or self._guards.exclude(node, one.local):
                continue
            if isinstance(node, cst.IfExp):
                stack += [one._replace(node=node.body), one._replace(node=node.orelse)]
            elif not isinstance(node, cst.Call):
                values = self._known.flow.values(node)
                stack += [one._replace(node=each) for each in (*values.nodes, *([] if values.complete else [None]))]
            elif returned := self._known.flow.returned_by(node):
                stack += [one._replace(node=each, local=one.local | self._local(node, each)) for each in returned]
            elif one.is_outer and self._guards.exclude_class(node):
                self._of_other_class.add(node)
            elif (inside := self._inside(node)) is not None:
                stack.append(inside._replace(is_wrapped=inside.is_wrapped or one.is_wrapped, local=one.local))
            else:
                found.append(Optimizer(counts(self._script, node.func), is_berts(self._script, node), one.is_wrapped))
        return found if is_known else []

    def _inside(self, call: cst.Call) -> "_Candidate | None":
        """Return the optimizer that another one is constructed around; None if a call constructs no such optimizer."""
        if call in self._known.constructions:
            return _Candidate(self._known.inner(call), is_wrapped=True, is_outer=False)
        if self._script.last_word(call) in _AROUND:
            return _Candidate(argument(call, 0, "opt"), is_outer=False)
        inner = self._known.distributed_optimizer(call)
        return _Candidate(inner, is_outer=False) if inner is not None else None

    def _local(self, call: cst.Call, returned: cst.BaseExpression) -> frozenset[str]:
        """Return the names in a called function that are of other variables than in the caller.

        A parameter is of the same variable if the call gives it a variable of its name, as FLAGS in `make(FLAGS)`.
        """
        function, scopes = self._script.function_of(returned), self._script.scopes
        if function is None:
            return frozenset()
        params = function.params.params[int(isinstance(call.func, cst.Attribute)) :]
        names = [param.name.value for param in params]
        same = {name for index, name in enumerate(names) if dotted(argument(call, index, name)) == name}
        own = {word: len(scopes.bound(word).get(function, ())) for word in scopes.words}
        return frozenset(word for word, count in own.items() if count > int(word in same))


class _Candidate(NamedTuple):
    """An expression that may be the optimizer of a step; None if it is not known."""

    node: cst.BaseExpression | None
    is_wrapped: bool = False
    is_outer: bool = True  #: Whether no other optimizer is around it.
    local: frozenset[str] = frozenset()  #: Names that are of other variables than at the increment.


def optimizer_steps(script: Script) -> Iterator[OptimizerStep]:
    """Yield the steps beside each increment of the global step, and steps elsewhere that receive the same counter."""
    flow = script.cached(WrappedOptimizers).flow
    for update in global_step_updates(script):
        for call, owner in script.methods("apply_gradients", "minimize"):
            is_super = dotted(owner.func if isinstance(owner, cst.Call) else owner) == "super"
            is_near = _is_beside(script, update, call) or _given(script, update, call) is Given.SAME
            if is_near and not is_super and not update.is_everywhere(partial(flow.conditions.is_exclusive, call)):
                yield OptimizerStep(script, update, call, owner)


def _is_beside(script: Script, update: GlobalStepUpdate, call: cst.Call) -> bool:
    """Tell whether a step is in the function of an increment."""
    return script.function_of(update.call) in (script.function_of(call), *script.ancestors(call))


def _given(script: Script, update: GlobalStepUpdate, call: cst.Call) -> Given:
    given = argument(call, 1, "global_step")
    if given is None:
        return Given.OTHER if any(arg.star for arg in call.args) else Given.NONE
    return Given.SAME if is_same_counter(script, given, update.counter) else Given.OTHER
