"""The mutants of a module: small changes, each of which a test should notice.

The changes are those of mutmut: another operator, another number, an argument that is left out or None, an assignment
of None, a condition that always or never holds. Not changed are what a reader is told (what `raise` and the functions
of a log are given, texts with values in them, the names of ops) and what runs when the module is imported (decorators,
default values, everything outside of functions).
"""

import dataclasses
import types
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

#: Functions whose arguments tell a reader something: of `logging`, `warnings` and tfmp's own log.
_TELLING = {"warning", "warn", "info", "debug", "log", "log_once", "warn_at_user", "error"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one function."""

    path: Path
    line: int
    #: Those of its statement down to the change: not for each of them does Python say that it is run.
    lines: range
    #: The line at which the function begins, its first decorator included, and its name with those of its classes.
    first_line: int
    function: str
    before: str
    after: str
    _module: cst.Module = dataclasses.field(repr=False, compare=False)
    _node: cst.CSTNode = dataclasses.field(repr=False, compare=False)
    _changed: cst.CSTNode = dataclasses.field(repr=False, compare=False)

    def code(self) -> types.CodeType | None:
        """Compile the changed function; None if the change is no valid Python."""
        changed = cst.ensure_type(self._module.deep_replace(self._node, self._changed), cst.Module)
        try:
            code = compile(changed.code, str(self.path), "exec")
        except SyntaxError:
            return None
        return next(each for each in codes_within(code) if is_at(each, self.function, self.first_line))

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: {_in_one_line(self.before)}  ->  {_in_one_line(self.after)}"


def mutants_of(path: Path) -> list[Mutant]:
    """List the mutants of the module at `path`, in its order."""
    wrapper = MetadataWrapper(cst.parse_module(path.read_text("utf-8")))
    visitor = _Visitor(path, wrapper.module)
    wrapper.visit(visitor)
    return visitor.mutants


def codes_within(code: types.CodeType) -> Iterator[types.CodeType]:
    """Walk through a code object and all that it contains."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_within(constant)


def is_at(code: types.CodeType, function: str, first_line: int) -> bool:
    """Whether the code is that of a function with this name, which begins at this line."""
    # The name with those of the classes is there since Python 3.11.
    return getattr(code, "co_qualname", "") == function and code.co_firstlineno == first_line


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path: Path, module: cst.Module) -> None:
        super().__init__()
        self.mutants: list[Mutant] = []
        self._path = path
        self._module = module
        self._scopes: list[str] = []
        #: The outermost function around the node, and the first line of the innermost statement.
        self._function: cst.FunctionDef | None = None
        self._statement = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Decorator | cst.Annotation | cst.Parameters | cst.Raise | cst.FormattedString):
            return False
        if isinstance(node, cst.Call) and _called(node) in _TELLING:
            return False
        if isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "name":
            return False
        if isinstance(node, cst.SimpleStatementLine) and _is_text(node.body[0]):
            return False
        if isinstance(node, cst.BaseStatement | cst.SimpleStatementLine):
            self._statement = self._line(node)
        if self._function is not None:
            self._change(node)
        elif isinstance(node, cst.FunctionDef):
            self._function = node
            self._scopes.append(node.name.value)
        elif isinstance(node, cst.ClassDef):
            self._scopes.append(node.name.value)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if original_node is self._function:
            self._function = None
            self._scopes.pop()
        elif isinstance(original_node, cst.ClassDef) and self._function is None:
            self._scopes.pop()

    def _change(self, node: cst.CSTNode) -> None:
        function = self._function
        assert function is not None
        first_line = self._line(function.decorators[0] if function.decorators else function)
        line = self._line(node)
        for changed in _changes(node):
            self.mutants.append(
                Mutant(
                    self._path,
                    line,
                    range(self._statement, line + 1),
                    first_line,
                    ".".join(self._scopes),
                    self._module.code_for_node(node),
                    self._module.code_for_node(changed),
                    self._module,
                    node,
                    changed,
                )
            )

    def _line(self, node: cst.CSTNode) -> int:
        position: CodeRange = self.get_metadata(PositionProvider, node)
        return position.start.line


def _changes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    # Of a text one other text is enough.
    most = 1 if isinstance(node, cst.SimpleString) else None
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            yield from (changed for changed in islice(operator(node), most) if not _changes_nothing(node, changed))


def _called(call: cst.Call) -> str:
    function = call.func
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def _is_text(statement: cst.BaseSmallStatement) -> bool:
    return isinstance(statement, cst.Expr) and isinstance(statement.value, cst.SimpleString | cst.ConcatenatedString)


def _changes_nothing(call: cst.CSTNode, changed: cst.CSTNode) -> bool:
    """Whether the change of a call is of an op's name, or from False to None, which are of the same truth."""
    if not isinstance(call, cst.Call) or not isinstance(changed, cst.Call):
        return False
    if _named(call) != _named(changed):
        return True
    if len(call.args) != len(changed.args):
        return False
    pairs = zip(call.args, changed.args, strict=True)
    return any(_name(old.value) == "False" and _name(new.value) == "None" for old, new in pairs)


def _named(call: cst.Call) -> list[str]:
    module = cst.Module([])
    return [
        module.code_for_node(arg.value) for arg in call.args if arg.keyword is not None and arg.keyword.value == "name"
    ]


def _name(expression: cst.BaseExpression) -> str:
    return expression.value if isinstance(expression, cst.Name) else ""


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
