"""Models of keras-hub train in float16 as in float32: overflows, files, replicas and callbacks."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_hub_models import (
    MARKS,
    MODELS,
    ROWS,
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


def _compiled(model: str, seed: int) -> Any:
    # No file holds the state of Dropout's random numbers, with tfmp or without.
    return compiled(model, scaled(adam(model)), seed=seed)


def _from_keras_file(model: str, directory: Path) -> Any:
    # A task's file does not say what it was compiled with, and a backbone's has one policy for all layers.
    loaded = keras.saving.load_model(directory / "model.keras", compile=False)
    prepare(loaded, model, scaled(adam(model)))
    loaded.load_weights(directory / "model.keras")
    return loaded


def _from_weights_file(model: str, directory: Path) -> Any:
    new = _compiled(model, seed=9)
    new.load_weights(directory / "model.weights.h5")
    return new


def _from_checkpoint(model: str, directory: Path) -> Any:
    new = _compiled(model, seed=9)
    path = tf.train.latest_checkpoint(directory)
    tf.train.Checkpoint(model=new, optimizer=new.optimizer).restore(path).assert_consumed()
    return new


_WAYS: dict[str, Callable[[str, Path], Any]] = {
    "keras": _from_keras_file,
    "weights": _from_weights_file,
    "checkpoint": _from_checkpoint,
}


@_all_models
@pytest.mark.feature("resume")
# Keras, of the optimizer that a task makes for itself before it is compiled.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
# TensorFlow and Keras, where T5's masks are made in float16, until its level is set again.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Layer .* looks like it has unbuilt state:UserWarning")
# Keras, of a layer in a model that a layer within another model in it is, too.
@pytest.mark.filterwarnings("ignore:Skipping nested container at '_operations_by_depth:UserWarning")
def test_training_goes_on_from_files_in_every_bit(model: str, tmp_path: Path) -> None:
    trained = _compiled(model, seed=2)
    train(trained, model, 3)
    trained.save(tmp_path / "model.keras")
    trained.save_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).save(tmp_path / "checkpoint")
    expected = train(trained, model, 3, first=3), _values(trained)
    for way, load in _WAYS.items():
        loaded = load(model, tmp_path)
        assert (train(loaded, model, 3, first=3), _values(loaded)) == expected, way


def _values(trained: Any) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in [*trained.variables, *trained.optimizer.variables]]


@pytest.mark.parametrize("model", ["AlbertTextClassifier", "GPT2CausalLM", "ViTImageClassifier"])
@pytest.mark.feature("two replicas")
def test_overflow_on_the_second_replica_is_skipped_on_both(
    model: str, two_replicas: tf.distribute.MirroredStrategy
) -> None:
    # The sums of two replicas' gradients are rounded otherwise than those of one; Adam would divide by what it rounds.
    rate = MODELS[model].learning_rate
    alone = compiled(model, scaled(keras.optimizers.SGD(rate, momentum=0.9)))
    with two_replicas.scope():
        together = compiled(model, scaled(keras.optimizers.SGD(rate, momentum=0.9)))
    for trained in (alone, together):
        _fit(trained, model, step=0)
    _assert_close(together, alone)
    before = _on_each_replica(together)
    _fit(together, model, step=1, overflows=True)
    for found, expected in zip(_on_each_replica(together), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    opt = together.optimizer
    assert (int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)) == (1, 1, SCALE / 2)
    for trained in (alone, together):
        _fit(trained, model, step=2)
    _assert_close(together, alone)
    assert int(opt.applied_steps) == 2


def _fit(trained: Any, model: str, *, step: int, overflows: bool = False) -> None:
    x, y = batches(model)[step]
    weights = np.ones(y.shape, np.float32)
    # The second replica has the second half of a batch.
    weights[ROWS - 2] = np.inf if overflows else 1.0
    examples = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(ROWS)
    trained.fit(examples, epochs=1, shuffle=False, verbose=0)


def _on_each_replica(trained: Any) -> list[np.ndarray]:
    variables = [*trained.trainable_variables, *trained.optimizer.inner_optimizer.variables]
    return [each.numpy() for variable in variables for each in getattr(variable.value, "values", [variable.value])]


def _assert_close(one: Any, other: Any) -> None:
    for found, expected in zip(one.trainable_variables, other.trainable_variables, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("model", ["BertMaskedLM", "ResNetImageClassifier"])
@pytest.mark.feature("callbacks")
def test_all_callbacks_together(model: str, tmp_path: Path) -> None:
    best = str(tmp_path / "best.weights.h5")
    callbacks = [
        keras.callbacks.EarlyStopping("loss", patience=30),
        keras.callbacks.ModelCheckpoint(best, "loss", save_best_only=True, save_weights_only=True),
        keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
        # No loss is better by 100, so that the rate is halved after each epoch but the first.
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0),
        keras.callbacks.TensorBoard(tmp_path / "logs"),
        tfmp.LossScaleCallback(summary_dir=str(tmp_path / "scale")),
    ]
    trained = compiled(model, scaled(adam(model)))
    losses = train(trained, model, 4, callbacks=callbacks)
    assert trained.history.history["loss_scale"] == [SCALE] * 4
    assert float(trained.optimizer.learning_rate) == pytest.approx(MODELS[model].learning_rate / 8)
    assert list((tmp_path / "logs").iterdir())
    assert list((tmp_path / "scale").iterdir())
    restored = compiled(model, scaled(adam(model)), seed=9)
    restored.load_weights(best)
    assert int(restored.optimizer.iterations) == int(np.argmin(losses)) + 1
    # It goes on where the other one ended: it trains for two epochs, not six.
    resumed = compiled(model, scaled(adam(model)), seed=9)
    train(resumed, model, 6, callbacks=[callbacks[2]])
    assert int(resumed.optimizer.applied_steps) == 6
    assert len(resumed.history.history["loss"]) == 2
