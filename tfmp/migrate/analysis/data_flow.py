"""Finds where the values of names come from, inside one script.

The names of functions, of the module and of comprehensions are followed in the order of the text, and so is `self.name`
inside a class. An assignment that a later one replaced is not returned, and neither is one in the other branch of an
`if`. The values that the script's own functions return are followed. The arguments of their parameters are followed
only for a function that is nested in another function.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.bindings import Binding, bindings_of
from tfmp.migrate.analysis.conditions import Branches, Conditions
from tfmp.migrate.analysis.expressions import argument, dotted
from tfmp.migrate.analysis.scopes import Scope
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tree import children, once_per_argument
from tfmp.migrate.tables import starts

_CLIPS = ("clip_by_value", "clip_by_norm", "clip_by_average_norm", "clip_by_global_norm")


class Values(NamedTuple):
    """The values that a name may have."""

    nodes: tuple[cst.BaseExpression, ...]  #: The expressions that were assigned to the name.
    complete: bool  #: False if there may be other values, as for a parameter or a name without a visible binding.


class DataFlow:
    """Follows the names of a script to the expressions that were assigned to them.

    Attributes:
        conditions: Tells which nodes never run together.

    Examples:
        >>> script = Script('''
        ... loss = f(x)
        ... loss = loss * 8
        ... minimize(loss)
        ... ''')
        >>> *_, call = script.nodes(cst.Call)
        >>> value, = DataFlow(script).values(call.args[0].value).nodes
        >>> script.text[slice(*script.span(value))]
        'loss * 8'
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._bindings: dict[tuple[Scope, str], list[Binding]] = defaultdict(list)
        for binding in bindings_of(script):
            self._bindings[binding.scope, binding.name].append(binding)
        for found in self._bindings.values():
            found.sort(key=lambda binding: binding.place)
        self.conditions = Conditions(script, self._assigned_before)

    def values(self, node: cst.BaseExpression) -> Values:
        """Return the values that a name, or `self.name`, may have where it is read."""
        live = self.bindings(node)
        nodes = tuple(binding.value for binding in live if binding.value is not None)
        return Values(nodes, bool(live) and len(nodes) == len(live) and live[0].replaces)

    @once_per_argument
    def bindings(self, node: cst.BaseExpression) -> list[Binding]:
        """Return the assignments from which a name, or `self.name`, may have its value where it is read."""
        name = dotted(node)
        found, here = self._visible(node, name) if name else ((), False)
        return self._live(found, node if here else None)

    def returned_by(self, call: cst.Call) -> Sequence[cst.BaseExpression]:
        """Return the values that a function, or a method of self, may return; empty if the called one is not known."""
        return () if self.bindings(call.func) else _returned_by(self._script, call)

    def behind(
        self,
        nodes: Iterable[cst.CSTNode],
        is_end: Callable[[cst.Call], bool] = lambda call: False,
        is_left_out: Callable[[cst.CSTNode], bool] = lambda node: False,
    ) -> Mapping[cst.CSTNode, Sequence[cst.CSTNode]]:
        """Return all nodes that contribute to the values of some expressions, each with the nodes that use it directly.

        The nodes are found as far as the script shows them. The search stops at a call for which `is_end` is true. It
        leaves out a node for which `is_left_out` is, with all that is behind it.
        """
        users: dict[cst.CSTNode, list[cst.CSTNode]] = {node: [] for node in nodes if not is_left_out(node)}
        stack = list(users)
        while stack:
            each = stack.pop()
            if isinstance(each, cst.Call) and is_end(each):
                continue
            for below in self._next(each):
                if below in users:
                    users[below].append(each)
                elif not is_left_out(below):
                    users[below] = [each]
                    stack.append(below)
        return users

    def is_same_name(self, one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
        """Tell whether two expressions are the same name for the same variable."""
        return bool(dotted(one)) and dotted(one) == dotted(other) and self._scope(one) is self._scope(other)

    def is_conditional(self, node: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Tell whether a node is in a branch of an `if` that does not contain another node."""
        shared = self.conditions.branches(other)
        return any(branch not in shared for branch in self.conditions.branches(node))

    def _assigned_before(self, name: cst.BaseExpression) -> int:
        """Return how often a name was assigned in its function before the place where it is read."""
        start, function, assigned = self._script.span(name)[0], self._script.function_of(name), 0
        for part in starts(dotted(name)):
            found, here = self._visible(name, part)
            assigned += sum(each.value is not None and each.place <= start for each in found) if here else 0
            written = (each for each in self._written.get(part, ()) if self._script.span(each)[1] <= start)
            assigned += sum(self._script.function_of(each) is function for each in written)
        return assigned

    @cached_property
    def _written(self) -> Mapping[str, Sequence[cst.CSTNode]]:
        """The assignments to attributes of objects other than self, by the whole name of the attribute."""
        found: dict[str, list[cst.CSTNode]] = defaultdict(list)
        for target in self._script.nodes(cst.AssignTarget):
            if isinstance(target.target, cst.Attribute) and not dotted(target.target).startswith("self."):
                found[dotted(target.target)].append(target)
        return found

    def _given(self, binding: Binding) -> Iterator[cst.BaseExpression]:
        """Yield the arguments that calls give to a parameter of a nested function."""
        function = binding.scope
        around = self._script.function_of(function)
        if not isinstance(function, cst.FunctionDef) or around is None:
            return
        names = [param.name.value for param in function.params.params]
        if binding.name not in names:
            return
        for call in self._script.nodes(cst.Call):
            is_its = dotted(call.func) == function.name.value
            if is_its and around in list(self._script.ancestors(call)):
                value = argument(call, names.index(binding.name), binding.name)
                yield from [value] if value is not None else []

    def _scope(self, node: cst.BaseExpression) -> Scope | None:
        """Return the scope that binds a dotted name, or else its first word; None if no scope does."""
        name = dotted(node)
        if name.startswith("self."):
            return next((each for each in self._script.ancestors(node) if isinstance(each, cst.ClassDef)), None)
        found = self._visible(node, name)[0] or self._visible(node, name.split(".")[0])[0]
        return found[0].scope if found else None

    def _next(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        if isinstance(node, cst.Name | cst.Attribute) and dotted(node):
            bindings = self.bindings(node)
            for binding in bindings:
                yield from [binding.value] if binding.value is not None else self._given(binding)
            if isinstance(node, cst.Attribute) and not bindings and not self._script.name_of(node):
                yield node.value
        elif isinstance(node, cst.Call):
            # The limit of a clipping function contributes nothing to the gradients' values.
            yield from node.args[:1] if self._script.name_of(node.func).split(".")[-1] in _CLIPS else node.args
            if isinstance(node.func, cst.Attribute):
                yield node.func.value
            yield from self._returned(node)
        elif isinstance(node, cst.Arg):
            yield node.value
        elif not isinstance(node, cst.CompFor | cst.Parameters):
            # The iterable of a comprehension is reached through the variables of the comprehension.
            yield from children(node)

    def _returned(self, call: cst.Call) -> Iterator[cst.BaseExpression]:
        """Yield the values that a function of the script returns, except tuples of several values."""
        bindings = self.bindings(call.func)
        if bindings and not dotted(call.func).startswith("self."):
            yield from (each.value.body for each in bindings if isinstance(each.value, cst.Lambda))
        else:
            found = _returned_by(self._script, call)
            yield from (each for each in found if not isinstance(each, cst.Tuple))

    def _visible(self, node: cst.CSTNode, name: str) -> tuple[Sequence[Binding], bool]:
        """Return the bindings of a name that is read, and whether they are in the function that reads it."""
        here = True
        is_of_self = name.startswith("self.")
        for above in self._script.ancestors(node):
            found = self._bindings.get((above, name), ())
            if is_of_self and isinstance(above, cst.ClassDef):
                in_function = [each for each in found if self._is_before(each, node)]
                return (in_function, True) if in_function else (found, False)
            if found and not is_of_self and (here or not isinstance(above, cst.ClassDef)):
                return found, here
            here = here and not isinstance(above, cst.FunctionDef | cst.Lambda)
        return (), False

    def _is_before(self, binding: Binding, node: cst.CSTNode) -> bool:
        function = self._script.function_of(binding.node)
        return function is self._script.function_of(node) and binding.place <= self._script.span(node)[0]

    def _live(self, bindings: Sequence[Binding], reader: cst.CSTNode | None) -> list[Binding]:
        """Return the bindings that no later one has replaced where a name is read, or at the end without a reader."""
        live: list[Binding] = []
        for binding, own in reversed(self._reaching(bindings, reader)):
            if binding.replaces:
                live = [each for each in live if not self._replaces(binding, own, each, live)]
            live.append(binding)
        return live

    def _reaching(self, bindings: Sequence[Binding], reader: cst.CSTNode | None) -> Sequence[tuple[Binding, Branches]]:
        """Return the assignments that may reach a reader, the last first, each with the branches it does not share."""
        shared = self.conditions.branches(reader) if reader is not None else ()
        found: list[tuple[Binding, Branches]] = []
        for binding in reversed(bindings):
            if reader is None or self._reaches(binding, reader):
                own = [branch for branch in self.conditions.branches(binding.node) if branch not in shared]
                found.append((binding, own))
                if reader is not None and binding.replaces and not own:
                    break
        return found

    def _reaches(self, binding: Binding, reader: cst.CSTNode) -> bool:
        if binding.place > self._script.span(reader)[0] and binding.value is not None:
            return isinstance(binding.node, cst.CompFor)
        return not self.conditions.is_exclusive(binding.node, reader)

    def _replaces(self, new: Binding, own: Branches, old: Binding, live: Sequence[Binding]) -> bool:
        """Tell whether an assignment replaces an earlier one, alone or together with those of the other branches."""
        if self._script.function_of(new.node) is not self._script.function_of(old.node):
            return False
        for above, in_body in reversed(own):
            if (above, in_body) in self.conditions.branches(old.node):
                return True
            in_other = any((above, True) in self.conditions.branches(each.node) and each.replaces for each in live)
            is_only_one = self.conditions.is_ended(above, not in_body) or (in_other and not in_body)
            if not is_only_one or (above, not in_body) in self.conditions.branches(old.node):
                return False
        return True


def _returned_by(script: Script, call: cst.Call) -> Sequence[cst.BaseExpression]:
    *owner, name = dotted(call.func).split(".")
    if owner not in ([], ["self"]):
        return ()
    above = list(script.ancestors(call))
    found = [
        each.node
        for scope, bound in script.scopes.bound(name).items()
        for each in bound
        if isinstance(each.node, cst.FunctionDef) and isinstance(scope, cst.ClassDef) == bool(owner)
        if scope in above
    ]
    ends = (each for each in script.nodes(cst.Return) if len(found) == 1 and script.function_of(each) is found[0])
    return [each.value for each in ends if each.value is not None]
