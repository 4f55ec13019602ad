"""Unscales gradients and applies them by optimizers of Keras, in a program compiled by XLA where that saves time."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.core.tensorflow_internals import within_xla
from tfmp.hosts.keras.compiler import UpdateCompiler
from tfmp.hosts.keras.programs.clipping import clips_by_global_norm, true_norm
from tfmp.hosts.keras.programs.fingerprint import Fingerprint
from tfmp.hosts.keras.programs.kept_programs import run_compiled
from tfmp.hosts.keras.programs.share import Share
from tfmp.hosts.keras.views import of_tensorflow
from tfmp.types import Done, Gradients

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

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norm: tf.Tensor | None) -> Done:
        """Divide the gradients by the loss scale, clip and apply them."""
        return ProgramsTogether([self]).run(grads, loss_scale, norm)


class ProgramsTogether:
    """Runs the programs of several optimizers, as one program for each device.

    The gradients stand in one list, in the order of the programs.
    """

    def __init__(self, programs: Sequence[KerasProgram]) -> None:
        self._programs = programs

    #: They have no norm in common, so each optimizer clips its own gradients.
    clips = False

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norm: tf.Tensor | None) -> Done:
        """Divide the gradients by the loss scale, clip and apply them."""
        norms = [] if norm is None else [true_norm(norm, loss_scale)]
        # A program runs on one device; None stands for those that are not compiled.
        of_devices: dict[str | None, list[_Part]] = {}
        for program, own_grads in zip(self._programs, self._split(grads), strict=True):
            device = of_tensorflow(program.variables[0]).device if program.is_compiled else None
            of_devices.setdefault(device, []).append(_part(program, own_grads, norms))
        for device, parts in of_devices.items():
            _apply(parts, loss_scale, compiles=device is not None)
        return tf.no_op()

    def _split(self, values: Sequence[Any]) -> list[list[Any]]:
        return split(values, [program.num_grads for program in self._programs])


def split(values: Iterable[Any], lengths: Iterable[int]) -> list[list[Any]]:
    """Return the parts of a list that have these lengths, one after the other."""
    rest = iter(values)
    return [list(itertools.islice(rest, length)) for length in lengths]


class _Part(NamedTuple):
    """What one optimizer does in a step: its share of the program, and what the program is given."""

    share: Share
    grads: Gradients
    norms: Sequence[tf.Tensor]


def _part(program: KerasProgram, grads: Gradients, norms: Sequence[tf.Tensor]) -> _Part:
    share = Share(program.compiler, program.variables, program.options, program.method, num_norms=len(norms))
    return _Part(share, [grads[index] for index in program.taken], norms)


def _apply(parts: Sequence[_Part], loss_scale: tf.Tensor, *, compiles: bool) -> None:
    # The functions must not hold the gradients: in eager mode they are kept.
    shares = [part.share for part in parts]

    def update(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        for share, of_share in zip(shares, _arguments(shares, grads, tensors), strict=True):
            share.run(*of_share)

    def by_programs(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        arguments = list(zip(shares, _arguments(shares, grads, tensors), strict=True))
        can_be_split = all(share.can_be_split for share in shares) and all(grad is not None for grad in grads)
        if can_be_split and any(share.has_alike(taken) for share, (taken, *_) in arguments):
            for share, of_share in arguments:
                share.run_by_programs(*of_share)
        else:
            run_compiled(update, grads, tensors)

    grads = [grad for part in parts for grad in part.grads]
    tensors = [loss_scale, *(norm for part in parts for norm in part.norms)]
    if not compiles:
        update(grads, tensors)
    elif tf.executing_eagerly():
        programs = shares[0].compiler.programs
        programs.run(update, lambda: Fingerprint(share.settings() for share in shares), grads, tensors, by_programs)
    else:
        by_programs(grads, tensors)


def _arguments(
    shares: Sequence[Share], grads: Gradients, tensors: Sequence[tf.Tensor]
) -> Iterator[tuple[Gradients, tf.Tensor, list[tf.Tensor]]]:
    """Yield what each share is called with, if all get the gradients, the loss scale and the norms of all."""
    loss_scale, *norms = tensors
    own_grads = split(grads, [len(share.variables) for share in shares])
    own_norms = split(norms, [share.num_norms for share in shares])
    for taken, measured in zip(own_grads, own_norms, strict=True):
        yield taken, loss_scale, measured
