"""Models of keras-hub train in float16 as in float32, and a step that overflows changes nothing."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_hub_models import (
    MARKS,
    MODELS,
    SCALE,
    STEPS,
    adam,
    batches,
    compiled,
    difference,
    losses_in_float32,
    make,
    prepare,
    scaled,
    train,
)

import tfmp

pytestmark = MARKS

_all_models = pytest.mark.parametrize("model", MODELS)

#: Where the check keeps other layers than need be. The head adds its bias, a variable, to a tensor. In eager code, in
#: which the check runs, Keras casts the variable only in the left operand.
_KEPT_BY_THE_CHECK = {"BertMaskedLM": ["mlm_head"]}

#: The bound of what trains as the check says, if it is another one. Over four seeds, it differed by 3e-5 to 1e-2.
_TOLERANCE_WHERE_KEPT = {"BertMaskedLM": 3e-2}

#: What computes products of matrices, and convolutions.
_PRODUCTS = {"MatMul", "BatchMatMulV2", "Einsum", "Conv2D"}


@cache
def _losses(model: str, level: str) -> list[float]:
    trained = compiled(model, scaled(adam(model)), level)
    losses = train(trained, model, STEPS)
    assert int(trained.optimizer.applied_steps) == STEPS
    return losses


@_all_models
@pytest.mark.feature("float32's curve")
def test_losses_are_those_of_float32(model: str) -> None:
    assert difference(_losses(model, "O2"), losses_in_float32(model)) < MODELS[model].tolerance


@_all_models
@pytest.mark.feature("Keras' wrapper")
def test_losses_are_those_of_keras_own_wrapper(model: str) -> None:
    theirs = compiled(model, keras.optimizers.LossScaleOptimizer(adam(model), initial_scale=SCALE))
    assert difference(_losses(model, "O2"), train(theirs, model, STEPS)) < 1e-6


@_all_models
@pytest.mark.feature("O1, O2")
def test_level_decides_what_is_computed_in_half_precision(model: str) -> None:
    for level in ("O1", "O2"):
        trained = compiled(model, scaled(adam(model)), level)
        types = _types_of_products(trained, batches(model)[0][0])
        assert tf.float16 in types.values()
        wide = [name for name, dtype in types.items() if dtype != tf.float16]
        assert [name for name in wide if not re.search(MODELS[model].multiplies_float32, name)] == []
    assert difference(_losses(model, "O1"), losses_in_float32(model)) < MODELS[model].tolerance
    for level in ("O1", "O2"):
        assert np.mean(_losses(model, level)[-4:]) < np.mean(_losses(model, level)[:4])


def _types_of_products(model: Any, x: Any) -> dict[str, tf.DType]:
    graph = tf.function(lambda x: model(x, training=True)).get_concrete_function(x).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return {node.name: tf.as_dtype(node.attr["T"].type) for node in nodes if node.op in _PRODUCTS}


@_all_models
@pytest.mark.feature("check")
def test_check_finds_what_trains(model: str) -> None:
    trained = make(model)
    report = tfmp.check_precision(trained, MODELS[model].loss, batches(model)[:2], progress=False)
    assert report.far_off == []
    if model in _KEPT_BY_THE_CHECK:
        assert report.keep_float32 == _KEPT_BY_THE_CHECK[model]
    else:
        assert bool(report.keep_float32) == bool(MODELS[model].keep_float32)
    assert report.float16_loss == pytest.approx(report.loss, rel=1e-3)
    manager = tfmp.ExponentialUpdateLossScaleManager(report.suggested_loss_scale, 2000)
    prepare(trained, model, tfmp.LossScaleOptimizer(adam(model), manager), "O0")
    tfmp.set_precision(trained, "O2", keep_float32=report.keep_float32)
    losses = train(trained, model, STEPS)
    assert int(trained.optimizer.skipped_steps) == 0
    tolerance = _TOLERANCE_WHERE_KEPT.get(model, MODELS[model].tolerance)
    assert difference(losses, losses_in_float32(model)) < tolerance


@_all_models
@pytest.mark.feature("overflow")
def test_overflow_changes_the_scale_alone(model: str) -> None:
    trained = compiled(model, scaled(adam(model, use_ema=True)), dropout=0.1)
    opt = trained.optimizer
    x, y = batches(model)[0]
    good, bad = np.ones(y.shape, np.float32), np.ones(y.shape, np.float32)
    bad[2] = np.inf

    def values() -> list[np.ndarray]:
        variables: Sequence[Any] = [*trained.trainable_variables, *opt.inner_optimizer.variables]
        return [variable.numpy() for variable in variables]

    trained.train_on_batch(x, y, sample_weight=good)
    before = values()
    trained.train_on_batch(x, y, sample_weight=bad)
    for found, expected in zip(values(), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert (int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)) == (1, 1, SCALE / 2)
    trained.train_on_batch(x, y, sample_weight=good)
    assert int(opt.iterations) == int(opt.applied_steps) == 2
    assert all(np.isfinite(value).all() for value in values())
    assert not np.array_equal(values()[0], before[0])
