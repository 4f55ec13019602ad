"""Finds the optimizer steps with which a script increments the global step itself."""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cached_property
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
_OF_TENSORFLOW = "MixedPrecisionLossScaleOptimizer"


class Given(Enum):
    """The counter that an optimizer's step receives as `global_step`, compared with the one that is incremented."""

    SAME = 1
    OTHER = 2
    NONE = 3


class Optimizer(NamedTuple):
    """An optimizer that a script constructs.

    Attributes:
        counts: Whether it increments the global step that it receives; None if that is not known.
        is_berts: Whether it is one of BERT's own.
        is_wrapped: Whether it is inside a loss-scale wrapper.
    """

    counts: bool | None
    is_berts: bool
    is_wrapped: bool


class OptimizerStep:
    """A step of an optimizer, and an increment of the global step that may run with it.

    Attributes:
        update: The increment.
        call: The call of `apply_gradients` or `minimize`.
        optimizer: The expression that the method is called on.
        given: The counter that the call receives.
    """

    def __init__(self, script: Script, update: GlobalStepUpdate, call: cst.Call, optimizer: cst.BaseExpression) -> None:
        self._script = script
        self._optimizers = script.cached(WrappedOptimizers)
        self.update = update
        self.call = call
        self.optimizer = optimizer
        given = argument(call, 1, "global_step")
        if given is None:
            self.given = Given.OTHER if any(arg.star for arg in call.args) else Given.NONE
        else:
            self.given = Given.SAME if is_same_counter(script, given, update.counter) else Given.OTHER

    @cached_property
    def is_certain(self) -> bool:
        """Whether the optimizer is wrapped under all conditions of the script."""
        wrapping = self._optimizers.wrapping(self.optimizer)
        return wrapping is not None and wrapping.certain

    @cached_property
    def wrappers(self) -> Sequence[cst.Call]:
        """The calls that construct wrappers which may be around the optimizer when the counter is incremented."""
        wrapping = self._optimizers.wrapping(self.optimizer)
        calls = dict.fromkeys((*wrapping.calls, *self._made[1])) if wrapping is not None else {}
        return [call for call in calls if not self._is_apart(call) and not self._is_asked_for(call)]

    @cached_property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that the script may construct here; empty if it does not show all of them."""
        return self._made[0]

    @cached_property
    def is_run_with_update(self) -> bool | None:
        """Whether one run of the graph executes the step and the increment; None if that is not known."""
        together = is_run_with(self._script, self.update, self.call)
        return False if together is None and not self.is_beside else together

    @cached_property
    def is_beside(self) -> bool:
        """Whether the step is in the function of the increment."""
        function = self._script.function_of(self.update.call)
        return function in (self._script.function_of(self.call), *self._script.ancestors(self.call))

    @cached_property
    def never_runs_with_update(self) -> bool:
        """Whether conditions of the script exclude that both run."""
        return self._is_apart(self.call)

    def _is_apart(self, node: cst.CSTNode) -> bool:
        """Tell whether the increment and a node never run together."""
        return self._is_everywhere(lambda move: self._optimizers.flow.is_exclusive(move, node))

    def _is_everywhere(self, is_so: Callable[[cst.CSTNode], bool]) -> bool:
        """Tell whether a condition holds for every place that increments the counter."""
        return is_so(self.update.call) or all(is_so(move) for move in self.update.moves)

    def _is_asked_for(self, wrapper: cst.Call) -> bool:
        """Tell whether the script increments only where the optimizer is no instance of a wrapper's class."""
        flow = self._optimizers.flow
        class_name = _OF_TENSORFLOW if self._optimizers.is_tensorflows(wrapper) else self._script.last_word(wrapper)

        def asks(test: cst.BaseExpression) -> bool:
            if not isinstance(test, cst.Call) or dotted(test.func) != "isinstance" or len(test.args) != 2:
                return False
            tested, of_class = (arg.value for arg in test.args)
            is_it = flow.is_same_name(tested, self.optimizer) and flow.bindings(tested) == flow.bindings(self.optimizer)
            return is_it and (self._script.name_of(of_class) or dotted(of_class)).split(".")[-1] == class_name

        return self._is_everywhere(
            lambda move: any(not answer and asks(test) for test, answer in flow.conditions.of(move))
        )

    @cached_property
    def _made(self) -> tuple[Sequence[Optimizer], Sequence[cst.Call]]:
        """The optimizers and the wrappers that may be constructed where the counter is incremented."""
        optimizers = self._optimizers
        found: list[Optimizer] = []
        wrappers: list[cst.Call] = []
        stack, seen, is_known = [(self.optimizer, False)], set(), True
        while stack:
            node, is_inside = stack.pop()
            if (node, is_inside) in seen or self._is_apart(node):
                continue
            seen.add((node, is_inside))
            if isinstance(node, cst.IfExp):
                stack += [(node.body, is_inside), (node.orelse, is_inside)]
            elif not isinstance(node, cst.Call):
                values = optimizers.flow.values(node)
                is_known &= values.complete
                stack += [(value, is_inside) for value in values.nodes]
            elif node in optimizers.constructions:
                wrappers.append(node)
                inside = optimizers.inner(node)
                is_known &= inside is not None
                stack += [(inside, True)] if inside is not None else []
            elif (inside := optimizers.distributed_optimizer(node) or self._inside(node)) is not None:
                stack.append((inside, is_inside))
            else:
                found.append(Optimizer(counts(self._script, node), is_berts(self._script, node), is_inside))
        return found if is_known else (), wrappers

    def _inside(self, call: cst.Call) -> cst.BaseExpression | None:
        return argument(call, 0, "opt") if self._script.last_word(call) in _AROUND else None


def optimizer_steps(script: Script) -> Iterator[OptimizerStep]:
    """Yield the steps beside each increment of the global step, and steps elsewhere that receive the same counter."""
    for update in global_step_updates(script):
        for call, owner in script.methods("apply_gradients", "minimize"):
            step = OptimizerStep(script, update, call, owner)
            is_super = dotted(owner.func if isinstance(owner, cst.Call) else owner) == "super"
            if (step.is_beside or step.given is Given.SAME) and not is_super and not step.never_runs_with_update:
                yield step
