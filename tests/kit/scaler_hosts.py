"""The hosts that are loops with `tfmp.GradScaler`, around optimizers of TensorFlow 1 and of each Keras."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import tfmp
from kit.hosts import Loop, State, state_of, step_counter, told_by, v1_optimizer, weights_and_momenta
from kit.keras_hosts import of_tensorflow
from kit.structures import Fed


class Scaler(Loop):
    """A loop that scales, differentiates, steps and updates; with an accumulator it adds up the gradients first.

    Without a `keras` the optimizer is one of TensorFlow 1.
    """

    def __init__(self, *given: Any, averages: bool = True, jit_compile: Any = "auto", **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._averages, self._jit_compile = averages, jit_compile

    def _make(self) -> None:
        make = tf.Variable if self._keras is None else getattr(self._keras, "Variable", tf.Variable)
        self._weights = {
            name: make(value, name=name, dtype=value.dtype.name) for name, value in self.structure.initial.items()
        }
        self._step = step_counter()
        self._inner = self._make_inner()
        self._set_up()
        self.scaler.prepare(self._inner, self._weights.values())

    def _make_inner(self) -> Any:
        if self._keras is None:
            return v1_optimizer(self.structure)
        options = {name: each for name, each in self.structure.options.items() if self._averages or "ema" not in name}
        return self._keras.optimizers.SGD(0.5, **options)

    def _set_up(self) -> None:
        settings = self.settings()
        window = {
            name: settings.pop(name)
            for name in ("accumulation_steps", "overflow_drops", "micro_batches_per_epoch")
            if name in settings
        }
        self.accumulator = None
        if window:
            detector = {name: settings[name] for name in ("overflow_detector",) if name in settings}
            self.accumulator = tfmp.GradientAccumulator(list(self._weights.values()), **window, **detector)
        records_norm = settings.pop("records_norm", False)
        settings["manager"] = settings.pop("loss_scale_manager")
        self.scaler = tfmp.GradScaler(jit_compile=self._jit_compile, **settings)
        if records_norm:
            self.scaler.record_gradient_norm()

    def _on_replica(self, fed: Fed) -> None:
        variables = {name: of_tensorflow(weight) for name, weight in self._weights.items()}
        with tf.GradientTape() as tape:
            loss = self.scaler.scale(self.structure.loss(variables, fed))
        grads = tape.gradient(loss, list(variables.values()))
        if self.accumulator is None:
            self._apply(grads if self._clip is None else self._clip(self.scaler.unscale(self._inner, grads)))
            return
        self.accumulator.add(grads, self.scaler.loss_scale)
        if not self._compiled:
            if self.accumulator.is_full:
                self._apply_mean()
            return
        tf.cond(self.accumulator.is_full, self._apply_mean, lambda: None)

    def _apply_mean(self) -> None:
        grads = self.scaler.unscale(self._inner, self.accumulator)
        self._apply(grads if self._clip is None else self._clip(grads))

    def _apply(self, grads: Sequence[Any]) -> None:
        pairs = zip(grads, self._weights.values(), strict=True)
        self.scaler.step(self._inner, pairs, **({"global_step": self._step} if self._keras is None else {}))
        self.scaler.update()

    def _checkpoint(self) -> tf.train.Checkpoint:
        parts = {"optimizer": self._inner, "scaler": self.scaler, "step": self._step}
        if self.accumulator is not None:
            parts["accumulator"] = self.accumulator
        weights = {name: of_tensorflow(weight) for name, weight in self._weights.items()}
        return tf.train.Checkpoint(**parts, **weights)

    def _state(self) -> State:
        weights = [of_tensorflow(weight) for weight in self._weights.values()]
        if self._keras is None:
            moving, steps = weights_and_momenta(self._strategy, self._inner, weights), self._step
        else:
            variables = [*weights, *map(of_tensorflow, self._inner.variables)]
            moving = [part for each in variables for part in self._strategy.experimental_local_results(each)]
            steps = of_tensorflow(self._inner.iterations)
        with self._strategy.scope():
            return state_of(moving, steps.numpy(), told_by(self.scaler))
