import copy
from typing import Any

import pytest
import tensorflow as tf

import tfmp
from tfmp.optimizers.v1 import LossScaleOptimizerV1

pytestmark = pytest.mark.graph


def _inner() -> tf.compat.v1.train.Optimizer:
    return tf.compat.v1.train.GradientDescentOptimizer(0.5)


def test_arguments_may_be_named_as_in_contrib() -> None:
    manager = tfmp.FixedLossScaleManager(8)
    opt = tfmp.LossScaleOptimizer(opt=_inner(), loss_scale_manager=manager)
    assert opt._loss_scale_manager is manager


@pytest.mark.parametrize("bad", [None, True])
def test_object_that_is_not_a_manager_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"a tfmp\.LossScaleManager, .*number.*got "):
        tfmp.LossScaleOptimizer(_inner(), bad)


def test_positional_initial_scale_and_growth_steps_are_refused() -> None:
    # In Keras 3's own wrapper these two positions are initial_scale and dynamic_growth_steps.
    with pytest.raises(TypeError, match="is_distributed must be True or False, got 2000"):
        tfmp.LossScaleOptimizer(_inner(), 2.0**15, 2000)


@pytest.mark.parametrize("bad", ["x", 1, None])
def test_word_or_number_in_place_of_a_bool_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=f"sparse_as_dense must be True or False, got {bad!r}"):
        tfmp.LossScaleOptimizer(_inner(), sparse_as_dense=bad)


def test_wrapped_optimizer_has_two_names_as_an_argument_and_one_to_read_it() -> None:
    inners: list[Any] = [_inner()]
    if tf.compat.v1.executing_eagerly_outside_functions():
        inners.append(pytest.importorskip("keras").optimizers.SGD(0.5))
    for inner in inners:
        for name in ("opt", "inner_optimizer"):
            assert tfmp.LossScaleOptimizer(**{name: inner}, loss_scale_manager="fixed").inner_optimizer is inner
        with pytest.raises(TypeError, match=r"opt and inner_optimizer are two names of one argument: give one"):
            tfmp.LossScaleOptimizer(opt=inner, inner_optimizer=inner)
        with pytest.raises(TypeError, match=r"opt and inner_optimizer are two names"):
            tfmp.LossScaleOptimizer(inner, inner_optimizer=inner)
    with pytest.raises(TypeError, match=r"opt must be a tf\.compat\.v1\.train\.Optimizer or .*, got None"):
        tfmp.LossScaleOptimizer(loss_scale_manager=8)


def test_tf1_front_end_does_not_have_the_methods_of_keras() -> None:
    opt = tfmp.LossScaleOptimizer(_inner())
    for name in ("scale_loss", "get_scaled_loss", "get_unscaled_gradients", "apply"):
        assert not hasattr(opt, name)
        with pytest.raises(AttributeError, match="are for Keras' optimizers: call minimize, or compute_gradients"):
            getattr(opt, name)
    with pytest.raises(NotImplementedError, match="LossScaleOptimizerV1 wraps no optimizer of Keras"):
        type(opt).from_config({})


@pytest.mark.parametrize("bad", [65504, tfmp.NonFiniteDetector])
def test_object_that_is_not_a_detector_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a tfmp\.OverflowDetector"):
        tfmp.LossScaleOptimizer(_inner(), tfmp.FixedLossScaleManager(8), overflow_detector=bad)


@pytest.mark.parametrize("bad", ["float32", "bfloat16", "half precision", 16, True])
def test_aggregation_dtype_other_than_float16_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match='aggregation_dtype must be "float16" or None, got '):
        tfmp.LossScaleOptimizer(_inner(), tfmp.FixedLossScaleManager(8), is_distributed=True, aggregation_dtype=bad)


def test_aggregation_dtype_is_refused_without_is_distributed() -> None:
    with pytest.raises(ValueError, match="aggregation_dtype='float16' needs is_distributed=True"):
        tfmp.LossScaleOptimizer(_inner(), tfmp.FixedLossScaleManager(8), aggregation_dtype="float16")


def test_sync_replicas_optimizer_is_refused() -> None:
    opt = tf.compat.v1.train.SyncReplicasOptimizer(_inner(), replicas_to_aggregate=1)
    with pytest.raises(TypeError, match="wrap the optimizer inside it"):
        tfmp.LossScaleOptimizer(opt, tfmp.FixedLossScaleManager(8))


def test_wrapping_twice_is_refused() -> None:
    opt = tfmp.LossScaleOptimizer(_inner(), tfmp.FixedLossScaleManager(8))
    with pytest.raises(ValueError, match="scale the loss twice"):
        tfmp.LossScaleOptimizer(opt, tfmp.FixedLossScaleManager(8))


def test_subclass_of_the_public_class_is_refused_with_advice() -> None:
    class Mine(tfmp.LossScaleOptimizer):
        pass

    with pytest.raises(TypeError, match=r"Mine subclasses .* such as tfmp\.optimizers\.LossScaleOptimizerV1"):
        Mine(_inner(), tfmp.FixedLossScaleManager(8))


def test_front_end_can_be_subclassed() -> None:
    assert tfmp.optimizers.LossScaleOptimizerV1 is LossScaleOptimizerV1

    class Mine(LossScaleOptimizerV1):
        pass

    assert type(Mine(_inner(), tfmp.FixedLossScaleManager(8))) is Mine


def test_optimizer_can_be_copied() -> None:
    opt = tfmp.LossScaleOptimizer(_inner(), tfmp.FixedLossScaleManager(8))
    assert copy.copy(opt)._opt is opt._opt
