"""Recomputation, accumulation, loss scaling and precision leave each other alone, in every combination and order."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

if not keras.__version__.startswith("3."):
    pytest.skip(f"needs Keras 3, this is Keras {keras.__version__}", allow_module_level=True)

from keras_blocks import Wrap, data, dense_block, largest_difference, model, plain, stateful_block

import tfmp

_SCALE = 128.0
_BATCH = 12

#: When the blocks are wrapped: never, before the model is made of them, or in a model that has its optimizer.
_RECOMPUTATIONS = ("none", "Recompute", "recompute_layers")
_SCALINGS = ("none", "LossScaleOptimizer", "GradScaler")
_LEVELS = ("O0", "O2", "O1-bfloat16")
#: How far rounding may move a weight. Without AVX-512, CPUs round products of bfloat16 toward zero.
_ROUNDING = {"O0": 1e-5, "O2": 1e-2, "O1-bfloat16": 3e-2}


@pytest.mark.parametrize("level", _LEVELS)
def test_every_combination_trains_the_weights_of_the_plain_model(level: str) -> None:
    # Recomputation stands here once for each: that it changes nothing at all, wherever it is, is the next test.
    with tfmp.precision(level):
        expected = _trained("none", "none", 1, dense_block)
        for recomputation, scaling, micro_batches in [
            *itertools.product(["none"], _SCALINGS, (1, 2)),
            *(("recompute_layers", scaling, 2) for scaling in _SCALINGS),
        ]:
            got = _trained(recomputation, scaling, micro_batches, dense_block)
            # Sums over two micro-batches and scaled gradients are rounded in another way.
            assert largest_difference(expected, got) <= _ROUNDING[level]


@pytest.mark.parametrize("level", _LEVELS)
@pytest.mark.parametrize(("micro_batches", "scaling"), [*((2, scaling) for scaling in _SCALINGS), (1, _SCALINGS[1])])
def test_recomputation_changes_no_combination(micro_batches: int, scaling: str, level: str) -> None:
    """Neither do random numbers and statistics change, which those of other combinations cannot be compared with."""
    with tfmp.precision(level):
        expected, *recomputing = (_trained(each, scaling, micro_batches, stateful_block) for each in _RECOMPUTATIONS)
    assert [largest_difference(expected, each) for each in recomputing] == [0, 0]


def _trained(recomputation: str, scaling: str, micro_batches: int, block: Callable[[str], Any]) -> keras.Model:
    """Return a model that was trained for two steps of eager code."""
    wrap: Wrap = tfmp.Recompute if recomputation == "Recompute" else plain
    net = model(wrap, block)
    opt: Any = keras.optimizers.SGD(0.05, momentum=0.9)
    if scaling == "LossScaleOptimizer":
        opt = tfmp.LossScaleOptimizer(opt, tfmp.FixedLossScaleManager(_SCALE), accumulation_steps=micro_batches)
    net.compile(opt, "mse", run_eagerly=True, jit_compile=False, auto_scale_loss=False)
    if recomputation == "recompute_layers":
        net = tfmp.recompute_layers(net, "one", "two")
    micro_batch = _of_compiled(net) if scaling == "LossScaleOptimizer" else _by_hand(net, scaling, micro_batches)
    x, y = data()
    for rows in np.split(np.arange(len(x)), len(x) // _BATCH * micro_batches):
        micro_batch(x[rows], y[rows])
    return net


def _of_compiled(net: keras.Model) -> Callable[[np.ndarray, np.ndarray], object]:
    return net.train_on_batch


def _by_hand(net: keras.Model, scaling: str, micro_batches: int) -> Callable[[np.ndarray, np.ndarray], None]:
    """Return a hand-written step of a micro-batch."""
    opt = net.optimizer
    opt.build(net.trainable_variables)
    weights = [variable.value for variable in net.trainable_variables]
    scaler = tfmp.GradScaler(_SCALE, enabled=scaling == "GradScaler")
    accumulator = tfmp.GradientAccumulator(weights, micro_batches)

    def step(x: np.ndarray, y: np.ndarray) -> None:
        with tf.GradientTape() as tape:
            loss = scaler.scale(tf.reduce_mean((net(x, training=True) - y) ** 2))
        accumulator.add(tape.gradient(loss, weights), scaler.loss_scale)
        if accumulator.is_full:
            grads = scaler.unscale(opt, accumulator)
            scaler.step(opt, zip(grads, net.trainable_variables, strict=True))
            scaler.update()

    return step
