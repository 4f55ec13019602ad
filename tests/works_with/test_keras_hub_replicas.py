"""Models of keras-hub train on two replicas as on one, and with all callbacks at once."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_hub_models import MARKS, MODELS, ROWS, SCALE, adam, batches, compiled, scaled, train

import tfmp

pytestmark = MARKS


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
