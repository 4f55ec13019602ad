"""Trainings of a model of another library for Keras 2, as its users have them: by `fit`, and in a loop of their own."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from benchmarks.legacy_optimizers import load

STEPS = 20

#: The scale that trainings start from.
SCALE = 2.0**10


class Subject(NamedTuple):
    """A model of a library and what it is trained on.

    `make` returns a new model that has its variables, each time with the same values. A batch is what `train_on_batch`
    takes. `loss` is that of a loop of the user's, of the model and of a batch; `compile_with` has the arguments of
    `compile` but the optimizer. `keep_float32` has the layers that float16 does not suit.
    """

    keras: ModuleType
    make: Callable[[], Any]
    optimizer: Callable[[], Any]
    batches: Sequence[tuple[Any, ...]]
    loss: Callable[[Any, Any], tf.Tensor]
    compile_with: Mapping[str, Any] = {}
    keep_float32: Sequence[str] = ()

    def at(self, level: str) -> Any:
        """Return a new model at a level."""
        model = self.make()
        tfmp.set_precision(model, level, keep_float32=self.keep_float32)
        return model


def keras_of(layer_class: type) -> ModuleType:
    """Return the Keras that a library's class derives from.

    `tf.keras` of TensorFlow 2.15 is tf_keras if transformers, or model-optimization, was imported before its first use.
    """
    names = [each.__module__.partition(".")[0] for each in layer_class.__mro__]
    return load(next(name for name in names if name in {"keras", "tf_keras"}))


def scaled(opt: Any) -> Any:
    """Return an optimizer in tfmp's wrapper."""
    return tfmp.LossScaleOptimizer(opt, initial_scale=SCALE)


def in_keras_own_wrapper(keras: ModuleType, opt: Any) -> Any:
    """Return an optimizer in the wrapper of its own Keras."""
    return keras.mixed_precision.LossScaleOptimizer(opt, initial_scale=SCALE)


def fit(subject: Subject, model: Any, opt: Any) -> np.ndarray:
    """Train a model by Keras, and return the losses."""
    model.compile(opt, **subject.compile_with)
    return np.array([model.train_on_batch(*batch, return_dict=True)["loss"] for batch in subject.batches])


@functools.cache
def losses(subject_of: Callable[[], Subject], level: str, wrapper: str) -> np.ndarray:
    """Return the losses of `fit` at a level: with "tfmp" or "Keras" as the wrapper, or "none"."""
    subject = subject_of()
    opt = subject.optimizer()
    wrappers = {
        "tfmp": scaled,
        "Keras": functools.partial(in_keras_own_wrapper, subject.keras),
        "none": lambda opt: opt,
    }
    return fit(subject, subject.at(level), wrappers[wrapper](opt))


def farthest(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest relative difference of losses; NaN if one is NaN."""
    return float(np.max(np.abs(found / expected - 1)))


def computing_in(keras: ModuleType, model: Any, dtype: str, kind: str = "Dense") -> set[str]:
    """Return the names of the layers of a class that compute in a type."""
    of_kind = [each for each in model.submodules if isinstance(each, getattr(keras.layers, kind))]
    return {layer.name for layer in of_kind if layer.compute_dtype == dtype}


class Loop:
    """A training loop as the documentation of Keras' own wrapper has it; `factor` is what a loss is multiplied by."""

    def __init__(self, subject: Subject, model: Any, opt: Any, strategy: Any = None) -> None:
        self.model, self.optimizer = model, opt
        self._strategy = strategy
        replicas = strategy.num_replicas_in_sync if strategy is not None else 1

        def step(batch: Any, factor: tf.Tensor) -> tf.Tensor:
            variables = model.trainable_variables
            with tf.GradientTape() as tape:
                loss = subject.loss(model, batch) * factor
                value = opt.get_scaled_loss(loss / replicas)
            grads = opt.get_unscaled_gradients(tape.gradient(value, variables))
            opt.apply_gradients(zip(grads, variables, strict=True))
            return loss

        self._step = tf.function(step if strategy is None else lambda *args: strategy.run(step, args))

    def __call__(self, batch: Any, factor: float | Sequence[float] = 1.0) -> Any:
        """Take a step; with a strategy, each replica has its batch and factor."""
        if self._strategy is None:
            return float(self._step(batch, tf.constant(factor, tf.float32)))
        return self._step(*(self._per_replica(each) for each in (batch, [tf.constant(each) for each in factor])))

    def _per_replica(self, values: Sequence[Any]) -> Any:
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        )

    @property
    def state(self) -> list[np.ndarray]:
        """The values of the trained weights and of the inner optimizer's variables."""
        inner, trained = self.optimizer.inner_optimizer, self.model.trainable_variables
        if hasattr(inner, "get_slot"):
            # A legacy optimizer has its slots in the order in which they were made, or restored.
            slots = [inner.get_slot(each, name) for name in inner.get_slot_names() for each in trained]
            return [each.numpy() for each in [*trained, *slots, inner.iterations]]
        return [each.numpy() for each in [*trained, *inner.variables]]

    @property
    def counts(self) -> tuple[int, int, float]:
        """The applied and the skipped steps, and the loss scale."""
        opt = self.optimizer
        return int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)


def assert_equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Fail unless all arrays are equal in every bit."""
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, two)


def assert_skips_an_overflow(subject: Subject) -> None:
    """An infinite loss changes nothing but the scale, and the training goes on."""
    loop = Loop(subject, subject.at("O2"), scaled(subject.optimizer()))
    first = [loop(batch) for batch in subject.batches[:4]]
    before = loop.state
    loop(subject.batches[4], math.inf)
    assert_equal(loop.state, before)
    assert loop.counts == (4, 1, SCALE / 2)
    # The same batches again, so that the losses can be compared.
    again = [loop(batch) for batch in subject.batches[:4]]
    assert loop.counts == (8, 1, SCALE / 2)
    assert np.mean(again) < np.mean(first)


def assert_resumes(subject: Subject, path: Path) -> None:
    """A checkpoint that is restored into a new model goes on as the first model does, in every bit."""
    loop = Loop(subject, subject.at("O2"), scaled(subject.optimizer()))
    for index, batch in enumerate(subject.batches[:4]):
        loop(batch, math.inf if index == 1 else 1.0)
    saved = tf.train.Checkpoint(model=loop.model, optimizer=loop.optimizer).save(path / "checkpoint")
    other = Loop(subject, subject.at("O2"), scaled(subject.optimizer()))
    tf.train.Checkpoint(model=other.model, optimizer=other.optimizer).restore(saved)
    for batch in subject.batches[4:8]:
        assert other(batch) == loop(batch)
    assert_equal(other.state, loop.state)
    # Around a legacy optimizer the counts of steps begin anew; its own iterations are in the state.
    assert loop.counts == (7, 1, SCALE / 2)
    assert other.counts[2] == SCALE / 2


def assert_replicas_skip_together(subject: Subject, strategy: Any) -> None:
    """An overflow on the second replica is skipped on both; otherwise the step is that of one device."""
    alone = Loop(subject, subject.at("O2"), scaled(subject.optimizer()))
    with strategy.scope():
        loop = Loop(subject, subject.at("O2"), scaled(subject.optimizer()), strategy)
    for batch in subject.batches[:2]:
        alone(batch)
        loop([batch, batch], [1.0, 1.0])
    before = loop.state
    loop([subject.batches[2]] * 2, [1.0, math.inf])
    assert_equal(loop.state, before)
    assert loop.counts == (2, 1, SCALE / 2)
    # Both replicas have the batches of the one. The halves of gradients lose bits where they are subnormal in float16.
    expected = alone(subject.batches[3])
    found = loop([subject.batches[3]] * 2, [1.0, 1.0])
    for loss in tf.nest.flatten(found.values):
        assert float(loss) == pytest.approx(expected, rel=5e-3)
    assert loop.counts == (3, 1, SCALE / 2)
