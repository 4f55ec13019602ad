import re
from collections.abc import Callable

import pytest
import tensorflow as tf

from tfmp.core.distribute.collectives import alike_on_all, in_slot, sum_together


def _doubled(calls: list[tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a sum over two replicas that have the same values, which keeps what it was called with."""

    def total(values: tf.Tensor) -> tf.Tensor:
        calls.append(values)
        return values * 2

    return total


def test_tensors_of_many_shapes_are_summed_by_one_collective() -> None:
    calls: list[tf.Tensor] = []
    parts = [tf.constant(1.0), tf.zeros([0, 2]), tf.constant([[2.0, 3.0]]), tf.constant([4.0])]
    sums = sum_together(_doubled(calls), parts)
    assert [each.numpy().tolist() for each in sums] == [2, [], [[4, 6]], [8]]
    assert [each.shape for each in sums] == [part.shape for part in parts]
    assert [each.numpy().tolist() for each in calls] == [[1, 2, 3, 4]]


def test_single_tensor_is_summed_as_it_is() -> None:
    calls: list[tf.Tensor] = []
    part = tf.constant([[1.0, 2.0]])
    assert sum_together(_doubled(calls), [part])[0].numpy().tolist() == [[2, 4]]
    assert calls[0] is part


def test_sum_of_all_slots_holds_the_values_of_each_replica() -> None:
    values = [tf.constant([1.0, 2.0]), tf.constant([float("inf"), -3.0])]
    slots = [in_slot(each, tf.constant(replica), 2) for replica, each in enumerate(values)]
    # The zeros of the other replica leave an infinity as it is: it was not multiplied by 0.
    assert tf.add_n(slots).numpy().tolist() == [[1, 2], [float("inf"), -3]]
    assert in_slot(tf.constant(5, tf.int64), 0, 3).numpy().tolist() == [5, 0, 0]


def test_replicas_are_alike_if_what_holds_on_one_holds_on_all() -> None:
    # In eager code the check raises an error or returns nothing.
    assert alike_on_all(tf.constant([[3.0, 0.0], [0.0, 0.0], [3.0, 3.0]]), 3, ["dense", "none", "sparse"]) is None


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_variables_whose_gradients_differ_between_replicas_are_named(compiled: bool) -> None:
    def check(counts: tf.Tensor) -> None:
        alike_on_all(counts, 3, ["dense", "lacking", "sparse"])

    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        (tf.function(check) if compiled else check)(tf.constant([[3.0, 0.0], [2.0, 0.0], [3.0, 1.0]]))
    assert re.search(r"\bthe workers differ in whether .* or sparse:\W", raised.value.message)
    assert "lacking" in raised.value.message
    assert "sparse" in raised.value.message.replace("None, or sparse", "")
    assert "dense" not in raised.value.message
