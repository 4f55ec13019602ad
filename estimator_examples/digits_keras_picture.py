"""Draws what `digits_keras` trained: the accuracy and the loss scale after each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from estimator_examples.digits_session import Digits

#: The colors of the training runs, in their order.
_COLORS = ("#c0392b", "#00897b")
# A loss scale of 0 has no place on a logarithmic axis: it is drawn at the lower end.
_LOWEST_SCALE = 2.0**-40


class StepRecorder(keras.callbacks.Callback):
    """Records the accuracy on the test images and the loss scale after each step of `fit`.

    Args:
        test: The test images.

    Attributes:
        accuracies: The accuracies, from 0 to 1.
        scales: The loss scales.
    """

    def __init__(self, test: Digits) -> None:
        super().__init__()
        self._test = test
        self.accuracies: list[float] = []
        self.scales: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ANN401 - Keras' logs
        """Record both."""
        self.accuracies.append(accuracy_of(self.model, self._test))
        self.scales.append(loss_scale_of(self.model.optimizer))


def accuracy_of(model: keras.Model, test: Digits) -> float:
    """Return the accuracy on images, from 0 to 1."""
    # `evaluate` is not used: in Keras 3.15 it fails if the images cannot be split evenly over the replicas.
    return float(np.mean(np.argmax(model(test.images), axis=-1) == test.labels))


def loss_scale_of(optimizer: Any) -> float:  # noqa: ANN401 - a wrapper of tfmp or of any Keras
    """Return the loss scale of tfmp's wrapper or of Keras' own."""
    # Keras 3's wrapper names the scale `dynamic_scale`; the wrappers of tfmp and Keras 2 name it `loss_scale`.
    scale = optimizer.loss_scale if hasattr(optimizer, "loss_scale") else optimizer.dynamic_scale
    return float(tf.convert_to_tensor(scale))


def draw(recorders: Mapping[str, StepRecorder], path: Path) -> None:
    """Draw the accuracies and the loss scales of training runs side by side.

    Args:
        recorders: What each run recorded, by the name of the library that scaled the loss.
        path: The image file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    accuracy, scale = figure.subplots(1, 2)
    for color, (name, recorder) in zip(_COLORS, recorders.items(), strict=False):
        steps = range(1, len(recorder.scales) + 1)
        accuracy.plot(steps, recorder.accuracies, color=color, label=name)
        scale.step(steps, np.maximum(recorder.scales, _LOWEST_SCALE), where="post", color=color, label=name)
    accuracy.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1))
    scale.set(xlabel="step", ylabel="loss scale")
    scale.set_yscale("log", base=2)
    scale.set_ylim(bottom=_LOWEST_SCALE)
    accuracy.legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=120)
