"""The positions of a script's nodes."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.tree import Tree, once_per_argument


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_positions_are_characters_of_the_text(newline: str) -> None:
    tree = Tree(newline.join(["import tensorflow as tf", "", "x = tf.nn.relu(y)", ""]))
    *_, node = tree.nodes(cst.Attribute)
    assert tree.line(node) == 3
    (call,) = tree.nodes(cst.Call)
    assert tree.text[slice(*tree.span(call.func))] == tree.code(call.func) == "tf.nn.relu"
    assert tree.text[tree.start_of_line(node) :].startswith("x = tf")
    assert tree.end_of_line(node) == len(tree.text)


def test_nodes_are_in_the_order_of_the_text() -> None:
    tree = Tree("@a(b)\ndef f(c=d(e), *g): return h(i=j) if k(l) else m(n)\n")
    assert [tree.code(call.func) for call in tree.nodes(cst.Call)] == ["a", "d", "h", "k", "m"]
    assert "".join(tree.code(name) for name in tree.nodes(cst.Name)) == "abfcdeghijklmn"


def test_a_result_is_remembered_for_each_argument_of_each_object() -> None:
    class Counter:
        def __init__(self) -> None:
            self.asked: list[int] = []

        @once_per_argument
        def double(self, number: int) -> int:
            self.asked.append(number)
            return 2 * number

    one, other = Counter(), Counter()
    assert [one.double(1), one.double(2), one.double(1), other.double(1)] == [2, 4, 2, 2]
    assert (one.asked, other.asked) == ([1, 2], [1])
