"""Finds the optimizers of a script that are inside a loss-scale wrapper."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, dotted, method
from tfmp.migrate.analysis.return_values import ReturnValues
from tfmp.migrate.analysis.script import Script

#: Packages that provide loss-scale wrappers and managers.
PACKAGES = ("tensorflow.contrib.mixed_precision", "npu_bridge", "tfmp")
_WRAPPERS = ("LossScaleOptimizer", "NPULossScaleOptimizer", "LossScaleOptimizerV1")
_OF_NPU = "NPULossScaleOptimizer"
# Functions of tf.contrib.layers and slim that take an optimizer and a loss, with the position of the optimizer.
_STEPS = {"optimize_loss": 3, "create_train_op": 1}
#: Optimizers that sum gradients over processes and wrap another optimizer.
_SUMMING = ("DistributedOptimizer", "NPUDistributedOptimizer", "npu_distributed_optimizer_wrapper")
_MODULES_THAT_SUM = ("horovod", "npu_bridge")


class Wrapping(NamedTuple):
    """The wrapper around an optimizer.

    Attributes:
        call: The call that constructs the wrapper.
        certain: True if the optimizer is wrapped under all conditions of the script.
    """

    call: cst.Call
    certain: bool


class WrappedOptimizers:
    """Tells which expressions are wrapped optimizers, by the wrapper of tf.contrib, of the NPU bridge, or of tfmp.

    Args:
        script: The parsed script.

    Example:
        >>> script = Script('''
        ... import tfmp
        ... opt = make()
        ... if float16:
        ...     opt = tfmp.LossScaleOptimizer(opt, manager)
        ... opt.minimize(loss)
        ... ''')
        >>> optimizers = WrappedOptimizers(script)
        >>> (call, owner), = script.methods("minimize")
        >>> optimizers.wrapping(owner).certain
        False
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._flow = script.cached(DataFlow)

    @cached_property
    def constructions(self) -> Sequence[cst.Call]:
        """The calls that construct a wrapper, in the order of the text."""
        return [call for call in self._script.nodes(cst.Call) if self._constructs(call)]

    def wrapping(self, node: cst.BaseExpression | None) -> Wrapping | None:
        """Return the first wrapper that is found around an optimizer; None for any other expression.

        Args:
            node: The expression of the optimizer.
        """
        return self._wrapping(node, frozenset()) if node is not None and self.constructions else None

    def inner(self, construction: cst.Call) -> cst.BaseExpression | None:
        """Return the optimizer inside a wrapper.

        Args:
            construction: The call that constructs the wrapper.
        """
        return argument(construction, 0, "opt") or argument(construction, -1, "inner_optimizer")

    def is_of_npu(self, construction: cst.Call) -> bool:
        """Tell whether a wrapper is NPULossScaleOptimizer, of the NPU bridge or of tfmp.

        Args:
            construction: The call that constructs the wrapper.
        """
        return self._script.function_name(construction).endswith(_OF_NPU)

    def computed_by_wrapper(self, call: cst.Call) -> Wrapping | None:
        """Return the wrapper whose `compute_gradients` is called; None for any other call.

        Args:
            call: Any call of the script.
        """
        owner, name = method(call)
        return self.wrapping(owner) if name == "compute_gradients" else None

    def computes_gradients(self, call: cst.Call) -> bool:
        """Tell whether a call computes gradients: `compute_gradients` of any optimizer, or `tf.gradients`.

        Args:
            call: Any call of the script.
        """
        name = self._script.name_of(call.func)
        if name:
            return name.startswith("tensorflow.") and name.endswith(".gradients")
        return method(call)[1] == "compute_gradients"

    def applied_gradients(self) -> Iterable[tuple[cst.Call, Wrapping, list[cst.CSTNode]]]:
        """Yield each `apply_gradients` of a wrapped optimizer, with the wrapper and the nodes behind its gradients."""
        for call, owner in self._script.methods("apply_gradients") if self.constructions else ():
            wrapping, grads = self.wrapping(owner), argument(call, 0, "grads_and_vars")
            if wrapping is not None and grads is not None:
                yield call, wrapping, self._flow.nodes_behind(grads, self.computes_gradients)

    def gradient_computations(self) -> Iterator[tuple[cst.Call, cst.BaseExpression, cst.BaseExpression]]:
        """Yield each call that computes gradients with an optimizer, with the optimizer and the loss."""
        for call in self._script.nodes(cst.Call) if self.constructions else ():
            owner, name = method(call)
            last = self._script.last_word(call)
            optimizer: cst.BaseExpression | None = None
            if last in _STEPS:
                optimizer = argument(call, _STEPS[last], "optimizer")
            elif name in ("compute_gradients", "minimize") and not self._script.name_of(call.func):
                optimizer = owner
            loss = argument(call, 0, "total_loss" if last == "create_train_op" else "loss")
            if optimizer is not None and loss is not None:
                yield call, optimizer, loss

    def distributed_optimizer(self, call: cst.Call) -> cst.BaseExpression | None:
        """Return the optimizer inside a distributed optimizer of Horovod or the NPU bridge; None for any other call.

        Args:
            call: Any call of the script.
        """
        name = self._script.function_name(call)
        if name.split(".")[-1] not in _SUMMING:
            return None
        imported = self._script.name_of(call.func)
        known = imported.split(".")[0] in _MODULES_THAT_SUM if imported else name.split(".")[0] == "hvd"
        return argument(call, 0, "optimizer") if known or self._by_star(call) else None

    def distributed_call(self, node: cst.BaseExpression) -> cst.Call | None:
        """Return the call that constructs the outermost distributed optimizer around an optimizer; None without one.

        Args:
            node: The optimizer, a name or a call.
        """
        calls = (each for each in (node, *self._flow.values(node).nodes) if isinstance(each, cst.Call))
        return next((each for each in calls if self.distributed_optimizer(each) is not None), None)

    def description(self, node: cst.BaseExpression, wrapping: Wrapping) -> str:
        """Return the words by which a message names a wrapped optimizer.

        Args:
            node: The expression of the optimizer.
            wrapping: The wrapper around it.
        """
        name = self._script.code(node) if dotted(node) else "the optimizer"
        if wrapping.certain:
            return name
        return f"{name} (where line {self._script.line(wrapping.call)} wraps it)"

    def _constructs(self, call: cst.Call) -> bool:
        """Tell whether a call constructs a loss-scale wrapper."""
        name = self._script.function_name(call)
        if name.split(".")[-1] not in _WRAPPERS:
            return False
        imported = self._script.name_of(call.func)
        if not imported:
            return self._by_star(call)
        return any(imported.startswith(f"{package}.") for package in PACKAGES)

    def _by_star(self, call: cst.Call) -> bool:
        """Tell whether an unbound name may come from a star import of the NPU bridge or of tfmp."""
        if not isinstance(call.func, cst.Name) or self._flow.bindings(call.func):
            return False
        name = call.func.value
        stars = (each.name for each in self._script.imports if not each.bound)
        bound = {each.bound for each in self._script.imports}
        bound |= {node.name.value for node in self._script.nodes(cst.ClassDef)}
        bound |= {node.name.value for node in self._script.nodes(cst.FunctionDef)}
        return name not in bound and any(star.split(".")[0] in ("npu_bridge", "tfmp") for star in stars)

    def _wrapping(self, node: cst.BaseExpression, seen: frozenset[cst.CSTNode]) -> Wrapping | None:
        """Return the wrapper around an expression; `seen` stops at assignments that refer to each other."""
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
        """Return the first wrapper around any of these expressions; it is certain only if all of them are wrapped."""
        found = [self._wrapping(node, seen) for node in nodes]
        first = next((each for each in found if each is not None), None)
        certain = complete and all(each is not None and each.certain for each in found)
        return first and Wrapping(first.call, certain)

    def _returned(self, call: cst.Call) -> Sequence[cst.BaseExpression]:
        """Return the values that a function of the script returns."""
        return () if self._flow.bindings(call.func) else self._script.cached(ReturnValues).values(call)
