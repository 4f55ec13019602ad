"""Finds the places where a module of TensorFlow leaves what the other analyses follow.

They follow imports, and assignments of a module to a word. They do not follow a module that is an attribute, an
argument, an item or a returned value, one that is imported by its name as text, and code that is a text.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import libcst as cst

from tfmp.migrate.analysis.data_flow import DataFlow
from tfmp.migrate.analysis.expressions import Use, dotted, is_tensorflow, literal_text
from tfmp.migrate.analysis.script import Script, is_own_v1
from tfmp.migrate.analysis.tf_version import (
    V1_MODULE,
    TfVersion,
    detect_version,
    is_checked_for,
    name_in_tensorflow,
)
from tfmp.migrate.tables.api_names import Standing, differs, is_module, is_mostly_old, standing

# Functions that only look at a module.
_LOOKING = frozenset(
    (
        *("hasattr", "print", "dir", "isinstance", "type", "id", "repr", "str", "bool", "reload", "help"),
        *("getmodule", "getsource", "getfile", "getsourcefile"),
    )
)
# `object` is of `mock.patch.object`.
_OF_ATTRIBUTES = ("getattr", "setattr", "delattr", "object")
_NAMESPACES = (".__dict__", ".__getattr__", ".__getattribute__")
_OWN_NAMES = (".__name__", ".__package__")
# R13 reports each use of tf.contrib, and Keras has the same names in TensorFlow 1 and 2.
_LEFT_OUT = ("contrib", "compat", "keras")
# `import_module`, `__import__`, `importorskip`, `lazy_import`, `LazyLoader`, but not `can_import` and `is_importable`.
_IMPORTS = re.compile(r"(?!_*(is|has|can|check)_)\w*(import|lazy)\w*|resolve_name|locate", re.IGNORECASE)
_MODULE = re.compile(r"([\w.]+\.)?tensorflow(?!\.keras\b)([.:][\w.:]*)?")
_CONTRIB = re.compile(r"tensorflow\.contrib(\.\w+)*")
_RUNNING = frozenset(("exec", "eval", "compile"))
_CELLS = frozenset(("run_cell_magic", "run_line_magic", "run_cell", "timeit", "Timer"))
_PROCESSES = ("subprocess.", "os.")
_STATEMENT = r"\b(import|from)\s+tensorflow\b|\b({words})\s*\.\s*\w|\b({words})\s*\.\Z"


class Hidden(NamedTuple):
    """A place where a module leaves sight."""

    node: cst.CSTNode
    shown: str  #: The code that names the module or the text.
    is_likely: bool = True  #: Whether names of TensorFlow 1 are likely behind it.


def passed_on(script: Script) -> Iterator[Hidden]:
    """Yield the uses of a module as a value, apart from assignments that are followed; and imports in a class."""
    followed = {id(node) for alias in script.aliases for node in _values(alias.node)}
    followed |= {id(node.value) for node in script.nodes(cst.Assign) if is_own_v1(node)}
    for use in (*script.uses, *script.ambiguous_uses):
        is_value = not isinstance(script.parent(use.node), cst.AssignTarget | cst.Del) and id(use.node) not in followed
        name = _module_name(use) if is_value else None
        if name is None or not _hides_names(script, name) or _is_only_looked_at(script, use):
            continue
        yield Hidden(use.node, script.code(use.node), is_mostly_old(name))
    for one in script.imports:
        in_class = one.alias is not None and isinstance(script.scopes.scope(one.node), cst.ClassDef)
        if in_class and one.name == "tensorflow":
            yield Hidden(one.node, one.bound)


def imported_as_text(script: Script) -> Iterator[Hidden]:
    """Yield the imports of TensorFlow by its name, uses of `sys.modules`, and other texts that name tf.contrib."""
    # Names of `tf.compat.v1` are followed behind such an import, and need no other.
    told = {node for alias in script.aliases if alias.module == V1_MODULE for node in _values(alias.node)}
    for node, given in _imports(script):
        texts = [*_texts(script, given)]
        if node not in told and not _is_tested(script, node) and any(map(_MODULE.fullmatch, texts)):
            told.add(node)
            yield Hidden(node, script.code(node))
    for text in script.nodes(cst.SimpleString):
        is_doc = isinstance(script.parent(text), cst.Expr) or not _CONTRIB.fullmatch(literal_text(text))
        if not is_doc and not _is_tested(script, text) and told.isdisjoint(script.ancestors(text)):
            yield Hidden(text, script.code(text))


def run_as_text(script: Script) -> Iterator[Hidden]:
    """Yield the calls that run code which is a text and uses TensorFlow."""
    words = {"tf", "tensorflow", *(one.bound for one in script.imports if one.name == "tensorflow" and one.bound)}
    words.update(word for alias in script.aliases for word in alias.words)
    pattern = re.compile(_STATEMENT.format(words="|".join(sorted(map(re.escape, words)))))
    for call in script.nodes(cst.Call):
        name = script.function_name(call)
        last = name.rpartition(".")[2] or (call.func.attr.value if isinstance(call.func, cst.Attribute) else "")
        runs = name.removeprefix("builtins.") in _RUNNING or last in _CELLS or name.startswith(_PROCESSES)
        if runs and any(map(pattern.search, _texts(script, call.args))):
            yield Hidden(call, script.code(call))


def _values(alias: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the module that an assignment binds to a word, or those of its `x if y else z`."""
    stack: list[object] = [getattr(alias, "value", None)]
    while stack:
        node = stack.pop()
        if isinstance(node, cst.IfExp):
            stack += [node.body, node.orelse]
        elif isinstance(node, cst.CSTNode):
            yield node


def _module_name(use: Use) -> str | None:
    """Return the words after `tf.` of a module that is used as a value; None for a use of anything else."""
    name = name_in_tensorflow(use.name)
    if not is_tensorflow(use.name):
        return None
    if use.name.endswith(_NAMESPACES):
        return name.rpartition(".")[0]
    return name if is_module(name) else None


def _hides_names(script: Script, name: str) -> bool:
    """Tell whether names of TensorFlow 1 may be used through a module that is passed on."""
    # After R1, all names of TensorFlow 1 are behind its modules, apart from those of tf.contrib.
    is_moved = script.cached(detect_version).version in (TfVersion.V1, TfVersion.COMPAT_V1)
    return not name or (not is_moved and name.partition(".")[0] not in _LEFT_OUT and differs(name))


def _is_only_looked_at(script: Script, use: Use) -> bool:
    """Tell whether a use of a module gives nobody its names."""
    above = script.parent(use.node)
    if isinstance(above, cst.Expr | cst.FormattedStringExpression) or _is_tested(script, use.node):
        return True
    call = script.parent(above) if isinstance(above, cst.Arg) else None
    if not isinstance(call, cst.Call):
        return False
    word = script.function_name(call).rpartition(".")[2]
    name = literal_text(call.args[1].value) if word in _OF_ATTRIBUTES and len(call.args) > 1 else ""
    full = f"{name_in_tensorflow(use.name)}.{name}".lstrip(".")
    is_kept = bool(name) and (name.startswith("__") or standing(full) in (Standing.SAME, Standing.NEW))
    return word in _LOOKING or is_kept or (bool(name) and is_checked_for(script, call))


def _is_tested(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether only the truth of an expression matters: in a condition, a comparison or an `assert`."""
    for above, part in script.around(node):
        if isinstance(above, cst.Comparison | cst.ComparisonTarget | cst.Assert | cst.Del):
            return True
        if isinstance(above, cst.If | cst.IfExp | cst.While):
            return part is above.test
        is_not = isinstance(above, cst.UnaryOperation) and isinstance(above.operator, cst.Not)
        if not is_not and not isinstance(above, cst.BooleanOperation):
            return is_not
    return False


def _imports(script: Script) -> Iterator[tuple[cst.CSTNode, Iterable[cst.CSTNode]]]:
    """Yield the nodes whose values may be modules that a text names, each with the nodes that may hold the text."""
    calls = [call for call in script.nodes(cst.Call) if any(map(_IMPORTS.fullmatch, _last_words(script, call.func)))]
    # A function or class of the script that imports what it is given does so where it is called.
    around = {above for call in calls for above in script.ancestors(call)}
    own = {above.name.value for above in around if isinstance(above, cst.FunctionDef | cst.ClassDef)}
    calls += [call for call in script.nodes(cst.Call) if dotted(call.func) in own and call not in calls]
    for call in calls:
        function = script.function_of(call)
        params = function.params.params if function is not None else ()
        if not isinstance(script.parent(call), cst.Expr) and not script.name_of(call.func).startswith("tensorflow."):
            yield call, [*call.args, *(param.default for param in params if param.default is not None)]
    of_modules: list[tuple[cst.CSTNode, cst.BaseExpression, Iterable[cst.CSTNode]]] = [
        *((call, call.func, call.args) for call in script.nodes(cst.Call)),
        *((item, item.value, item.slice) for item in script.nodes(cst.Subscript)),
    ]
    for node, owner, given in of_modules:
        is_modules = (script.name_of(owner) or dotted(owner)) in ("sys.modules", "sys.modules.get")
        if is_modules and not isinstance(script.parent(node), cst.Expr | cst.AssignTarget):
            yield node, given


def _last_words(script: Script, callee: cst.BaseExpression) -> set[str]:
    """Return the last words of the functions that may be called."""
    word = callee.attr.value if isinstance(callee, cst.Attribute) else dotted(callee)
    names = [script.name_of(callee), word]
    names += [script.name_of(node) for node in script.cached(DataFlow).values(callee).nodes]
    return {name.rpartition(".")[2] for name in names if name}


def _texts(script: Script, nodes: Iterable[cst.CSTNode]) -> Iterator[str]:
    """Yield the literal texts of which the values of some expressions consist, as far as the script shows them."""
    for node in script.cached(DataFlow).behind(nodes):
        if isinstance(node, cst.SimpleString | cst.ConcatenatedString):
            yield literal_text(node)
        elif isinstance(node, cst.FormattedStringText):
            yield node.value
        elif script.name_of(node).endswith(_OWN_NAMES):
            yield script.name_of(node)
