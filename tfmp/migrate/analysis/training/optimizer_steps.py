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
        self.given = _given(script, update, call)
        self.wrapping = self._known.wrapping(optimizer)
        calls = self.wrapping.calls if self.wrapping is not None else ()
        self.wrappers = [each for each in calls if not self._is_apart(each) and not self._is_asked_for(each)]
        self.optimizers = self._optimizers()

    def is_run_with_update(self) -> bool | None:
        """Tell whether one run of the graph executes the step and the increment; None if that is not known."""
        together = is_run_with(self._script, self.update, self.call)
        return together if together is not None or _is_beside(self._script, self.update, self.call) else False

    def _is_apart(self, node: cst.CSTNode) -> bool:
        """Tell whether the increment and a node never run together."""
        return self.update.is_everywhere(partial(self._known.flow.conditions.is_exclusive, node))

    def _is_asked_for(self, wrapper: cst.Call) -> bool:
        """Tell whether the script increments only where the optimizer is no instance of a wrapper's class."""
        flow, class_name = self._known.flow, self._script.last_word(wrapper)

        def asks(test: cst.BaseExpression) -> bool:
            if not isinstance(test, cst.Call) or dotted(test.func) != "isinstance" or len(test.args) != 2:
                return False
            tested, of_class = (arg.value for arg in test.args)
            is_it = flow.is_same_name(tested, self.optimizer) and flow.bindings(tested) == flow.bindings(self.optimizer)
            return is_it and (self._script.name_of(of_class) or dotted(of_class)).split(".")[-1] == class_name

        return self.update.is_everywhere(
            lambda move: any(not answer and asks(test) for test, answer in flow.conditions.of(move))
        )

    def _optimizers(self) -> list[Optimizer]:
        """Return the optimizers that may be constructed where the counter is incremented; empty if one is not known."""
        found: list[Optimizer] = []
        stack: list[tuple[cst.BaseExpression | None, bool]] = [(self.optimizer, False)]
        seen = set()
        while stack:
            node, is_wrapped = stack.pop()
            if node is None:
                return []
            if (node, is_wrapped) in seen or self._is_apart(node):
                continue
            seen.add((node, is_wrapped))
            if isinstance(node, cst.IfExp):
                stack += [(node.body, is_wrapped), (node.orelse, is_wrapped)]
            elif not isinstance(node, cst.Call):
                values = self._known.flow.values(node)
                stack += [(each, is_wrapped) for each in (*values.nodes, *([] if values.complete else [None]))]
            elif node in self._known.constructions:
                stack.append((self._known.inner(node), True))
            elif self._script.last_word(node) in _AROUND:
                stack.append((argument(node, 0, "opt"), is_wrapped))
            elif (inner := self._known.distributed_optimizer(node)) is not None:
                stack.append((inner, is_wrapped))
            else:
                found.append(Optimizer(counts(self._script, node.func), is_berts(self._script, node), is_wrapped))
        return found


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
