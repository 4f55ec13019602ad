"""A parsed script: its syntax tree, and the meaning of its names."""

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import libcst as cst

from tfmp.migrate.analysis.expressions import (
    Imported,
    Use,
    dotted,
    imported_by,
    is_tensorflow,
    literal_text,
    method,
    one_tensorflow,
    root_of,
)
from tfmp.migrate.analysis.scopes import Scopes
from tfmp.migrate.analysis.tree import Tree
from tfmp.migrate.tables.api_names import is_module

_Made = TypeVar("_Made")
_IMPORTING = ("importlib.import_module", "pytest.importorskip")


class Alias(NamedTuple):
    """An assignment that binds words to a module of TensorFlow, as `tf = tensorflow` does."""

    node: cst.CSTNode  #: The assignment.
    words: tuple[str, ...]  #: The words that it binds.
    module: str  #: The full name of the module as the script writes it.
    of: str  #: The word that the module is assigned from; empty if the value is more than one word.


class Script(Tree):
    """A parsed script. It is never modified: rules return edits instead.

    Examples:
        >>> script = Script('''import tensorflow.compat.v1 as tf
        ... opt = tf.contrib.mixed_precision.LossScaleOptimizer(a, b)''')
        >>> use, = script.uses
        >>> use.name, use.root, script.line(use.node)
        ('tensorflow.contrib.mixed_precision.LossScaleOptimizer', 'tensorflow', 2)
        >>> script.text[slice(*script.span(use.node))]
        'tf.contrib.mixed_precision.LossScaleOptimizer'
    """

    def __init__(
        self, text: str, tensorflow: int | None = None, star_names: Mapping[str, frozenset[str]] = MappingProxyType({})
    ) -> None:
        super().__init__(text)
        self.tensorflow = tensorflow
        self.star_names = star_names
        self.scopes = Scopes(self)
        self._made: dict[object, object] = {}

    def is_builtin(self, name: cst.Name) -> bool:
        """Tell whether a word is a use of a Python builtin that the script does not rebind."""
        return hasattr(builtins, name.value) and self.scopes.is_read(name) and not self.scopes.bindings(name)

    @cached_property
    def imports(self) -> tuple[Imported, ...]:
        """The absolute imports in the order of the text, including imports inside functions."""
        found = [one for node in self.nodes(cst.Import) for one in imported_by(node)]
        found += [one for node in self.nodes(cst.ImportFrom) for one in imported_by(node)]
        return tuple(sorted(found, key=lambda one: self.span(one.node)))

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """The uses of imported names, each with all the attributes that follow, in the order of the text.

        A name with two possible meanings, or with another binding besides an import, is left out.
        """
        return tuple(use for use, is_certain in self._all_uses if is_certain)

    @cached_property
    def ambiguous_uses(self) -> tuple[Use, ...]:
        """The uses of imported names that also have another binding, in the same form as `uses`."""
        return tuple(use for use, is_certain in self._all_uses if not is_certain)

    @cached_property
    def _all_uses(self) -> Sequence[tuple[Use, bool]]:
        """All uses of imported names, each with whether its meaning is certain."""
        assigned = (word for alias in self.aliases for word in alias.words)
        words = dict.fromkeys([*(imported.bound for imported in self.imports), *assigned])
        roots = (root for word in words for root in self.scopes.words.get(word, ()) if self.scopes.is_read(root))
        found = (self._use(root) for root in sorted(roots, key=self.span))
        return [each for each in found if each is not None]

    def _use(self, root: cst.Name) -> tuple[Use, bool] | None:
        """Return the use that starts with a word, and whether its meaning is certain; None if it means no import."""
        told = self._meaning(root, self._modules)
        if told is None:
            return None
        node = self.whole_name(root)
        raw = f"{told[0]}{dotted(node)[len(root.value) :]}"
        return Use(node, one_tensorflow(raw), one_tensorflow(told[0]), raw), told[1]

    def _meaning(self, root: cst.Name, modules: Mapping[cst.CSTNode, str]) -> tuple[str, bool] | None:
        """Return the module that a word stands for, and whether it stands for no other; None if for no module."""
        # A class reads a word from outside until it binds it: `tf = tf`.
        in_class = isinstance(self.scopes.scope(root), cst.ClassDef)
        bound = [each.node for each in self.scopes.bindings(root, earlier=in_class)]
        found = {modules[each] for each in bound if each in modules}
        if not found:
            return None
        others = (each for each in bound if each not in modules)
        is_one = len(set(map(one_tensorflow, found))) == 1
        return min(found), is_one and all(map(_is_given, others))

    @cached_property
    def _modules(self) -> Mapping[cst.CSTNode, str]:
        """The full names that import aliases and assignments bind, as the script writes them."""
        return {**self._imported_modules, **{alias.node: alias.module for alias in self.aliases}}

    @cached_property
    def _imported_modules(self) -> Mapping[cst.CSTNode, str]:
        return {one.alias: one.module for one in self.imports if one.alias is not None}

    @cached_property
    def aliases(self) -> tuple[Alias, ...]:
        """The assignments that bind a module of TensorFlow to words, in the order of the text.

        An attribute of a class or an object is no such word, because other files may use it.
        """
        known, found = dict(self._imported_modules), []
        for node in self.nodes(cst.Assign, cst.AnnAssign, cst.NamedExpr):
            targets, value = _assigned(node)
            in_class = isinstance(self.scopes.scope_bound_in(node), cst.ClassDef)
            module = self._module_of(value, known) if value is not None and not in_class else ""
            words = tuple(target.value for target in targets if isinstance(target, cst.Name))
            root = dotted(value).partition(".")[0]
            if module and len(words) == len(targets) and root not in words:
                known[node] = module
                found.append(Alias(node, words, module, root if root == dotted(value) else ""))
        return tuple(found)

    def _module_of(self, value: cst.BaseExpression, known: Mapping[cst.CSTNode, str]) -> str:
        """Return the module of TensorFlow that an expression is, or that it imports; empty for any other."""
        if isinstance(value, cst.IfExp):
            both = [self._module_of(each, known) for each in (value.body, value.orelse)]
            return min(both) if all(both) and len(set(map(one_tensorflow, both))) == 1 else ""
        callee = value.func if isinstance(value, cst.Call) else value
        root = root_of(callee)
        told = self._meaning(root, known) if isinstance(root, cst.Name) else None
        rest = dotted(callee)[len(dotted(root)) :]
        name = f"{told[0]}{rest}" if told is not None and told[1] else dotted(callee)
        if not isinstance(value, cst.Call):
            words = one_tensorflow(name).partition(".")[2]
            is_class = words.rpartition(".")[2][:1].isupper()
            is_told = told is not None and is_tensorflow(name) and (is_class or is_module(words))
            return name if is_told else ""
        text = literal_text(value.args[0].value) if value.args else ""
        text = text.partition(".")[0] if name == "__import__" else text
        return text if name in (*_IMPORTING, "__import__") and is_tensorflow(text) else ""

    def name_of(self, node: cst.CSTNode) -> str:
        """Return the full meaning of a dotted name that starts at an imported name; empty for any other node."""
        return self._name_of_use.get(node, "")

    def methods(self, *names: str) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
        """Yield the calls of methods with one of these names, each with the object that the method is called on.

        Calls of functions in imported modules, such as `tf.gradients`, are not methods and are left out.
        """
        for call in self.nodes(cst.Call):
            owner, name = method(call)
            if name in names and not self.name_of(call.func):
                yield call, owner

    def function_name(self, call: cst.Call) -> str:
        """Return the full name of an imported function, or the name as it is written for any other function.

        A name that may come from a star import is also returned as it is written.
        """
        return self.name_of(call.func) or dotted(call.func)

    def last_word(self, node: cst.CSTNode) -> str:
        """Return the own name of a called function, wherever the script imports it from; empty without a call."""
        return self.function_name(node).split(".")[-1] if isinstance(node, cst.Call) else ""

    @cached_property
    def _name_of_use(self) -> Mapping[cst.CSTNode, str]:
        return {use.node: use.name for use in self.uses}

    def cached(self, make: "Callable[[Script], _Made]") -> _Made:
        """Return an analysis of this script that several rules share; it is computed at the first call."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]  # type: ignore[return-value] # made by this function

    @cached_property
    def unbound_names(self) -> Mapping[str, tuple[int, ...]]:
        """The names that neither the script nor Python binds, with the lines that use them. Star imports may bind them.

        Names are in the order of the first line that uses them.
        """
        lines: dict[str, tuple[int, ...]] = {}
        for line, word in sorted({(self.line(name), name.value) for name in self.scopes.unbound()}):
            lines[word] = (*lines.get(word, ()), line)
        return lines

    def reads_of(self, variable: cst.Name) -> tuple[cst.Name, ...] | None:
        """Return the nodes that read a variable, in the order of the text; None if it has more than one binding."""
        bound = self.scopes.bound(variable.value).get(self.scopes.scope(variable), ())
        if len(bound) != 1:
            return None
        reads = (name for name in self.scopes.words[variable.value] if self.scopes.is_read(name))
        return tuple(name for name in reads if list(self.scopes.bindings(name)) == list(bound))


def _assigned(node: cst.CSTNode) -> tuple[list[cst.BaseExpression], cst.BaseExpression | None]:
    if isinstance(node, cst.Assign):
        return [each.target for each in node.targets], node.value
    return ([node.target], node.value) if isinstance(node, cst.AnnAssign | cst.NamedExpr) else ([], None)


def is_own_v1(binder: cst.CSTNode) -> bool:
    """Tell whether a binding is `name = name.compat.v1`."""
    if not isinstance(binder, cst.Assign):
        return False
    return all(dotted(binder.value) == f"{dotted(each.target)}.compat.v1" for each in binder.targets)


def _is_given(binder: cst.CSTNode) -> bool:
    """Tell whether a binding is `name = None`, or `name = name.compat.v1`, which leaves an import its meaning."""
    return is_own_v1(binder) or (isinstance(binder, cst.Assign) and dotted(binder.value) == "None")
