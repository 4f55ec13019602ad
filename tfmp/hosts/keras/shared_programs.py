"""Updates variables by few compiled programs: variables that are alike share one.

XLA takes as long for the update of a variable as for that of the one before, although both are the same program if the
variables have one shape. So it is compiled once for a few variables, and called again with others in their place.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.any_keras.internals import built_with, decays, index_of, not_counting
from tfmp.any_keras.which import is_of_keras, of_tensorflow
from tfmp.core.gradients import arithmetic
from tfmp.types import Gradient, Gradients

# The optimizers of Keras 2 and Keras 3 have no common base class, and Keras' variables neither.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any

#: Updates variables by an optimizer, with a gradient for each, and with tensors that all updates use.
Update: TypeAlias = Callable[[_Optimizer, Sequence[_Variable], Gradients, Sequence[tf.Tensor]], None]

#: The classes of Keras 2 and Keras 3 whose update of a variable depends only on its gradient, itself, its slots and the
#: settings. That of Muon depends on the variable's name too, and Nadam has a product that changes once in each step.
_CLASSES = frozenset(
    ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Ftrl", "Lion", "Lamb")
)
#: Settings with which each update changes something of all variables, or scales once more.
_TOGETHER = ("use_ema", "gradient_accumulation_steps", "loss_scale_factor")
#: The most values that one program updates if others could share it.
_MOST_VALUES = 2**18


def num_compiled(optimizer: _Optimizer, variables: Sequence[_Variable]) -> int:
    """Return for how many variables XLA compiles the update by an optimizer that is built and runs Keras' own code."""
    if not _can_share(optimizer, variables):
        return len(variables)
    kinds = _kinds(optimizer, variables, _own_of_each(optimizer, variables))
    return sum({program: len(places) for program, places in _in_lists(kinds, variables)}.values())


def run_shared(
    update: Update,
    optimizer: _Optimizer,
    variables: Sequence[_Variable],
    grads: Gradients,
    tensors: Sequence[tf.Tensor],
) -> bool:
    """Update variables by programs that some of them share; return False, having done nothing, if none would.

    Call this in a `tf.function`, while no tape records, for an optimizer as in `num_compiled`.
    """
    if any(grad is None for grad in grads) or not _can_share(optimizer, variables):
        return False
    owned = _own_of_each(optimizer, variables)
    kinds = list(zip(_kinds(optimizer, variables, owned), map(_form, grads, range(len(grads))), strict=True))
    lists = _in_lists(kinds, variables)
    if len({program for program, _ in lists}) == len(lists):
        return False
    programs: dict[Hashable, _Program] = {}
    with not_counting(optimizer) as view:
        for name, places in lists:
            own = [each for place in places for each in owned[place]]
            given = [arithmetic.pad_rows(grads[place]) for place in places], list(tensors), _numbers(own)
            if name not in programs:
                some = [variables[place] for place in places]
                programs[name] = _Program(functools.partial(update, view, some), own, given)
            programs[name].call(own, given)
    optimizer.iterations.assign_add(1)
    return True


def _in_lists(kinds: Sequence[Hashable], variables: Sequence[_Variable]) -> list[tuple[Hashable, list[int]]]:
    """Return the places of variables, in lists that a program updates, and what is equal for the lists of a program.

    Longer lists save calls, but take longer to compile: their length is the largest power of two not above the square
    root of the number of variables of a kind.
    """
    places: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    found: list[tuple[Hashable, list[int]]] = []
    for kind, alike in places.items():
        most = _MOST_VALUES // max(1, math.prod(variables[alike[0]].shape))
        length = max(1, min(most, 2 ** int(math.log2(len(alike)) / 2)))
        lists = [alike[start : start + length] for start in range(0, len(alike), length)]
        found += [((kind, len(each)), each) for each in lists]
    return found


def _can_share(optimizer: _Optimizer, variables: Sequence[_Variable]) -> bool:
    # An optimizer with half-precision state is of a subclass of `plain_class`.
    known = getattr(type(optimizer), "plain_class", type(optimizer))
    is_known = is_of_keras(optimizer) and known.__name__ in _CLASSES
    if not is_known or any(getattr(optimizer, name, None) for name in _TOGETHER):
        return False
    # A weight in half precision is rounded with random numbers that follow from its place.
    return all(
        getattr(variable, "constraint", None) is None and tf.as_dtype(variable.dtype).size >= tf.float32.size
        for variable in variables
    )


def _own_of_each(optimizer: _Optimizer, variables: Sequence[_Variable]) -> list[list[Any]]:
    """Return each variable with its slots, or views of slots in half precision, always in the same order."""
    attributes = list(vars(optimizer).values())
    # A list of these, such as learning rates, may be as long as that of a slot.
    of_all = {id(_variable_in(each)) for each in attributes if _is_variable(each)}
    lists = [each for each in attributes if isinstance(each, list) and len(each) == len(built_with(optimizer))]
    found = []
    for variable in variables:
        place = index_of(optimizer, variable)
        # The list of a slot can have None, and one list is of the model's variables.
        own = {
            id(_variable_in(each)): each for each in (variable, *(slot[place] for slot in lists)) if _is_variable(each)
        }
        found.append([each for key, each in own.items() if key not in of_all])
    return found


def _kinds(optimizer: _Optimizer, variables: Sequence[_Variable], owned: Sequence[Sequence[Any]]) -> list[Hashable]:
    """Return for each variable what is equal for those of which one program can update any."""
    # `decays` makes Keras note the answer, as if settings had changed.
    decayed = [bool(optimizer.weight_decay) and decays(optimizer, variable) for variable in variables]
    forms = [tuple((tuple(each.shape), each.dtype, each.device) for each in map(_variable_in, own)) for own in owned]
    return list(zip(decayed, forms, strict=True))


def _form(grad: Gradient, place: int) -> Hashable:
    """Return what is equal for gradients, at different places, with which one program can be called."""
    # Sparse gradients may have different numbers of rows. A dense one may be broadcast to its variable.
    return (grad.dtype, str(grad.shape)) if isinstance(grad, tf.Tensor) else place


def _is_variable(value: Any) -> bool:  # noqa: ANN401 - whatever an optimizer holds
    # Keras' variables, and nothing else of Keras, have `numpy`.
    held = getattr(value, "variable", value)
    return isinstance(held, tf.Variable) or (is_of_keras(held) and hasattr(held, "numpy"))


def _variable_in(value: Any) -> tf.Variable:  # noqa: ANN401 - a variable of any kind, or a view of one
    return of_tensorflow(getattr(value, "variable", value))


def _numbers(own: Sequence[Any]) -> list[tf.Tensor]:
    """Return the numbers of views, from which the random numbers of their rounding follow."""
    return [tf.constant(each.number) for each in own if hasattr(each, "number")]


@contextlib.contextmanager
def _with_numbers(own: Sequence[Any], numbers: Sequence[tf.Tensor]) -> Iterator[None]:
    """Let views round with these numbers in the place of their own."""
    views = [each for each in own if hasattr(each, "number")]
    before = [view.number for view in views]
    try:
        for view, number in zip(views, numbers, strict=True):
            view.number = number
        yield
    finally:
        for view, number in zip(views, before, strict=True):
            view.number = number


#: Gradients, tensors that all updates use, and numbers of views.
_Given: TypeAlias = tuple[Gradients, Sequence[tf.Tensor], Sequence[tf.Tensor]]


class _Program:
    """An update of some variables, compiled, which can update others of their kind."""

    def __init__(self, update: Callable[..., None], own: Sequence[Any], given: _Given) -> None:
        def run(grads: Gradients, tensors: Sequence[tf.Tensor], numbers: Sequence[tf.Tensor]) -> None:
            with _with_numbers(own, numbers):
                update(grads, tensors)

        # TensorFlow would warn of retracing, as inner functions share their code.
        function = tf.function(functools.partial(run), jit_compile=True, autograph=False)
        self._function = function.get_concrete_function(*given)
        self._captured = self._function.captured_inputs
        self._own = _handles(own)

    def call(self, own: Sequence[Any], given: _Given) -> None:
        """Run the program with other variables in the place of its own."""
        others = dict(zip(map(id, self._own), _handles(own), strict=True))
        self._function.set_external_captures([others.get(id(each), each) for each in self._captured])
        self._function(*given)


def _handles(own: Sequence[Any]) -> list[tf.Tensor]:
    return [_variable_in(each).handle for each in own]
