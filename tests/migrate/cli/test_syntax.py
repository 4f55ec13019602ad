"""Why a text is not Python 3."""

import sys

import pytest

from tfmp.migrate.cli import syntax

_CANNOT_PARSE = rf"^Python {sys.version_info[0]}\.{sys.version_info[1]} cannot parse it: "
_KEYWORD = r"^async and await are keywords since Python 3\.7: "


@pytest.mark.parametrize(
    "text",
    [
        "print 'step', step\n",
        "print step\n",
        "exec 'x = 1'\n",
        "try:\n  pass\nexcept ValueError, error:\n  raise\n",
        "raise ValueError, 'no'\n",
        "mode = 0755\n",
        "big = 10L\n",
        "if a <> b: pass\n",
        "text = `a`\n",
        "text = ur'a'\n",
        "def f(a, (b, c)): pass\n",
    ],
)
def test_python_2_is_called_by_its_name(text: str) -> None:
    with pytest.raises(syntax.NotPythonError, match=r"^Python 2: run 2to3 or futurize first$") as raised:
        syntax.check(f"x = 1\n{text}")
    assert raised.value.line == (4 if "except" in text else 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", _CANNOT_PARSE),
        ("printer = [(1, 2]\n", _CANNOT_PARSE),
        ("del x = 0.001\n", _CANNOT_PARSE),
        ("if 1:\n\tx = 1\n        y = 2\n", "^tabs and spaces are mixed in its indentation, which Python 3 refuses"),
        ("async = True\n", _KEYWORD),
        ("queue.async(f)\n", _KEYWORD),
        ("f(x, async=True)\n", _KEYWORD),
        ("from asyncio import async\n", _KEYWORD),
        ("await = 1\n", _KEYWORD),
        ("async def f(:\n    await g()\n", _CANNOT_PARSE),
        ("x = f()" + ".g()" * 20_000, "^its expressions are nested too deep to be read$"),
    ],
)
def test_other_faults_are_told_apart_from_python_2(text: str, message: str) -> None:
    with pytest.raises(syntax.NotPythonError, match=message):
        syntax.check(text)


def test_odd_escapes_are_the_scripts_own_matter() -> None:
    syntax.check("pattern = '\\d'\n")
