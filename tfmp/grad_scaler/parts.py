"""The part of one optimizer in a step, and the one step of all optimizers that step together or not at all."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.any_keras.which import is_optimizer_of_keras3, keras_of
from tfmp.core.adapter import OptimizerAdapter, Program
from tfmp.core.overflow.detectors import KINDS
from tfmp.core.overflow.found import Checked, Found
from tfmp.core.step.scaler import Facts
from tfmp.core.step.step import Step, step_of
from tfmp.grad_scaler.scaled_gradients import ScaledGradientsAdapter, ScaledGradientsOptimizer
from tfmp.hosts.keras.adapters import Keras3Adapter, KerasAdapter, LegacyAdapter
from tfmp.hosts.keras.program import UpdateCompilers
from tfmp.hosts.tf1 import TF1Adapter
from tfmp.types import Done, Gradients


class StepPart(NamedTuple):
    """The part of one optimizer in a step."""

    adapter: OptimizerAdapter
    #: The gradients that the user passed to `step`, or their mean over Horovod's processes. They are unscaled if the
    #: user called `unscale`.
    given: Gradients
    #: What `unscale` found; None if the user did not call `unscale`.
    before: Checked | None

    @property
    def unclipped(self) -> Gradients:
        """The gradients before the user clipped them, if that was after a call of `unscale`."""
        return self.given if self.before is None or self.before.unclipped is None else self.before.unclipped

    @property
    def is_of_window(self) -> bool:
        """True if the gradients are the mean of an accumulator's window, which may not be usable."""
        return self.before is not None and self.before.window_counts is not None

    def apply_scaled(self, loss_scale: tf.Tensor, applied: tf.Tensor) -> Done:
        """Call the optimizer if it is a `ScaledGradientsOptimizer`, which applies its gradients or skips them."""
        if not isinstance(self.adapter, ScaledGradientsAdapter):
            return None
        return self.adapter.apply_scaled(self.given, loss_scale if self.before is None else tf.constant(1.0), applied)

    def apply_unchecked(self) -> Done:
        """Apply the gradients without checking them, for a scaler that is not enabled."""
        own = self.apply_scaled(tf.constant(1.0), tf.constant(True))
        return apply_unscaled(self.adapter, self.given) if own is None else own


def adapter_of(
    optimizer: Any,  # noqa: ANN401 - of any host
    variables: Sequence[Any],
    kwargs: Mapping[str, Any],
    compilers: UpdateCompilers,
) -> OptimizerAdapter:
    """Return the adapter for an optimizer's type; `kwargs` are passed to its `apply_gradients`."""
    if isinstance(optimizer, ScaledGradientsOptimizer):
        return ScaledGradientsAdapter(optimizer, variables)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return TF1Adapter(optimizer, variables, kwargs)
    of_keras = keras_of(optimizer, "optimizers.Optimizer") is not None
    if of_keras and not kwargs and compilers.of(optimizer).runs_keras_alone([optimizer]):
        # A class that a user wrote, or changed, may do more in `apply_gradients` than Keras' own classes do.
        # Only the optimizers of Keras 3 have `apply`.
        adapter = Keras3Adapter if is_optimizer_of_keras3(optimizer) else KerasAdapter
        return adapter(optimizer, variables, compiler=compilers.of(optimizer))
    if keras_of(optimizer, "optimizers.legacy.Optimizer") is not None:
        return LegacyAdapter(optimizer, variables, kwargs)
    return OptimizerAdapter(optimizer, variables, kwargs)


def make_variables(adapter: OptimizerAdapter) -> None:
    """Make an optimizer's own variables; if a `tf.function` can no longer make any, raise an error with advice."""
    try:
        adapter.prepare(adapter.variables)
    except ValueError as error:
        # The errors that Keras and TensorFlow raise when variables are made contain this word.
        if tf.executing_eagerly() or "ariables" not in str(error):
            raise
        kind, names = type(adapter.optimizer).__name__, ", ".join(adapter.names)
        raise ValueError(
            f"{kind} has no variables yet for {names}, and a tf.function makes none when it is traced again: call "
            "scaler.prepare(optimizer, variables) before the function is first called."
        ) from error


def step_together(parts: Sequence[StepPart], facts: Facts) -> Step:
    """Return one step for several optimizers, of which either all step or none; all gradients are scaled, or none."""
    adapters = [part.adapter for part in parts]
    adapter = adapters[0] if len(adapters) == 1 else AdaptersTogether(adapters)
    grads = [grad for part in parts for grad in part.given]
    checks = [part.before for part in parts if part.before is not None]
    if not checks:
        return step_of(adapter, grads, facts, are_scaled=True)
    return step_of(adapter, grads, facts, before=joined(checks)._replace(window_counts=_counts_together(parts)))


def joined(checks: Sequence[Checked]) -> Checked:
    """Join what is known of several groups of gradients, at most one of which is of an accumulator's window."""
    if len(checks) == 1:
        return checks[0]
    each = [check.found for check in checks]
    largest = [found.max_abs for found in each if found.max_abs is not None]
    complete = [found.usable if found.complete is None else found.complete for found in each]
    unclipped = [check.unclipped for check in checks if check.unclipped is not None]
    found = Found(
        usable=tf.reduce_all([found.usable for found in each]),
        # If it is unknown for one group, the step computes it from the gradients of all.
        max_abs=tf.reduce_max(largest) if len(largest) == len(checks) else None,
        complete=None if all(found.complete is None for found in each) else tf.reduce_all(complete),
    )
    return Checked(
        found,
        grads=[grad for check in checks for grad in check.grads],
        # Otherwise the detector has not seen all gradients.
        of_window=all(check.of_window for check in checks),
        window_counts=next((check.window_counts for check in checks if check.window_counts is not None), None),
        unclipped=[grad for group in unclipped for grad in group] if len(unclipped) == len(checks) else None,
    )


def _counts_together(parts: Sequence[StepPart]) -> tf.Tensor | None:
    return tf.concat(list(map(_counts_of, parts)), axis=0) if any(part.is_of_window for part in parts) else None


def _counts_of(part: StepPart) -> tf.Tensor:
    num_variables = len(part.adapter.variables)
    counts = None if part.before is None else part.before.window_counts
    if counts is None:
        return tf.zeros([num_variables, len(KINDS)], tf.int64)
    if counts.shape[0] != num_variables:
        raise ValueError(
            f"unscale returned {counts.shape[0]} gradients of the accumulator, and step got {num_variables}: pass all "
            "of them, None too, with the variables in the accumulator's order."
        )
    return counts


class AdaptersTogether(OptimizerAdapter):
    """Treats the optimizers of several adapters as one optimizer, whose gradients are those of all in one list."""

    def __init__(self, adapters: Sequence[OptimizerAdapter]) -> None:
        super().__init__(None, [variable for adapter in adapters for variable in adapter.variables])
        self.dtypes = [dtype for adapter in adapters for dtype in adapter.dtypes]
        self._adapters = adapters

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers of all adapters."""
        return [adapter.optimizer for adapter in self._adapters]

    def apply(self, grads: Gradients) -> Done:
        """Let each optimizer apply its own part of the gradients."""
        return tf.group(*(apply_unscaled(adapter, part) for adapter, part in self._with_own(grads)))

    def program(self, grads: Gradients) -> Program | None:
        """Return what runs the programs of all optimizers; None unless all of them have one."""
        programs = [adapter.program(part) for adapter, part in self._with_own(grads)]
        found = [program for program in programs if program is not None]
        return _ProgramsTogether(self, found) if len(found) == len(programs) else None

    def _with_own(self, grads: Gradients) -> list[tuple[OptimizerAdapter, Gradients]]:
        """Return each adapter with its part of the gradients."""
        rest = iter(grads)
        return [(adapter, list(itertools.islice(rest, len(adapter.variables)))) for adapter in self._adapters]


class _ProgramsTogether:
    """Runs the programs of several optimizers, one after the other; each optimizer clips its own gradients."""

    clips = False

    def __init__(self, adapter: AdaptersTogether, programs: Sequence[Program]) -> None:
        self._adapter = adapter
        self._programs = programs

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norm: tf.Tensor | None) -> Done:
        """Divide the gradients by the loss scale, clip and apply them."""
        del norm
        parts = zip(self._programs, self._adapter._with_own(grads), strict=True)
        return tf.group(*(program.run(part, loss_scale, None) for program, (_, part) in parts))


def apply_unscaled(adapter: OptimizerAdapter, grads: Gradients) -> Done:
    """Apply gradients in true magnitude: by the optimizer's program, or by the optimizer itself if it has none."""
    program = adapter.program(grads)
    return adapter.apply(grads) if program is None else program.run(grads, tf.ones([]), None)
