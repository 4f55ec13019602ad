"""Recognizes the optimizers of a script that a loss-scale wrapper is around."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.calls import argument, code, function_name, last_word, method, methods
from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.names import dotted
from tfmp.migrate.analysis.return_values import ReturnValues
from tfmp.migrate.analysis.script import Script

#: What has wrappers and managers.
PACKAGES = ("tensorflow.contrib.mixed_precision", "npu_bridge", "tfmp")
_WRAPPERS = ("LossScaleOptimizer", "NPULossScaleOptimizer", "LossScaleOptimizerV1")
_OF_NPU = "NPULossScaleOptimizer"
# Functions of tf.contrib.layers and slim that take an optimizer and a loss, with where the optimizer stands.
_STEPS = {"optimize_loss": 3, "create_train_op": 1}
#: What sums gradients over processes, and is around an optimizer.
_SUMMING = ("DistributedOptimizer", "NPUDistributedOptimizer", "npu_distributed_optimizer_wrapper")
_MODULES_THAT_SUM = ("horovod", "npu_bridge")


class Wrapping(NamedTuple):
    """A wrapper that is around an optimizer.

    Attributes:
        call: What constructs the wrapper.
        certain: Whether the optimizer is wrapped whatever the script's conditions are.
    """

    call: cst.Call
    certain: bool


class WrappedOptimizers:
    """Tells which expressions are wrapped optimizers: by tf.contrib's wrapper, the NPU bridge's, or tfmp's.

    Args:
        script: The script.

    Example:
        >>> script = Script('''
        ... import tfmp
        ... opt = make()
        ... if float16:
        ...     opt = tfmp.LossScaleOptimizer(opt, manager)
        ... opt.minimize(loss)
        ... ''')
        >>> optimizers = WrappedOptimizers(script)
        >>> (call, owner), = methods(script, "minimize")
        >>> optimizers.wrapping(owner).certain
        False
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._flow = script.cached(DataFlow)

    @cached_property
    def constructions(self) -> Sequence[cst.Call]:
        """The calls that make a wrapper, in the order of the text."""
        return [call for call in self._script.nodes(cst.Call) if self._constructs(call)]

    def wrapping(self, node: cst.BaseExpression | None) -> Wrapping | None:
        """Return the wrapper around an optimizer, the first that is found; None for any other expression.

        Args:
            node: The optimizer.
        """
        return self._wrapping(node, frozenset()) if node is not None and self.constructions else None

    def inner(self, construction: cst.Call) -> cst.BaseExpression | None:
        """Return the optimizer that a wrapper is put around.

        Args:
            construction: What constructs the wrapper.
        """
        return argument(construction, 0, "opt") or argument(construction, -1, "inner_optimizer")

    def is_of_npu(self, construction: cst.Call) -> bool:
        """Tell whether a wrapper is the NPU bridge's, or tfmp's of that name.

        Args:
            construction: What constructs the wrapper.
        """
        return function_name(self._script, construction).endswith(_OF_NPU)

    def computed_by_wrapper(self, call: cst.Call) -> Wrapping | None:
        """Return the wrapper whose `compute_gradients` a call is; None if it is another call.

        Args:
            call: The call.
        """
        owner, name = method(call)
        return self.wrapping(owner) if name == "compute_gradients" else None

    def is_gradients(self, call: cst.Call) -> bool:
        """Tell whether a call computes gradients: `compute_gradients` of any optimizer, or `tf.gradients`.

        Args:
            call: The call.
        """
        name = self._script.name_of(call.func)
        if name:
            return name.startswith("tensorflow.") and name.endswith(".gradients")
        return method(call)[1] == "compute_gradients"

    def applied(self) -> Iterable[tuple[cst.Call, Wrapping, list[cst.CSTNode]]]:
        """Return each `apply_gradients` of a wrapped optimizer, the wrapper, and what its gradients went through."""
        for call, owner in methods(self._script, "apply_gradients") if self.constructions else ():
            wrapping, grads = self.wrapping(owner), argument(call, 0, "grads_and_vars")
            if wrapping is not None and grads is not None:
                yield call, wrapping, self._flow.nodes_behind(grads, self.is_gradients)

    def differentiated(self) -> Iterator[tuple[cst.Call, cst.BaseExpression, cst.BaseExpression]]:
        """Return each call that an optimizer is to compute gradients in, with the optimizer and the loss."""
        for call in self._script.nodes(cst.Call) if self.constructions else ():
            owner, name = method(call)
            last = last_word(self._script, call)
            optimizer: cst.BaseExpression | None = None
            if last in _STEPS:
                optimizer = argument(call, _STEPS[last], "optimizer")
            elif name in ("compute_gradients", "minimize") and not self._script.name_of(call.func):
                optimizer = owner
            loss = argument(call, 0, "total_loss" if last == "create_train_op" else "loss")
            if optimizer is not None and loss is not None:
                yield call, optimizer, loss

    def distributed_optimizer(self, call: cst.Call) -> cst.BaseExpression | None:
        """Return the optimizer that Horovod's or the NPU bridge's is put around; None for any other call.

        Args:
            call: The call.
        """
        name = function_name(self._script, call)
        if name.split(".")[-1] not in _SUMMING:
            return None
        imported = self._script.name_of(call.func)
        known = imported.split(".")[0] in _MODULES_THAT_SUM if imported else name.split(".")[0] == "hvd"
        return argument(call, 0, "optimizer") if known or self._by_star(call) else None

    def summing(self, node: cst.BaseExpression) -> cst.Call | None:
        """Return what puts Horovod's optimizer, or the NPU bridge's, outermost around an optimizer; None if none does.

        Args:
            node: The optimizer, a name or a call.
        """
        calls = (each for each in (node, *self._flow.values(node).nodes) if isinstance(each, cst.Call))
        return next((each for each in calls if self.distributed_optimizer(each) is not None), None)

    def said(self, node: cst.BaseExpression, wrapping: Wrapping) -> str:
        """Return how a message names a wrapped optimizer.

        Args:
            node: The optimizer.
            wrapping: The wrapper around it.
        """
        name = code(self._script, node) if dotted(node) else "the optimizer"
        if wrapping.certain:
            return name
        return f"{name} (where line {self._script.line(wrapping.call)} wraps it)"

    def _constructs(self, call: cst.Call) -> bool:
        name = function_name(self._script, call)
        if name.split(".")[-1] not in _WRAPPERS:
            return False
        imported = self._script.name_of(call.func)
        if not imported:
            return self._by_star(call)
        return any(imported.startswith(f"{package}.") for package in PACKAGES)

    def _by_star(self, call: cst.Call) -> bool:
        """Tell whether a name that nothing binds may come from a star import of the NPU bridge or of tfmp."""
        if not isinstance(call.func, cst.Name) or self._flow.bindings(call.func):
            return False
        name = call.func.value
        stars = (each.name for each in self._script.imports if not each.bound)
        bound = {each.bound for each in self._script.imports}
        bound |= {node.name.value for node in self._script.nodes(cst.ClassDef)}
        bound |= {node.name.value for node in self._script.nodes(cst.FunctionDef)}
        return name not in bound and any(star.split(".")[0] in ("npu_bridge", "tfmp") for star in stars)

    def _wrapping(self, node: cst.BaseExpression, seen: frozenset[cst.CSTNode]) -> Wrapping | None:
        if node in seen:
            return None
        seen |= {node}
        if isinstance(node, cst.IfExp):
            return self._any([node.body, node.orelse], True, seen)
        if isinstance(node, cst.Subscript):
            found = self._wrapping(node.value, seen)
            return found and Wrapping(found.call, False)
        if not isinstance(node, cst.Call):
            values = self._flow.values(node)
            return self._any(values.nodes, values.complete, seen)
        if self._constructs(node):
            return Wrapping(node, True)
        summed = self.distributed_optimizer(node)
        return self._any([summed] if summed is not None else self._returned(node), True, seen)

    def _any(
        self, nodes: Sequence[cst.BaseExpression], complete: bool, seen: frozenset[cst.CSTNode]
    ) -> Wrapping | None:
        found = [self._wrapping(node, seen) for node in nodes]
        first = next((each for each in found if each is not None), None)
        certain = complete and all(each is not None and each.certain for each in found)
        return first and Wrapping(first.call, certain)

    def _returned(self, call: cst.Call) -> Sequence[cst.BaseExpression]:
        """Return what a function of the script returns."""
        return () if self._flow.bindings(call.func) else self._script.cached(ReturnValues).values(call)
