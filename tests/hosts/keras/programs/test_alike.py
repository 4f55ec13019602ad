"""Which variables a program updates, and which others can take their places."""

from types import ModuleType

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, variable

import tfmp
from tfmp.hosts.keras.programs.alike import StateOfVariables, can_share_programs, in_lists
from tfmp.hosts.keras.views import of_tensorflow

pytestmark = pytest.mark.essential


@for_every_keras()
def test_only_known_classes_of_keras_share_programs(keras: ModuleType) -> None:
    class Own(keras.optimizers.SGD):
        pass

    assert can_share_programs(optimizer(keras, "Adam"), [])
    assert not can_share_programs(optimizer(keras, "Nadam"), [])
    assert not can_share_programs(Own(), [])


@for_every_keras()
@pytest.mark.parametrize("count", [2, 3])
def test_slots_are_told_from_the_variables_that_all_use(keras: ModuleType, count: int) -> None:
    # SGD without momentum has no slots in Keras 3, but two variables of its own: as many as there are weights, for 2.
    of_sgd = 0 if keras.__version__.startswith("3.") else 1
    for opt, num_slots in [(optimizer(keras, "SGD"), of_sgd), (optimizer(keras, "Adam", amsgrad=True), 3)]:
        variables = [variable(keras, np.ones([3]), f"w{place}") for place in range(count)]
        opt.build(variables)
        state = StateOfVariables(opt)
        assert [len(state.of(each)) for each in variables] == [1 + num_slots] * count
        assert all(state.of(each)[0] is of_tensorflow(each) for each in variables)
        assert {tuple(each.shape) for each in state.of_all} == {()}


@for_every_keras("keras3")
def test_half_precision_slots_are_found_in_their_views(keras: ModuleType) -> None:
    half, weight = tfmp.half_state(optimizer(keras, "Adam")), variable(keras, np.ones([3]))
    half.build([weight])
    assert [each.dtype for each in StateOfVariables(half).of(weight)] == [tf.float32, tf.bfloat16, tf.bfloat16]


@pytest.mark.parametrize(
    ("count", "size", "lengths"),
    [(1, 1, [1]), (3, 1, [1, 1, 1]), (4, 1, [2, 2]), (17, 1, [4, 4, 4, 4, 1]), (4, 2**18, [1] * 4), (4, 0, [2, 2])],
)
def test_length_of_lists_is_about_the_root_of_the_number_of_variables(
    count: int, size: int, lengths: list[int]
) -> None:
    assert [len(places) for places in in_lists(["w"] * count, [size] * count)] == lengths
