"""Finds imports and names whose absence the script handles itself."""

import re

import libcst as cst

from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.script import Script

_ERRORS = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
# Matches a condition that checks for a name or for a version, but not `FLAGS.version_2_with_negative`.
_LOOKS = re.compile(r"hasattr\(|\bdir\(|version(__|_info)?\b", re.IGNORECASE)


def is_guarded(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether an import is in the body of a `try` whose `except` catches a failed import.

    Args:
        script: The parsed script.
        node: The import.

    Example:
        >>> script = Script('''try:
        ...     import a
        ... except ImportError:
        ...     import b
        ... ''')
        >>> [is_guarded(script, imported.node) for imported in script.imports]
        [True, False]
    """
    below = node
    for above in script.ancestors(node):
        if isinstance(above, cst.FunctionDef):
            return False
        if isinstance(above, cst.Try) and above.body is below and any(map(_catches_imports, above.handlers)):
            return True
        below = above
    return False


def is_checked_for(script: Script, node: cst.CSTNode) -> bool:
    """Tell whether a name is used only under a condition that checks for the name or for a version.

    Args:
        script: The parsed script.
        node: The name.

    Example:
        >>> script = Script('''import tensorflow as tf
        ... if tf.__version__.startswith("1"):
        ...     tf.contrib.layers
        ... ''')
        >>> [is_checked_for(script, use.node) for use in script.uses]
        [True, True]
    """
    conditions = (above.test for above in script.ancestors(node) if isinstance(above, cst.If | cst.IfExp))
    return any(_LOOKS.search(script.code(test)) for test in conditions)


def _catches_imports(handler: cst.ExceptHandler) -> bool:
    types = handler.type.elements if isinstance(handler.type, cst.Tuple) else [handler.type]
    names = [dotted(one.value if isinstance(one, cst.BaseElement) else one) for one in types]
    return handler.type is None or any(name in _ERRORS for name in names)
