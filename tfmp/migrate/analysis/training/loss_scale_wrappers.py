"""Finds the optimizers of a script that are inside a loss-scale wrapper."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, dotted, method
from tfmp.migrate.analysis.script import Script

# Packages whose loss-scale wrappers and managers are tfmp's after the rewrite.
_PACKAGES = ("tensorflow.contrib.mixed_precision", "npu_bridge", "tfmp")
_WRAPPERS = ("LossScaleOptimizer", "NPULossScaleOptimizer", "LossScaleOptimizerV1")
_TENSORFLOWS = ("MixedPrecisionLossScaleOptimizer", "enable_mixed_precision_graph_rewrite")
# Managers of tfmp and loss scales of TensorFlow, with the argument that holds the constant or first scale.
_SCALES = {
    "FixedLossScaleManager": "loss_scale",
    "ExponentialUpdateLossScaleManager": "init_loss_scale",
    "FixedLossScale": "loss_scale_value",
    "DynamicLossScale": "initial_loss_scale",
}
# Methods of managers and of Keras' wrappers that return the scale or a scaled loss.
_READS = ("get_loss_scale", "get_scaled_loss")
# Optimizers that sum gradients over processes and wrap another optimizer.
_SUMMING = ("DistributedOptimizer", "NPUDistributedOptimizer", "npu_distributed_optimizer_wrapper")


class Wrapping(NamedTuple):
    """The calls that construct the wrappers of an optimizer, and whether it is wrapped under all conditions."""

    calls: tuple[cst.Call, ...]
    certain: bool


class Step(NamedTuple):
    """A call of `apply_gradients` or `minimize`, the wrappers of its optimizer, and what computes its gradients."""

    call: cst.Call
    optimizer: cst.BaseExpression
    wrapping: Wrapping | None
    grads: cst.BaseExpression | None
    computations: Sequence[cst.Call]


class WrappedOptimizers:
    """Tells which expressions are wrapped optimizers, by a wrapper of tfmp or by TensorFlow's own.

    The wrappers of tf.contrib and of the NPU bridge become tfmp's in the rewrite. TensorFlow's own stay:
    `MixedPrecisionLossScaleOptimizer`, and `enable_mixed_precision_graph_rewrite`, which returns one.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.flow = script.cached(DataFlow)

    @cached_property
    def constructions(self) -> Sequence[cst.Call]:
        """The calls that construct a wrapper, in the order of the text."""
        return [call for call in self._script.nodes(cst.Call) if self._constructs(call)]

    def wrapping(self, node: cst.BaseExpression | None, *, inside: cst.Call | None = None) -> Wrapping | None:
        """Return the wrappers around an optimizer, but not `inside`; None for any other expression."""
        seen = frozenset((inside,) if inside is not None else ())
        return self._wrapping(node, seen) if node is not None and self.constructions else None

    def inner(self, construction: cst.Call) -> cst.BaseExpression | None:
        """Return the optimizer inside a wrapper."""
        return argument(construction, 0, "opt") or argument(construction, -1, "inner_optimizer")

    def is_tensorflows(self, construction: cst.Call) -> bool:
        """Tell whether a wrapper is TensorFlow's own."""
        return self._script.last_word(construction) in _TENSORFLOWS

    def may_skip(self, construction: cst.Call) -> bool:
        """Tell whether a wrapper may skip steps: all do but TensorFlow's with a fixed loss scale."""
        return not self.is_tensorflows(construction) or not any(
            isinstance(each, cst.Integer | cst.Float) or self._script.last_word(each) == "FixedLossScale"
            for each in self._managers(construction)
        )

    def scales(self, construction: cst.Call) -> Iterator[cst.BaseExpression]:
        """Yield the number that is the constant or first scale of a wrapper."""
        for each in self._managers(construction):
            keyword = _SCALES.get(self._script.last_word(each), "")
            scale = argument(each, 0, keyword) if isinstance(each, cst.Call) and keyword else each
            if scale is not None and (scale is not each or isinstance(each, cst.Integer | cst.Float)):
                yield scale

    def _managers(self, construction: cst.Call) -> Sequence[cst.BaseExpression]:
        """Return the manager or the loss scale of a wrapper: the expression, and the values that it may have."""
        keyword = "loss_scale" if self.is_tensorflows(construction) else "loss_scale_manager"
        given = argument(construction, 1, keyword)
        return (given, *self.flow.values(given).nodes) if given is not None else ()

    def reads_scale(self, node: cst.BaseExpression) -> bool:
        """Tell whether an expression reads a loss scale: from a manager, a wrapper, or a loss scale of TensorFlow."""
        if isinstance(node, cst.Attribute) and node.attr.value == "loss_scale":
            return self.wrapping(node.value) is not None
        if not isinstance(node, cst.Call):
            return False
        called = {self._script.last_word(each) for each in self.flow.values(node.func).nodes}
        return method(node)[1] in _READS or not called.isdisjoint(_SCALES)

    def computed_by_wrapper(self, call: cst.Call) -> Wrapping | None:
        """Return the wrappers whose `compute_gradients` is called; None for any other call."""
        owner, name = method(call)
        return self.wrapping(owner) if name == "compute_gradients" else None

    def computes_gradients(self, call: cst.Call) -> bool:
        """Tell whether a call computes gradients: `compute_gradients` of any optimizer, or `tf.gradients`."""
        name = self._script.name_of(call.func)
        if name:
            return name.startswith("tensorflow.") and name.endswith(".gradients")
        return method(call)[1] == "compute_gradients"

    def computations_behind(self, grads: cst.BaseExpression) -> list[cst.Call]:
        """Return the calls that compute the gradients of which a value consists."""
        behind = self.flow.behind([grads], self.computes_gradients)
        return [each for each in behind if isinstance(each, cst.Call) and self.computes_gradients(each)]

    @cached_property
    def steps(self) -> Sequence[Step]:
        """The steps of all optimizers, wrapped or not, in a script that constructs a wrapper."""
        found: list[Step] = []
        for call, optimizer in self._script.methods("apply_gradients", "minimize") if self.constructions else ():
            grads = argument(call, 0, "grads_and_vars") if method(call)[1] == "apply_gradients" else None
            computations = self.computations_behind(grads) if grads is not None else ()
            found.append(Step(call, optimizer, self.wrapping(optimizer), grads, computations))
        return found

    def distributed_optimizer(self, call: cst.Call) -> cst.BaseExpression | None:
        """Return the optimizer inside a distributed optimizer of Horovod or the NPU bridge; None for any other call."""
        if self._script.last_word(call) not in _SUMMING:
            return None
        is_known = self._script.function_name(call).split(".")[0] in ("horovod", "npu_bridge", "hvd")
        return argument(call, 0, "optimizer") if is_known or self._by_star(call) else None

    def description(self, node: cst.BaseExpression, wrapper: cst.Call, certain: bool) -> str:
        """Return the words by which a message names an optimizer that one of its wrappers is around."""
        name = self._script.code(node) if dotted(node) else "the optimizer"
        return name if certain else f"{name} (where line {self._script.line(wrapper)} wraps it)"

    def _constructs(self, call: cst.Call) -> bool:
        last, imported = self._script.last_word(call), self._script.name_of(call.func)
        if last in _TENSORFLOWS:
            return imported.startswith("tensorflow.") and ".keras." not in imported
        if last not in _WRAPPERS:
            return False
        return any(imported.startswith(f"{package}.") for package in _PACKAGES) if imported else self._by_star(call)

    def _by_star(self, call: cst.Call) -> bool:
        """Tell whether an unbound name may come from a star import of the NPU bridge or of tfmp."""
        stars = (each.name for each in self._script.imports if not each.bound)
        is_there = any(star.split(".")[0] in ("npu_bridge", "tfmp") for star in stars)
        return is_there and dotted(call.func) in self._script.unbound_names

    def _wrapping(self, node: cst.BaseExpression, seen: frozenset[cst.CSTNode]) -> Wrapping | None:
        """Return the wrappers around an expression; `seen` stops at assignments that refer to each other."""
        if node in seen:
            return None
        seen |= {node}
        if isinstance(node, cst.IfExp):
            return self._all([node.body, node.orelse], True, seen)
        if isinstance(node, cst.Subscript):
            return self._all([node.value], False, seen)
        if not isinstance(node, cst.Call):
            values = self.flow.values(node)
            return self._all(values.nodes, values.complete, seen)
        if self._constructs(node):
            return Wrapping((node,), True)
        summed = self.distributed_optimizer(node)
        return self._all(self.flow.returned_by(node) if summed is None else [summed], True, seen)

    def _all(
        self, nodes: Sequence[cst.BaseExpression], complete: bool, seen: frozenset[cst.CSTNode]
    ) -> Wrapping | None:
        """Return the wrappers around any of these expressions; certain only if all of them are wrapped."""
        found = [self._wrapping(node, seen) for node in nodes]
        calls = tuple(dict.fromkeys(call for each in found if each is not None for call in each.calls))
        return Wrapping(calls, complete and all(each is not None and each.certain for each in found)) if calls else None


def is_unused(script: Script, call: cst.Call) -> bool:
    """Tell whether the script never reads the value that a call returns."""
    above = script.parent(call)
    target = above.targets[0].target if isinstance(above, cst.Assign) and len(above.targets) == 1 else None
    return isinstance(above, cst.Expr) or (isinstance(target, cst.Name) and script.reads_of(target) == ())
