"""Unscales gradients and applies them by optimizers of Keras, in a program compiled by XLA where that saves time."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.derived_gradients import Change
from tfmp.core.gradients.norms import halves_of_square_sums
from tfmp.core.tensorflow_internals import within_xla
from tfmp.hosts.keras.clipping import clipped_by, clips_by_global_norm, true_norm
from tfmp.hosts.keras.compiler import UpdateCompiler
from tfmp.hosts.keras.fingerprint import Fingerprint
from tfmp.hosts.keras.kept_programs import run_compiled
from tfmp.hosts.keras.views import of_tensorflow, view_of
from tfmp.types import Done, Gradient, Gradients

# The optimizers of Keras 2 and Keras 3 have no common base class, and Keras' variables neither.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any


class KerasProgram:
    """Unscales gradients and applies them by an optimizer that is built; made anew for each step.

        plain       optimizer.apply(grads / scale)
        compiled    the same as one XLA program

    If the update is compiled, or XLA compiles the whole step, the program clips by the global norm in the optimizer's
    place. The check of the gradients has summed their squares already; within the optimizer XLA would sum them again,
    and slowly, on one core.

    Args:
        compiler: Says whether XLA compiles the program.
        variables: The variables, in the order of the gradients.
        taken: The indices of the gradients that are passed to the optimizer.
        options: Keyword arguments for the `apply_gradients` of an optimizer of Keras 2.
        method: The method of the optimizer that is called: "apply_gradients", or "apply" of Keras 3.
    """

    def __init__(
        self,
        compiler: UpdateCompiler,
        variables: Sequence[_Variable],
        taken: Sequence[int],
        *,
        options: Mapping[str, Any],
        method: str,
    ) -> None:
        self.compiler = compiler
        self.num_grads = len(variables)
        self.taken = taken
        self.variables = [variables[index] for index in taken]
        self.options = options
        self.method = method

    @functools.cached_property
    def is_compiled(self) -> bool:
        """True if XLA compiles the program."""
        return self.compiler.compiles(self.variables)

    @functools.cached_property
    def clips(self) -> bool:
        """True if the program clips by the global norm in the optimizer's place, for which it needs a measure."""
        if not ((self.is_compiled or within_xla()) and clips_by_global_norm(self.compiler.optimizer)):
            return False
        # A user's code may change the gradients before they are clipped.
        return self.compiler.is_by_keras_alone(self.variables)

    def measure(self, grads: Gradients, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        """Return what the program needs for clipping by the global norm; nothing if it does not clip.

        That is the norm of the unscaled gradients within XLA: there the conditional step runs as a loop, in which the
        norm would be slow, and computing it outside of the loop costs little even if the step is skipped. Otherwise it
        is the sums of squares from `halves_of_square_sums`. The check of the gradients computes the same sums, so
        they cost little beside it.
        """
        if not self.clips:
            return []
        halves = halves_of_square_sums(grads)
        return [true_norm(grads, halves, loss_scale)] if within_xla() else [halves]

    def apply(
        self,
        grads: Gradients,
        loss_scale: tf.Tensor,
        measures: Sequence[tf.Tensor],
        changes: Sequence[Change | None],
    ) -> Done:
        """Divide the gradients by the loss scale, change them, and apply them."""
        return ProgramsTogether([self]).apply(grads, loss_scale, measures, changes)


class ProgramsTogether:
    """Runs the programs of several optimizers, as one program for each device.

    The gradients stand in one list, in the order of the programs.
    """

    def __init__(self, programs: Sequence[KerasProgram]) -> None:
        self._programs = programs

    def measure(self, grads: Gradients, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        """Return what the programs that clip need, one measure for each."""
        each = zip(self._programs, self._split(grads), strict=True)
        return list(itertools.chain.from_iterable(program.measure(own, loss_scale) for program, own in each))

    def apply(
        self,
        grads: Gradients,
        loss_scale: tf.Tensor,
        measures: Sequence[tf.Tensor],
        changes: Sequence[Change | None],
    ) -> Done:
        """Divide the gradients by the loss scale, change them, and apply them."""
        rows = zip(
            self._programs,
            self._split(grads),
            split(measures, [int(bool(measures) and program.clips) for program in self._programs]),
            self._split(changes or [None] * len(grads)),
            strict=True,
        )
        # A program runs on one device; None stands for those that are not compiled.
        of_devices: dict[str | None, list[_Part]] = {}
        for program, own_grads, own_measures, own_changes in rows:
            device = of_tensorflow(program.variables[0]).device if program.is_compiled else None
            of_devices.setdefault(device, []).append(_part(program, own_grads, own_measures, own_changes))
        for device, parts in of_devices.items():
            _apply(parts, loss_scale, compiles=device is not None)
        return tf.no_op()

    def _split(self, values: Sequence[Any]) -> list[list[Any]]:
        return split(values, [program.num_grads for program in self._programs])


def split(values: Iterable[Any], lengths: Iterable[int]) -> list[list[Any]]:
    """Return the parts of a list that have these lengths, one after the other."""
    rest = iter(values)
    return [list(itertools.islice(rest, length)) for length in lengths]


class _Share(NamedTuple):
    """The share of one optimizer in a program, which takes gradients and norms as arguments."""

    program: KerasProgram
    changes: Sequence[Change | None]
    num_norms: int

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norms: Sequence[tf.Tensor]) -> None:
        optimizer = self.program.compiler.optimizer
        true_grads: Gradients = arithmetic.unscale(grads, loss_scale)
        if any(self.changes):
            true_grads = list(map(_changed, true_grads, self.changes))
        if not norms:
            self._apply(optimizer, true_grads)
            return
        (norm,) = norms
        with view_of(optimizer, global_clipnorm=None, clipvalue=None) as view:
            self._apply(view, clipped_by(norm, true_grads, optimizer))

    def _apply(self, optimizer: _Optimizer, grads: Gradients) -> None:
        variables = self.program.variables
        pairs = list(zip(grads, variables, strict=True))
        if self.program.method == "apply":
            _in_one_replica(lambda: optimizer.apply(list(grads), variables))
        elif hasattr(optimizer, "apply"):
            _in_one_replica(lambda: optimizer.apply_gradients(pairs))
        else:
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=True, **self.program.options)

    def settings(self) -> object:
        """Return all that the program depends on, apart from the values of variables."""
        of_variables = [
            [variable, *(getattr(variable, name, None) for name in _SETTINGS)] for variable in self.program.variables
        ]
        compiler = self.program.compiler
        return [
            compiler.optimizer,
            compiler.code_version,
            of_variables,
            self.num_norms,
            self.program.options,
            self.program.method,
        ]


#: The attributes of a model's variable that change what an optimizer does with it.
_SETTINGS = ("trainable", "constraint", "overwrite_with_gradient")


class _Part(NamedTuple):
    """What one optimizer does in a step: its share of the program, and what the program is given."""

    share: _Share
    grads: Gradients
    measures: Sequence[tf.Tensor]

    def norms(self, loss_scale: tf.Tensor) -> list[tf.Tensor]:
        if within_xla():
            return list(self.measures)
        return [true_norm(self.grads, halves, loss_scale) for halves in self.measures]


def _part(
    program: KerasProgram, grads: Gradients, measures: Sequence[tf.Tensor], changes: Sequence[Change | None]
) -> _Part:
    own_changes = [changes[index] for index in program.taken]
    return _Part(_Share(program, own_changes, len(measures)), [grads[index] for index in program.taken], measures)


def _apply(parts: Sequence[_Part], loss_scale: tf.Tensor, *, compiles: bool) -> None:
    # The function must not hold the gradients: in eager mode it is kept.
    shares = [part.share for part in parts]

    def update(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        loss_scale, *norms = tensors
        own_grads = split(grads, [len(share.program.variables) for share in shares])
        own_norms = split(norms, [share.num_norms for share in shares])
        for share, taken, measured in zip(shares, own_grads, own_norms, strict=True):
            share.run(taken, loss_scale, measured)

    grads = [grad for part in parts for grad in part.grads]
    tensors = [loss_scale, *(norm for part in parts for norm in part.norms(loss_scale))]
    if not compiles:
        update(grads, tensors)
    elif tf.executing_eagerly():
        programs = shares[0].program.compiler.programs
        programs.run(update, lambda: Fingerprint(share.settings() for share in shares), grads, tensors)
    else:
        run_compiled(update, grads, tensors)


def _in_one_replica(apply: Callable[[], None]) -> None:
    """Call a function that applies gradients, such that Keras 3 does not sum them over replicas if there is only one.

    The sum would change nothing, but TensorFlow (2.15 to 2.21) would keep its graph, and the values of all variables
    that the graph uses, until the process ends.
    """
    context = None if tf.distribute.has_strategy() else tf.distribute.get_replica_context()
    if context is None:
        apply()
    else:
        context.merge_call(lambda _: apply())


def _changed(grad: Gradient, change: Change | None) -> Gradient:
    return grad if change is None else arithmetic.map_values(change, grad)
