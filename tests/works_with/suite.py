"""What the models of every library keep, trained as users train them: by Keras, and in a loop of their own.

A library has a class that derives from `Suite` and names its models.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf
from kit.keras_hosts import of_tensorflow

import tfmp
from benchmarks.legacy_optimizers import is_installed, load

STEPS = 20

#: The scale that trainings start from.
SCALE = 2.0**10

_feature = pytest.mark.feature


def library(package: str) -> ModuleType:
    """Return a package for Keras 2; the module that asks for it is skipped without it."""
    if not is_installed(package):
        pytest.skip(f"needs {package}, which the tox environment works_with_keras2 installs", allow_module_level=True)
    return load(package)


def trained_on(model: Any, batch: Any) -> float:
    """Train a model on a batch, and return the loss, of which Keras 3 would return the mean since it was reset."""
    model.reset_metrics()
    return float(model.train_on_batch(*batch, return_dict=True)["loss"])


def fitted(model: Any, batch: Any, callbacks: Sequence[Any]) -> Any:
    """Fit a model to a batch under callbacks, and return the history."""
    return model.fit(tf.data.Dataset.from_tensors(batch), shuffle=False, verbose=0, callbacks=callbacks).history


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A model of a library, and how users train it.

    Attributes:
        build: Makes a model that has its variables, from the seed that `make` sets.
        batches: What `train_on_batch` takes, by steps.
        loss: The loss in a loop of the user's, of the model and of a batch.
        compile_with: The arguments of `compile` but the optimizer.
        step: Takes a step of a compiled model with a batch, and returns the loss.
        keep_float32: The layers that float16 does not suit; by that the dense layers named `float32` stay so.
        dense: The library's own classes of dense layers.
        check: What `check_precision` takes for the loss and the batches, if it is not what trains.
        check_keeps: The layers that the check keeps beside those; None if they are not told.
        tolerance: The largest relative difference between losses in float16 and in float32.
        falls: What part of the first losses the last ones are at most.
        in_keras_wrapper: Another optimizer, where Keras' own wrapper has a fault with this one.
        on_replicas: Another optimizer, where this one divides by what two replicas round otherwise than one.
        recomputed: Lets layers of a model be recomputed, and returns it.
        rounding: The relative and the absolute difference of gradients that are recomputed.
        epoch: Fits a compiled model for an epoch, under callbacks.
        callbacks: Returns callbacks of the library, given a directory.
        lacks: The features that are not tested with it, or by tests of its own.
    """

    keras: ModuleType
    build: Callable[[], Any]
    optimizer: Callable[[], Any]
    batches: Sequence[tuple[Any, ...]]
    loss: Callable[[Any, Any], tf.Tensor]
    compile_with: Mapping[str, Any]
    step: Callable[[Any, Any], float] = trained_on
    keep_float32: Sequence[str] = ()
    float32: frozenset[str] = frozenset()
    dense: Sequence[type] = ()
    check: tuple[Any, Sequence[Any]] | None = None
    check_keeps: Sequence[str] | None = ()
    tolerance: float = 2e-3
    falls: float = 0.9
    in_keras_wrapper: Callable[[], Any] | None = None
    on_replicas: Callable[[], Any] | None = None
    recomputed: Callable[[Any], Any] | None = None
    rounding: tuple[float, float] = (0.0, 0.0)
    epoch: Callable[[Any, Any, Sequence[Any]], Any] = fitted
    callbacks: Callable[[Path], Sequence[Any]] | None = None
    lacks: frozenset[str] = frozenset()

    def make(self) -> Any:
        """Return a new model, each time with the same values."""
        self.keras.utils.set_random_seed(1)
        return self.build()

    def at(self, level: str) -> Any:
        """Return a new model at a level."""
        model = self.make()
        tfmp.set_precision(model, level, keep_float32=self.keep_float32)
        return model

    def loop(self, optimizer: Callable[[], Any] | None = None, strategy: Any = None) -> "Loop":
        """Return a loop that trains a new model at O2."""
        return Loop(self, self.at("O2"), scaled((optimizer or self.optimizer)()), strategy)


def four_in_turn(batch: Callable[[], Any]) -> list[Any]:
    """Return the batches of all steps, which are four that are drawn."""
    four = [batch() for _ in range(4)]
    return [four[index % 4] for index in range(STEPS)]


def keras_of(layer_class: type) -> ModuleType:
    """Return the Keras that a library's class derives from.

    `tf.keras` of TensorFlow 2.15 is tf_keras if transformers, or model-optimization, was imported before its first use.
    """
    names = [each.__module__.partition(".")[0] for each in layer_class.__mro__]
    return load(next(name for name in names if name in {"keras", "tf_keras"}))


def scaled(opt: Any) -> Any:
    """Return an optimizer in tfmp's wrapper."""
    return tfmp.LossScaleOptimizer(opt, initial_scale=SCALE)


def fit(subject: Subject, model: Any, opt: Any) -> np.ndarray:
    """Train a model by Keras, and return the losses."""
    model.compile(opt, **subject.compile_with)
    return np.array([subject.step(model, batch) for batch in subject.batches])


@functools.cache
def losses(subject: Subject, level: str) -> np.ndarray:
    """Return the losses of `fit` at a level: without a wrapper at O0."""
    opt = subject.optimizer()
    return fit(subject, subject.at(level), opt if level == "O0" else scaled(opt))


def farthest(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest relative difference of losses; NaN if one is NaN."""
    return float(np.max(np.abs(found / expected - 1)))


def learns(found: np.ndarray, falls: float) -> bool:
    """Return whether the last losses are at most this part of the first ones."""
    return float(np.mean(found[-4:])) < falls * float(np.mean(found[:4]))


def name_of(weight: Any) -> str:
    """Return a variable's name or path, without the number that Keras gives to a model or layer."""
    return re.sub(r"^([^/]+?)_\d+/", r"\1/", getattr(weight, "path", weight.name))


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model, and what is within them."""
    return list(model.submodules if hasattr(model, "submodules") else model._flatten_layers())


def computing_in(keras: ModuleType, model: Any, dtype: str, *others: type) -> set[str]:
    """Return the names of Keras' dense layers, and of layers of other classes, that compute in a type."""
    classes = (keras.layers.Dense, keras.layers.EinsumDense, *others)
    return {each.name for each in layers_of(model) if isinstance(each, classes) and each.compute_dtype == dtype}


def assert_equal(one: Sequence[np.ndarray], two: Sequence[np.ndarray]) -> None:
    """Fail unless all arrays are equal in every bit."""
    for first, second in zip(one, two, strict=True):
        np.testing.assert_array_equal(first, second)


class Loop:
    """A training loop as the documentation of Keras' own wrapper has it; `factor` is what a loss is multiplied by."""

    def __init__(self, subject: Subject, model: Any, opt: Any, strategy: Any = None) -> None:
        self.model, self.optimizer = model, opt
        self._strategy = strategy
        if subject.keras.__version__.startswith("3."):
            # A checkpoint finds only slots that there are.
            opt.build(model.trainable_variables)
        replicas = strategy.num_replicas_in_sync if strategy is not None else 1

        def step(batch: Any, factor: tf.Tensor) -> tf.Tensor:
            variables = model.trainable_variables
            with tf.GradientTape() as tape:
                loss = subject.loss(model, batch) * factor
                value = opt.get_scaled_loss(loss / replicas)
            grads = opt.get_unscaled_gradients(tape.gradient(value, [*map(of_tensorflow, variables)]))
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
        """The values of the trained weights and of the inner optimizer's variables, on each replica."""
        inner, trained = self.optimizer.inner_optimizer, self.model.trainable_variables
        if hasattr(inner, "get_slot"):
            # A legacy optimizer has its slots in the order in which they were made, or restored.
            slots = [inner.get_slot(each, name) for name in inner.get_slot_names() for each in trained]
            kept = [*trained, *slots, inner.iterations]
        else:
            kept = [*trained, *inner.variables]
        return [
            each.numpy() for variable in map(of_tensorflow, kept) for each in getattr(variable, "values", [variable])
        ]

    @property
    def counts(self) -> tuple[int, int, float]:
        """The applied and the skipped steps, and the loss scale."""
        opt = self.optimizer
        return int(opt.applied_steps), int(opt.skipped_steps), float(opt.loss_scale)


class Suite:
    """The tests of the models of a library: their names, and a function of a name that returns the subject."""

    models: ClassVar[Sequence[str]]
    subject: ClassVar[Callable[[str], Subject]]

    @_feature("float32's curve")
    def test_float16_trains_on_the_curve_of_float32(self, model: str) -> None:
        subject = self.subject(model)
        expected = losses(subject, "O0")
        assert farthest(losses(subject, "O2"), expected) < subject.tolerance
        assert learns(expected, subject.falls)

    @_feature("Keras' wrapper")
    def test_losses_are_those_of_keras_own_wrapper(self, model: str) -> None:
        subject = self.subject(model)
        make = subject.in_keras_wrapper or subject.optimizer
        wrapper = subject.keras.mixed_precision.LossScaleOptimizer
        expected = fit(subject, subject.at("O2"), wrapper(make(), initial_scale=SCALE))
        found = fit(subject, subject.at("O2"), scaled(make())) if subject.in_keras_wrapper else losses(subject, "O2")
        # Keras 3 compiles the step, in which the wrappers have other neighbours.
        assert farthest(found, expected) <= (1e-6 if subject.keras.__version__.startswith("3.") else 0)

    @_feature("overflow")
    def test_overflow_changes_nothing_but_the_scale(self, model: str) -> None:
        subject = self.subject(model)
        loop = subject.loop()
        first = [loop(batch) for batch in subject.batches[:4]]
        before = loop.state
        loop(subject.batches[4], math.inf)
        assert_equal(loop.state, before)
        assert loop.counts == (4, 1, SCALE / 2)
        # The same batches again, so that the losses can be compared.
        again = [loop(batch) for batch in subject.batches[:4]]
        assert loop.counts == (8, 1, SCALE / 2)
        assert np.mean(again) < np.mean(first)

    @_feature("O1, O2")
    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_levels_compute_in_float16_and_learn(self, model: str, level: str) -> None:
        subject = self.subject(model)
        trained = subject.at(level)
        assert computing_in(subject.keras, trained, "float16", *subject.dense)
        assert computing_in(subject.keras, trained, "float32", *subject.dense) == subject.float32
        assert learns(losses(subject, level), subject.falls)

    @_feature("check")
    def test_check_finishes_and_what_it_suggests_trains(self, model: str) -> None:
        subject = self.subject(model)
        checked = subject.at("O2")
        loss, batches = subject.check or (subject.compile_with.get("loss"), subject.batches[:2])
        report = tfmp.check_precision(checked, loss, batches, progress=False)
        assert report.float16_error is None
        assert subject.check_keeps is None or report.remaining == [*subject.check_keeps]
        if report.remaining:
            report.apply(checked)
        # What amplifies the rounding of float16 so far may be far off in a layer, too.
        if subject.tolerance < 0.1:
            assert report.far_off == []
            assert report.float16_loss == pytest.approx(report.loss, rel=0.01)
        opt = tfmp.LossScaleOptimizer(subject.optimizer(), initial_scale=report.suggested_loss_scale)
        found = fit(subject, checked, opt)
        assert farthest(found, losses(subject, "O0")) < 10 * subject.tolerance
        assert learns(found, 1.0)

    @_feature("recompute")
    def test_recomputed_layers_have_the_same_gradients(self, model: str) -> None:
        subject = self.subject(model)
        assert subject.recomputed is not None
        made, found = subject.make(), []
        for recompute in (False, True):
            # Keras numbers the layers of a second model otherwise, so the same model is recomputed.
            made = subject.recomputed(made) if recompute else made
            with tf.GradientTape() as tape:
                loss = subject.loss(made, subject.batches[0])
            variables = made.trainable_variables
            grads = zip(variables, tape.gradient(loss, [*map(of_tensorflow, variables)]), strict=True)
            named = [(name_of(each), tf.convert_to_tensor(grad)) for each, grad in grads if grad is not None]
            # Blocks that are wrapped may have another place among the parts of a model.
            found.append(sorted(named, key=lambda pair: pair[0]))
        assert any(isinstance(each, tfmp.Recompute) for each in layers_of(made))
        relative, absolute = subject.rounding
        for (name, expected), (other_name, grad) in zip(*found, strict=True):
            assert name == other_name
            np.testing.assert_allclose(grad, expected, rtol=relative, atol=absolute)

    @_feature("resume")
    def test_checkpoint_goes_on_in_every_bit(self, model: str, tmp_path: Path) -> None:
        subject = self.subject(model)
        loop, other = subject.loop(), subject.loop()
        for index, batch in enumerate(subject.batches[:4]):
            loop(batch, math.inf if index == 1 else 1.0)
        saved = tf.train.Checkpoint(model=loop.model, optimizer=loop.optimizer).save(tmp_path / "checkpoint")
        tf.train.Checkpoint(model=other.model, optimizer=other.optimizer).restore(saved)
        for batch in subject.batches[4:8]:
            assert other(batch) == loop(batch)
        assert_equal(other.state, loop.state)
        # Around a legacy optimizer the counts of steps begin anew; its own iterations are in the state.
        assert loop.counts == (7, 1, SCALE / 2)
        assert other.counts[2] == SCALE / 2

    @_feature("callbacks")
    def test_callbacks_of_tfmp_go_with_those_of_the_library(self, model: str, tmp_path: Path) -> None:
        subject = self.subject(model)
        assert subject.callbacks is not None
        trained = subject.at("O2")
        trained.compile(scaled(subject.optimizer()), **subject.compile_with)
        history = subject.epoch(trained, subject.batches[0], [*subject.callbacks(tmp_path), tfmp.LossScaleCallback()])
        assert (history["loss_scale"], history["skipped_steps"]) == ([SCALE], [0])

    @_feature("two replicas")
    def test_overflow_on_the_second_replica_is_skipped_on_both(
        self, model: str, two_replicas: tf.distribute.MirroredStrategy
    ) -> None:
        subject = self.subject(model)
        alone = subject.loop(subject.on_replicas)
        with two_replicas.scope():
            loop = subject.loop(subject.on_replicas, two_replicas)
        for batch in subject.batches[:2]:
            alone(batch)
            loop([batch, batch], [1.0, 1.0])
        before = loop.state
        loop([subject.batches[2]] * 2, [1.0, math.inf])
        assert_equal(loop.state, before)
        assert loop.counts == (2, 1, SCALE / 2)
        # Both replicas have the batches of the one. The halves of gradients lose bits where float16 is subnormal.
        expected = alone(subject.batches[3])
        found = loop([subject.batches[3]] * 2, [1.0, 1.0])
        for loss in tf.nest.flatten(found.values):
            assert float(loss) == pytest.approx(expected, rel=5e-3)
        assert loop.counts == (3, 1, SCALE / 2)
