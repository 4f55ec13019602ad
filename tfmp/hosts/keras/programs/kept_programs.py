"""Runs updates of variables as programs that XLA compiles, which read and write each variable once."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.core.tensorflow_internals import unrecorded
from tfmp.hosts.keras.programs.fingerprint import Fingerprint
from tfmp.types import Gradients

_Update: TypeAlias = Callable[[Gradients, Sequence[tf.Tensor]], object]
_logger = logging.getLogger("tfmp")

#: How many settings are kept for one optimizer, most of them with a program.
_MOST_KEYS = 16
#: How many programs may be compiled at once, and after how many steps one more. To compile takes seconds.
_FREE_PROGRAMS = 4
_STEPS_PER_PROGRAM = 100


def run_compiled(update: _Update, grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
    """Run an update of variables, a function of gradients and further tensors, as a program that XLA compiles.

    Every call makes a program of its own. Call this function inside a `tf.function`, which calls it only once for each
    trace. The update then uses the values that Python objects have during that trace, like all other code of the trace.

    XLA compiles the program again for every new shape. Sparse gradients are therefore padded with rows of zeros, so
    that few different shapes occur.

    Examples:
        >>> w = tf.Variable([1.0, 2.0])
        >>> @tf.function
        ... def step():
        ...     run_compiled(lambda grads, tensors: w.assign_sub(grads[0] * tensors[0]), [tf.ones([2])], [0.5])
        >>> step()
        >>> w.numpy()
        array([0.5, 1.5], dtype=float32)
    """
    _call(_function(update, jit_compile=True), grads, tensors)


class KeptPrograms:
    """Runs updates in eager mode, as compiled programs that are kept and run again while no setting changes.

    What was compiled is found by the fingerprint of the settings that the update depends on. It refers weakly to the
    objects of the fingerprint, so it does not keep an optimizer alive. The programs used last are kept. The first
    update with settings runs without being compiled. If it changes settings itself, because the optimizer counts in
    Python, as Keras 2's `Nadam` does, nothing is compiled. If settings change so often that compiling would take longer
    than it saves, the update runs without being compiled; a message says so.

    Copies of this object are empty.

    Examples:
        >>> programs, w = KeptPrograms(), tf.Variable([1.0, 2.0])
        >>> traced = []
        >>> def update(grads, tensors):
        ...     traced.append(1)
        ...     w.assign_sub(grads[0] * tensors[0])
        >>> for _ in range(3):
        ...     programs.run(update, lambda: Fingerprint([w]), [tf.ones([2])], [0.5])
        >>> w.numpy(), len(traced)  # the first step is not compiled
        (array([-0.5,  0.5], dtype=float32), 2)
    """

    def __init__(self) -> None:
        self._kept: dict[Any, _Kept] = {}
        self._steps = 0
        self._settings = 0
        self._compiled = 0
        self._told = False

    def __reduce__(self) -> tuple[type["KeptPrograms"], tuple[()]]:
        return KeptPrograms, ()

    def __len__(self) -> int:
        """Return the number of programs."""
        return sum(kept.program is not None for kept in self._kept.values())

    def run(
        self,
        update: _Update,
        settings: Callable[[], Fingerprint],
        grads: Gradients,
        tensors: Sequence[tf.Tensor],
        by_programs: _Update | None = None,
    ) -> None:
        """Run an update as it was compiled for its settings; compile it if it was not yet.

        `settings` returns the fingerprint of all that the update depends on, apart from its arguments. `by_programs`
        does the same as the update, by compiled programs; without it the update is compiled as one program.
        """
        self._steps += 1
        now = settings()
        kept = self._kept.pop(now.key, None)
        if kept is None or not kept.is_valid():
            self._run_first(update, now, settings, grads, tensors)
        elif kept.program is None and self._compiled >= self._most_programs():
            self._tell()
            update(grads, tensors)
            self._keep(now, kept)
        else:
            if kept.program is None:
                self._compiled += 1
                kept = kept._replace(program=_function(by_programs or functools.partial(run_compiled, update)))
            _call(kept.program, grads, tensors)
            self._keep(now, kept)

    def _run_first(
        self,
        update: _Update,
        now: Fingerprint,
        settings: Callable[[], Fingerprint],
        grads: Gradients,
        tensors: Sequence[tf.Tensor],
    ) -> None:
        """Run an update with settings that are new, without compiling it."""
        update(grads, tensors)
        # What the optimizer changes in Python, such as a counter, would stay as it is when a program runs. Other
        # attributes are notes, which are made once: the next step finds the settings with them.
        if now.is_complete and settings().key == now.key:
            self._keep(now, _Kept(None, now.references()))
            self._settings += 1
            if self._settings > self._most_programs():
                self._tell()

    def _keep(self, fingerprint: Fingerprint, kept: "_Kept") -> None:
        self._kept[fingerprint.key] = kept
        while len(self._kept) > _MOST_KEYS:
            del self._kept[next(iter(self._kept))]

    def _most_programs(self) -> int:
        return _FREE_PROGRAMS + self._steps // _STEPS_PER_PROGRAM

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            _logger.warning(
                "the update of the variables is not compiled for now: settings of the optimizer have changed %d times "
                "in %d steps, and each change needs a new program.",
                self._settings - 1,
                self._steps,
            )


class _Kept(NamedTuple):
    """A program, or None before it is compiled; and references to the objects whose identities are in its key."""

    program: Any
    references: Sequence[Callable[[], object]]

    def is_valid(self) -> bool:
        return all(reference() is not None for reference in self.references)


def _function(update: _Update, **options: Any) -> Any:  # noqa: ANN401 - TensorFlow ships no types
    # Not an inner function: TensorFlow would take the functions for one, because they would share their code, and warn
    # that it is traced too often. In eager mode the numbers of rows of sparse gradients differ between calls.
    return tf.function(functools.partial(_run, update), autograph=False, reduce_retracing=True, **options)


def _run(update: _Update, grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
    update(grads, tensors)


def _call(program: Any, grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:  # noqa: ANN401
    # A tape, such as one in whose `with` the optimizer is called, would otherwise need a gradient of the program.
    with unrecorded():
        program([arithmetic.pad_rows(grad) for grad in grads], list(map(tf.convert_to_tensor, tensors)))
