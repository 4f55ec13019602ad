"""Which bindings a name may refer to."""

import pytest

from tfmp.migrate.analysis.scopes import Scopes
from tfmp.migrate.analysis.tree import Tree


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = 1\na = 2\na\n", [1, 2]),
        ("a = 1\na\na = 2\n", [1]),
        ("import a.b\nimport c as a\na\n", [1, 2]),
        ("from . import a\na\n", [1]),
        ("a = 1\ndef f():\n    a\na = 2\n", [1, 4]),
        ("a = 1\ndef f():\n    a\n    a = 2\n", [1]),
        ("a = 1\ndef f(b=a, a=2): pass\n", [1]),
        ("a = 1\nf = lambda a: a\n", [2]),
        ("a = 1\nclass A:\n    a = 2\n    def f(self):\n        a\n", [1]),
        ("a = 1\nclass A:\n    a = 2\n    a\n", [3]),
        ("a = 1\nclass a(a): pass\n", [1]),
        ("a = 1\n[b for b in a for a in b]\n", [1]),
        ("a = 1\n[a for a in b]\n", [2]),
        ("[(a := c) for b in c]\na\n", [1]),
        ("def f():\n    global a\n    a = 1\ndef g():\n    a\n", [3]),
        ("def f():\n    a = 1\n    def g():\n        nonlocal a\n        a = 2\n        return a\n", [2, 5]),
        ("for a, b in c:\n    a\n", [1]),
        ("with c as (a, b):\n    a\n", [1]),
        ("try: pass\nexcept E as a:\n    a\n", [2]),
        ("match b:\n    case [a, *_]:\n        a\n", [2]),
        ("def a(): pass\na()\n", [1]),
        ("b.a = 1\nb[a] = 2\n", []),
    ],
)
def test_a_name_refers_to_the_innermost_scope_that_binds_it(text: str, lines: list[int]) -> None:
    tree = Tree(text)
    scopes = Scopes(tree)
    *_, name = (each for each in scopes.words["a"] if scopes.is_read(each))
    assert [tree.line(each.node) for each in scopes.bindings(name)] == lines


def test_all_names_that_nothing_binds_are_found() -> None:
    text = "from b import *\nx: A = len(c)\n[d for d in e if d]\ndef f(g, *h, i=j) -> k: return g, h, l\n__name__\n"
    assert sorted(name.value for name in Scopes(Tree(text)).unbound()) == ["A", "c", "e", "j", "k", "l"]
