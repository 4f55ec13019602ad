"""The pytest plugin of every process that runs tests: two logical devices, sessions, replicas."""

from collections.abc import Iterator

import pytest
import tensorflow as tf


def pytest_configure(config: pytest.Config) -> None:
    # For the tests with two replicas; it must be set before TensorFlow starts.
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    if config.getoption("--v1-behavior"):
        tf.compat.v1.disable_v2_behavior()


@pytest.fixture
def session() -> Iterator[tf.compat.v1.Session]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session


@pytest.fixture
def two_replicas() -> tf.distribute.MirroredStrategy:
    # The default collectives clash when one process makes a second strategy.
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())


@pytest.fixture
def no_graph_rewrite_after() -> Iterator[None]:
    """Turn TensorFlow's graph rewrite off again, a setting of the process that Keras refuses beside its policies."""
    yield
    tf.compat.v1.mixed_precision.disable_mixed_precision_graph_rewrite()
