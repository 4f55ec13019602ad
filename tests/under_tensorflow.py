"""A pytest plugin for every process that runs tests: it sets TensorFlow up, and has fixtures that several tests use."""

import gc
from collections.abc import Iterator

import pytest
import tensorflow as tf

# Python looks for garbage whenever some hundred objects were made, among all that TensorFlow and Keras made when they
# were imported. In the tests, which trace many functions, that takes about a twentieth of the time.
gc.set_threshold(100_000, 20, 50)


def pytest_collection_finish() -> None:
    # What is there before the first test stays.
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    set_up(v1_behavior=config.getoption("--v1-behavior"))


def set_up(*, v1_behavior: bool) -> None:
    """Give this process two logical CPUs, exact products on GPUs, and TensorFlow 1's behaviour if it is asked for."""
    # Tests with two replicas need two logical devices. They must be configured before TensorFlow initializes devices.
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    # On GPUs, TensorFlow would round what products of float32 matrices take; the tests compare with exact ones.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if v1_behavior:
        tf.compat.v1.disable_v2_behavior()


@pytest.fixture
def session() -> Iterator[tf.compat.v1.Session]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session


def mirrored() -> tf.distribute.MirroredStrategy:
    """Return a strategy of two replicas, one on each logical CPU."""
    # The default, collective ops, fails when one process makes a second strategy.
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=tf.distribute.ReductionToOneDevice())


@pytest.fixture
def two_replicas() -> tf.distribute.MirroredStrategy:
    return mirrored()


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.MirroredStrategy:
    """Return the strategy of two replicas that all tests of a file share, as the hosts that they build once do."""
    return mirrored()


@pytest.fixture
def control_flow_v1() -> Iterator[None]:
    was_v2 = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    yield
    if was_v2:
        tf.compat.v1.enable_control_flow_v2()


@pytest.fixture
def no_graph_rewrite_after() -> Iterator[None]:
    """Turn TensorFlow's mixed precision graph rewrite off after the test.

    The rewrite is a setting of the process, and Keras refuses to set a dtype policy while it is on.
    """
    yield
    tf.compat.v1.mixed_precision.disable_mixed_precision_graph_rewrite()


@pytest.fixture
def same_rounding() -> Iterator[None]:
    """Keep TensorFlow from rewriting graphs in ways that round differently.

    It rewrites what only one op reads. In the first call of a recomputed block the gradients read no intermediate
    results, so it rewrites more there: it computes a layer together with its activation ("remapping"), and multiplies
    the constants of an activation and of Dropout with each other ("arithmetic_optimization").
    """
    rewritings = ("remapping", "arithmetic_optimization")
    tf.config.optimizer.set_experimental_options(dict.fromkeys(rewritings, False))
    yield
    tf.config.optimizer.set_experimental_options(dict.fromkeys(rewritings, True))
