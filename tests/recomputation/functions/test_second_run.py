import pytest
import tensorflow as tf

from tfmp.recomputation.functions.second_run import VariablesOfFirstRun, collections_unchanged, no_new_variables

tf1 = tf.compat.v1
pytestmark = pytest.mark.graph


def test_second_run_gets_the_variables_of_the_first_in_their_order(session: tf1.Session) -> None:
    first = VariablesOfFirstRun("block")
    with first.noted():
        made = [tf1.get_variable(name, [2]) for name in "ab"]
    with first.replayed():
        assert [tf1.get_variable(name, [2]) for name in "ab"] == made


def test_second_run_is_in_the_scope_of_the_first(session: tf1.Session) -> None:
    with tf1.variable_scope("outer"):
        first = VariablesOfFirstRun("block")
    with first.replayed():
        assert tf1.get_variable_scope().name == "outer"
    assert tf1.get_variable_scope().name == ""


@pytest.mark.parametrize(("name", "shape"), [("b", [2]), ("a", [3])])
def test_other_request_is_refused(session: tf1.Session, name: str, shape: list[int]) -> None:
    first = VariablesOfFirstRun("block")
    with first.noted():
        tf1.get_variable("a", [2])
    with first.replayed(), pytest.raises(ValueError, match=r"block makes variables .* where it asked for 'a' of shape"):
        tf1.get_variable(name, shape)


def test_one_request_too_many_is_refused(session: tf1.Session) -> None:
    first = VariablesOfFirstRun("block")
    with first.replayed(), pytest.raises(ValueError, match=r"where it asked for none at first"):
        tf1.get_variable("a", [2])


def test_new_variable_is_refused(session: tf1.Session) -> None:
    with no_new_variables("block"), pytest.raises(ValueError, match=r"block makes variables .* \(name='v'\)"):
        tf1.Variable(1.0, name="v")


def test_collections_are_put_back(session: tf1.Session) -> None:
    tf1.add_to_collection("losses", 1)
    with collections_unchanged():
        tf1.add_to_collection("losses", 2)
        tf1.add_to_collection("new", 3)
    assert (tf1.get_collection("losses"), tf1.get_collection("new")) == ([1], [])
