"""When an update is compiled: where it can be, and where that saves time."""

import pytest
import tensorflow as tf

from tfmp.hosts.keras.conditions import can_be_compiled, worth_compiling

pytestmark = pytest.mark.essential


def test_update_is_not_compiled_under_xla_or_by_replicas(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    seen: list[bool] = []
    tf.function(lambda: two_replicas.run(lambda: seen.append(can_be_compiled())))()
    tf.function(lambda: seen.append(can_be_compiled()), jit_compile=True)()
    assert seen == [False] * 3
    tf.function(lambda: seen.append(can_be_compiled()))()
    assert seen[-1]
    assert can_be_compiled()


@pytest.mark.parametrize(
    ("shapes", "worth"),
    [([[2**20]], True), ([[2**20 - 1]], False), ([[2**14]] * 65, True), ([[2**13]] * 200, False), ([], False)],
)
def test_update_is_worth_compiling_for_many_values_in_large_variables(shapes: list[list[int]], worth: bool) -> None:
    assert worth_compiling([tf.Variable(tf.zeros(shape)) for shape in shapes]) is worth


def test_variables_on_several_devices_are_not_compiled(two_replicas: tf.distribute.MirroredStrategy) -> None:
    variables = []
    for device in two_replicas.extended.worker_devices:
        with tf.device(device):
            variables.append(tf.Variable(tf.zeros([2**20])))
    assert not worth_compiling(variables)
    assert worth_compiling(variables[:1])
