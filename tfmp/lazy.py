"""Public names of a package that are imported on their first use; the package's stub lists them.

The stub is `__init__.pyi` beside `__init__.py`, as SPEC 1 of Scientific Python proposes. Type checkers and editors read
it too, so each name is said once.
"""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfmp.environment import require_tensorflow


def names_of_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, as its stub says.

    A line `from tfmp.a.b import Name as Name` of the stub of `tfmp.a` makes a public name; it needs TensorFlow. A line
    `from tfmp.a import b as b` makes a module an attribute, without an `import tfmp.a.b`; `__all__` leaves it out.

    Args:
        package: The package's `__name__`.
        file: Its `__file__`.
    """
    lines = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
    module_of = {
        alias.name: str(line.module) for line in lines if isinstance(line, ast.ImportFrom) for alias in line.names
    }

    def __getattr__(name: str) -> Any:  # noqa: ANN401, N807 - the package's own function; an attribute may be anything
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}.")
        if module_of[name] == package:
            return importlib.import_module(f"{package}.{name}")
        require_tensorflow()
        return getattr(importlib.import_module(module_of[name]), name)

    public = [name for name in module_of if module_of[name] != package]
    # A package may add names of its own to `__all__`.
    return __getattr__, lambda: sorted({*module_of, *public}), public
