"""R17: names that later versions of Python, NumPy and SciPy have removed, which scripts of TensorFlow 1 still use."""

import collections.abc
import re
from collections.abc import Iterator, Mapping

import libcst as cst

from tfmp.migrate.analysis.expressions import Use, dotted, without_last_words
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import TfVersion, detect_version, is_checked_for, is_expected
from tfmp.migrate.edits.results import Edit, MovedNames, NeededImport, Result, at_first_lines
from tfmp.migrate.tables import starts

RULE = "R17"
# NumPy 2 has these names again, with another meaning.
_AGAIN = frozenset(("numpy.bool", "numpy.long"))
_SUCCESSORS: Mapping[str, str] = {
    **{f"numpy.{name}": name for name in ("bool", "int", "float", "complex", "object", "str")},
    **{"numpy.long": "int", "numpy.unicode": "str", "numpy.float_": "numpy.float64"},
    **{"numpy.complex_": "numpy.complex128", "numpy.unicode_": "numpy.str_", "numpy.string_": "numpy.bytes_"},
    **{"numpy.bool8": "numpy.bool_", "numpy.int0": "numpy.intp", "numpy.uint0": "numpy.uintp"},
    **dict.fromkeys(("numpy.Inf", "numpy.Infinity", "numpy.infty", "numpy.PINF"), "numpy.inf"),
    **dict.fromkeys(("numpy.NaN", "numpy.NAN"), "numpy.nan"),
    **{"numpy.product": "numpy.prod", "numpy.cumproduct": "numpy.cumprod", "numpy.round_": "numpy.round"},
    **{"numpy.sometrue": "numpy.any", "numpy.alltrue": "numpy.all", "numpy.mat": "numpy.asmatrix"},
    **{f"collections.{name}": f"collections.abc.{name}" for name in collections.abc.__all__},
    **{"time.clock": "time.perf_counter", "fractions.gcd": "math.gcd"},
    **{"base64.encodestring": "base64.encodebytes", "base64.decodestring": "base64.decodebytes"},
}
_IMAGES = "write imageio.v2.imread, imageio.v2.imwrite, and Pillow's Image.fromarray(array).resize((width, height))"
_ADVICE: Mapping[str, str] = {
    "numpy.asscalar": "write array.item()",
    "numpy.asfarray": "write numpy.asarray(values, dtype=float)",
    "numpy.msort": "write numpy.sort(values, axis=0)",
    "numpy.rank": "write numpy.ndim(values)",
    "numpy.in1d": "write numpy.isin(values, others)",
    "numpy.trapz": "write scipy.integrate.trapezoid",
    "numpy.NINF": "write -numpy.inf",
    "numpy.find_common_type": "write numpy.result_type",
    "inspect.getargspec": "write inspect.getfullargspec, which returns more fields",
    "cgi.escape": "write html.escape(text, quote=False)",
    "platform.linux_distribution": "the package distro has it",
    **dict.fromkeys([f"scipy.misc.{name}" for name in ("imread", "imresize", "imsave", "toimage")], _IMAGES),
}
_MODULES = sorted({name.partition(".")[0] for name in (*_SUCCESSORS, *_ADVICE)})
_MENTION = re.compile(rf"\b(np|{'|'.join(_MODULES)})(\.misc)?(\.(\w+)|[ \t]+import\b)")
_LAST_WORDS = frozenset(name.rpartition(".")[2] for name in (*_SUCCESSORS, *_ADVICE))


def is_mentioned_in(text: str) -> bool:
    r"""Tell whether a script may use a removed name.

    Examples:
        >>> is_mentioned_in("x = np.float(1)"), is_mentioned_in("x = np.float32(1)")
        (True, False)
        >>> is_mentioned_in("from collections import Sequence"), is_mentioned_in("import time\nimport os")
        (True, False)
    """
    return any(found[4] is None or found[4] in _LAST_WORDS for found in _MENTION.finditer(text))


def rewrite(script: Script) -> Iterator[Result]:
    """Write the names that do the same in their place, and report the names that have no such successor."""
    places: list[tuple[str, int]] = []
    # Some scripts define a name again: `np.float = float`.
    own = {use.name for use in script.uses if isinstance(script.parent(use.node), cst.AssignTarget)}
    for use in script.uses:
        name = next((part for part in starts(use.name) if _is_removed(script, part)), "")
        if name not in ("", use.root, *own) and not is_checked_for(script, use.node):
            found = list(_replaced(script, use, name))
            yield from found
            places += [] if found or is_expected(script, use.node) else [(_message(name), script.line(use.node))]
    for one in script.imports:
        if _is_removed(script, one.name) and not is_expected(script, one.node):
            module, _, word = _SUCCESSORS.get(one.name, "").rpartition(".")
            if module and isinstance(one.node, cst.ImportFrom):
                yield MovedNames(RULE, one.node, {one.name.rpartition(".")[2]: (module, word)})
            else:
                places.append((_message(one.name), script.line(one.node)))
    yield from at_first_lines(RULE, places)


def _is_removed(script: Script, name: str) -> bool:
    is_new = name in _AGAIN and script.cached(detect_version).version in (TfVersion.V2, TfVersion.MIXED)
    return (name in _SUCCESSORS or name in _ADVICE) and not is_new


def _replaced(script: Script, use: Use, name: str) -> Iterator[Result]:
    """Yield the edit that replaces a use; nothing without a successor, or if the script has a name like it."""
    node = without_last_words(use.node, use.name.count(".") - name.count("."))
    module, _, word = _SUCCESSORS.get(name, "").rpartition(".")
    if module == name.rpartition(".")[0]:
        yield Edit(RULE, *script.span(node), f"{dotted(node).rpartition('.')[0]}.{word}")
    elif module:
        yield NeededImport(RULE, module)
        yield Edit(RULE, *script.span(node), f"{module}.{word}")
    elif word and not script.scopes.bound(word):
        yield Edit(RULE, *script.span(node), word)


def _message(name: str) -> str:
    package = {"numpy": "NumPy", "scipy": "SciPy"}.get(name.partition(".")[0], "Python")
    return f"{name} was removed from {package}: {_ADVICE.get(name) or f'write {_SUCCESSORS[name]}'}."
