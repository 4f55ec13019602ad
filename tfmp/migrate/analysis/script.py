"""A parsed script: its syntax tree, and the meaning of its names."""

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import libcst as cst

from tfmp.migrate.analysis.expressions import Imported, Use, dotted, imported_by, method, one_tensorflow
from tfmp.migrate.analysis.scopes import Scopes
from tfmp.migrate.analysis.tree import Tree

_Made = TypeVar("_Made")


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

    def __init__(self, text: str, tensorflow: int | None = None) -> None:
        super().__init__(text)
        self.tensorflow = tensorflow
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
        words = dict.fromkeys(imported.bound for imported in self.imports)
        roots = (root for word in words for root in self.scopes.words.get(word, ()) if self.scopes.is_read(root))
        found = (self._use(root) for root in sorted(roots, key=self.span))
        return [each for each in found if each is not None]

    def _use(self, root: cst.Name) -> tuple[Use, bool] | None:
        """Return the use that starts with a word, and whether its meaning is certain; None if it means no import."""
        bound = [each.node for each in self.scopes.bindings(root, earlier=False)]
        others = [each for each in bound if each not in self._modules]
        modules = {self._modules[each] for each in bound if each in self._modules}
        if not modules:
            return None
        node = self.whole_name(root)
        raw = min(f"{module}{dotted(node)[len(root.value) :]}" for module in modules)
        use = Use(node, one_tensorflow(raw), one_tensorflow(min(modules)), raw)
        is_one = len(set(map(one_tensorflow, modules))) == 1
        return use, is_one and all(_is_given(other, root.value) for other in others)

    @cached_property
    def _modules(self) -> Mapping[cst.CSTNode, str]:
        """The full names that import aliases bind, as the script writes them."""
        return {one.alias: one.module for one in self.imports if one.alias is not None}

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


def _is_given(binder: cst.CSTNode, word: str) -> bool:
    """Tell whether a binding is `name = None`, or `name = name.compat.v1`, which leaves an import its meaning."""
    return isinstance(binder, cst.Assign) and dotted(binder.value) in ("None", f"{word}.compat.v1")
