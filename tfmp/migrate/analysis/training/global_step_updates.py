"""Finds the calls by which a script increments the global step itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import argument, dotted, method
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import is_unused
from tfmp.migrate.analysis.training.operands import operands, without_casts

# The modules of the functions assign and assign_add; a method has none.
_MODULES = ("", "tensorflow", "tensorflow.python.ops.state_ops")
_CONDITIONS = frozenset(("cond", "where", "case", "select"))
_GLOBAL_STEPS = ("get_or_create_global_step", "get_global_step", "create_global_step")
# Functions that make a variable, with the position of its name; negative if it is given by its keyword only.
_VARIABLES = {"Variable": -1, "get_variable": 0}
_JOINING = ("group", "tuple", "run", "control_dependencies", "with_dependencies")


class GlobalStepUpdate(NamedTuple):
    """A call of `assign_add` or `assign` that increments the global step by one."""

    call: cst.Call
    counter: cst.BaseExpression
    conditional: bool  #: True if the increment happens only in some steps.
    moves: Sequence[cst.CSTNode]  #: The nodes that add one: the call itself, or the sums that the call may assign.

    def is_everywhere(self, is_so: Callable[[cst.CSTNode], bool]) -> bool:
        """Tell whether a condition holds for every place that increments the counter."""
        return is_so(self.call) or all(is_so(move) for move in self.moves)


def global_step_updates(script: Script) -> Iterator[GlobalStepUpdate]:
    """Yield the calls that increment the global step by one."""
    for call in script.nodes(cst.Call):
        module, _, word = (script.name_of(call.func) or method(call)[1]).rpartition(".")
        if module not in _MODULES or word not in ("assign", "assign_add"):
            continue
        counter = argument(call, 0, "ref") if module else method(call)[0]
        value = argument(call, 1 if module else 0, "value") or argument(call, -1, "delta")
        if counter is None or value is None or not _is_counter(script, counter):
            continue
        if word == "assign":
            yield from _assignment(script, call, counter, value)
        elif _is_one(script, value):
            yield GlobalStepUpdate(call, counter, False, (call,))


def is_same_counter(script: Script, one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    """Tell whether two expressions are the same variable, by one name or because both are the graph's global step."""
    is_one_name = script.cached(DataFlow).is_same_name(one, other)
    return is_one_name or (_is_the_graphs(script, one) and _is_the_graphs(script, other))


def is_run_with(script: Script, update: GlobalStepUpdate, step: cst.Call) -> bool | None:
    """Tell whether one run of the graph executes both an increment and an optimizer's step; None if it is not known."""
    with_increment, with_step = _ahead(script, update.call), _ahead(script, step)
    for node in script.cached(_joins):
        if node in with_increment and (node in with_step or _is_held(script, step, node)):
            return True
        if node in with_step and _is_held(script, update.call, node):
            return True
    return False if is_unused(script, update.call) else None


def _joins(script: Script) -> Sequence[cst.BaseExpression]:
    """Return the nodes that run all their parts together. Tuples, and lists that are returned, may be unpacked."""
    calls = (call for call in script.nodes(cst.Call) if (method(call)[1] or script.last_word(call)) in _JOINING)
    lists = (each for each in script.nodes(cst.List) if not isinstance(script.parent(each), cst.Return))
    return [*calls, *lists]


def _users(script: Script) -> Mapping[cst.CSTNode, Sequence[cst.CSTNode]]:
    """Return, for each node that reaches a joined run, the nodes that use it."""
    return script.cached(DataFlow).behind(script.cached(_joins))


def _ahead(script: Script, node: cst.CSTNode) -> set[cst.CSTNode]:
    """Return a node and all nodes whose values depend on it, up to the nodes that are run together."""
    users = script.cached(_users)
    found, stack = set(), [node]
    while stack:
        each = stack.pop()
        if each not in found:
            found.add(each)
            stack.extend(users.get(each, ()))
    return found


def _is_held(script: Script, call: cst.Call, node: cst.CSTNode) -> bool:
    """Tell whether a call is inside `with tf.control_dependencies(...)` on a node, so that it runs after the node."""
    item = script.parent(node)
    block = script.parent(item) if isinstance(item, cst.WithItem) else None
    return isinstance(block, cst.With) and block.body in script.ancestors(call)


def _is_counter(script: Script, counter: cst.BaseExpression) -> bool:
    """Tell whether an expression is a global step: by its function, its name, or because an optimizer receives it."""
    values = (counter, *script.cached(DataFlow).values(counter).nodes)
    if any(_gets_global_step(script, each) for each in values) or dotted(counter).split(".")[-1] == "global_step":
        return True
    given = (argument(step, 1, "global_step") for step, _ in script.methods("apply_gradients", "minimize"))
    return any(each is not None and is_same_counter(script, each, counter) for each in given)


def _is_the_graphs(script: Script, counter: cst.BaseExpression) -> bool:
    """Tell whether a variable is what tf.train.get_global_step() returns. Without other evidence its name decides."""
    values = script.cached(DataFlow).values(counter).nodes or (counter,)
    is_named = values == (counter,) and dotted(counter).split(".")[-1] == "global_step"
    return is_named or all(_gets_global_step(script, node) for node in values)


def _gets_global_step(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether a call returns the graph's global step, or creates a variable with that name."""
    if not isinstance(node, cst.Call):
        return False
    function = script.last_word(node)
    name = argument(node, _VARIABLES.get(function, -1), "name")
    is_named = isinstance(name, cst.SimpleString) and name.evaluated_value == "global_step"
    return function in _GLOBAL_STEPS or (function in _VARIABLES and is_named)


def _assignment(
    script: Script, call: cst.Call, counter: cst.BaseExpression, value: cst.BaseExpression
) -> Iterator[GlobalStepUpdate]:
    """Yield the update if an assigned value is the counter plus one."""
    behind = script.cached(DataFlow).behind([value], lambda each: _gets_global_step(script, each))
    sums = [node for node in behind if _adds_one(script, node, counter)]
    calls = {script.name_of(node.func).split(".")[-1] for node in behind if isinstance(node, cst.Call)}
    conditional = bool(calls & _CONDITIONS) or any(isinstance(node, cst.IfExp) for node in behind)
    if sums:
        yield GlobalStepUpdate(call, counter, conditional, sums)


def _adds_one(script: Script, node: cst.CSTNode, counter: cst.BaseExpression) -> bool:
    """Tell whether a node is the sum of a counter and 1."""
    pair = operands(script, node, cst.Add)
    orders = (pair, pair[::-1]) if pair else ()
    return any(_is_one(script, by) and is_same_counter(script, counter, without_casts(script, to)) for to, by in orders)


def _is_one(script: Script, node: cst.BaseExpression) -> bool:
    """Tell whether an expression is the number 1, also below casts."""
    number = without_casts(script, node)
    return isinstance(number, cst.Integer | cst.Float) and number.evaluated_value == 1
