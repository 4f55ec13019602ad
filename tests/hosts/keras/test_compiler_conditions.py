"""When an update is compiled: where it can be, and where that saves time."""

import pytest
import tensorflow as tf

from tfmp.hosts.keras.compiler import can_be_own_program, saves_time

pytestmark = pytest.mark.essential


def test_update_is_not_compiled_under_xla_or_by_replicas(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    seen: list[bool] = []
    tf.function(lambda: two_replicas.run(lambda: seen.append(can_be_own_program())))()
    tf.function(lambda: seen.append(can_be_own_program()), jit_compile=True)()
    assert seen == [False] * 3
    tf.function(lambda: seen.append(can_be_own_program()))()
    assert seen[-1]
    assert can_be_own_program()


@pytest.mark.parametrize(
    ("shapes", "worth"),
    [([[2**20]], True), ([[2**20 - 1]], False), ([[2**14]] * 65, True), ([[2**13]] * 200, False), ([], False)],
)
def test_update_is_worth_compiling_for_many_values_in_large_variables(shapes: list[list[int]], worth: bool) -> None:
    assert saves_time([tf.Variable(tf.zeros(shape)) for shape in shapes], len(shapes)) is worth


@pytest.mark.parametrize(("num_compiled", "worth"), [(8, True), (9, False)])
def test_update_is_worth_compiling_if_many_variables_share_programs(num_compiled: int, worth: bool) -> None:
    assert saves_time([tf.Variable(0.0) for _ in range(64)], num_compiled) is worth


def test_variables_on_several_devices_are_not_compiled(two_replicas: tf.distribute.MirroredStrategy) -> None:
    variables = []
    for device in two_replicas.extended.worker_devices:
        with tf.device(device):
            variables.append(tf.Variable(tf.zeros([2**20])))
    assert not saves_time(variables, 2)
    assert saves_time(variables[:1], 1)
