"""Finds variables whose updates by an optimizer of Keras differ in nothing but the variables."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmp.hosts.keras.internals import decays, index_of, num_built_with
from tfmp.hosts.keras.own_code import is_of_keras
from tfmp.hosts.keras.views import of_tensorflow

# The optimizers of Keras 2 and Keras 3 have no common base class, and Keras' variables neither.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any

#: The classes of Keras 2 and Keras 3 whose update of a variable depends on nothing else than its gradient, itself, its
#: slots and the settings of the optimizer. That of Muon depends on the variable's name as well, and Nadam has a product
#: that changes once in each step.
_CLASSES = frozenset(
    ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Ftrl", "Lion", "Lamb")
)

#: Settings with which each update changes something of all variables, or scales once more.
_TOGETHER = ("use_ema", "gradient_accumulation_steps", "loss_scale_factor")

#: The most values that one program updates if others could share it.
_MOST_VALUES = 2**18


def can_share_programs(optimizer: _Optimizer, variables: Sequence[_Variable]) -> bool:
    """Return whether a program can update any variables of one shape and type, and later others.

    The optimizer, of Keras 2 or Keras 3, must be built, and must run no code but Keras' own.

    Examples:
        >>> import keras
        >>> w, adam, averaging = tf.Variable([1.0]), keras.optimizers.Adam(), keras.optimizers.Adam(use_ema=True)
        >>> can_share_programs(adam, [w]), can_share_programs(averaging, [w])
        (True, False)
    """
    # That of an optimizer with half-precision state is a subclass of `plain_class`.
    known = getattr(type(optimizer), "plain_class", type(optimizer))
    is_known = is_of_keras(optimizer) and known.__name__ in _CLASSES
    if not is_known or any(getattr(optimizer, name, None) for name in _TOGETHER):
        return False
    return all(getattr(variable, "constraint", None) is None for variable in variables)


class StateOfVariables:
    """The variables of an optimizer of Keras, which is built, by the variables of the model to which they belong.

    Examples:
        >>> import keras
        >>> w, optimizer = tf.Variable([1.0, 2.0]), keras.optimizers.SGD(momentum=0.5)
        >>> optimizer.build([w])
        >>> state = StateOfVariables(optimizer)
        >>> [tuple(each.shape) for each in state.of(w)], len(state.of_all)  # iterations and learning rate
        ([(2,), (2,)], 2)
    """

    def __init__(self, optimizer: _Optimizer) -> None:
        self._optimizer = optimizer
        attributes = list(vars(optimizer).values())
        #: The variables that the updates of all variables use.
        self.of_all: list[tf.Variable] = [_variable_in(each) for each in attributes if _is_variable(each)]
        self._slots = [each for each in attributes if isinstance(each, list) and self._are_slots(each)]

    def of(self, variable: _Variable) -> list[tf.Variable]:
        """Return a variable of the model and its slots, always in the same order."""
        place = index_of(self._optimizer, variable)
        # The optimizer also has a list of the variables of the model.
        own = [_variable_in(each) for each in (variable, *(each[place] for each in self._slots)) if each is not None]
        return list({id(each): each for each in own}.values())

    def alike(
        self, variables: Sequence[_Variable], others: Sequence[Hashable] | None = None
    ) -> list[tuple[Hashable, list[int]]]:
        """Return the places of variables, in lists of those that one program is to update, and the kind of each list.

        Programs for lists of one kind differ in nothing but the variables. The variables of a list are alike, too.
        `others` has something for each variable that is also equal for those that are alike.
        """
        kinds: list[Hashable] = [self._kind(variable) for variable in variables]
        if others is not None:
            kinds = list(zip(kinds, others, strict=True))
        sizes = [math.prod(variable.shape) for variable in variables]
        return [((kinds[places[0]], len(places)), places) for places in in_lists(kinds, sizes)]

    def num_compiled(self, variables: Sequence[_Variable]) -> int:
        """Return how many updates of a variable are compiled if programs are shared."""
        programs = {kind: len(places) for kind, places in self.alike(variables)}
        return sum(programs.values())

    def _kind(self, variable: _Variable) -> Hashable:
        own = tuple((tuple(each.shape), each.dtype, each.device) for each in self.of(variable))
        # Keras notes the answer in an attribute of the optimizer, whose settings would then seem to change.
        is_decayed = bool(self._optimizer.weight_decay) and decays(self._optimizer, variable)
        return own, is_decayed

    def _are_slots(self, values: list[Any]) -> bool:
        """Return whether a list has a variable, or None, for each variable of the model."""
        if len(values) != num_built_with(self._optimizer):
            return False
        of_all = set(map(id, self.of_all))
        return all(each is None or (_is_variable(each) and id(_variable_in(each)) not in of_all) for each in values)


def in_lists(kinds: Sequence[Hashable], sizes: Sequence[int]) -> list[list[int]]:
    """Return the places of variables, in lists of those that one program is to update.

    The variables in a list are of one kind, and the lists of a kind have the same length, but for the last of them. A
    program for several small variables saves calls, but takes longer to compile. So the length of the lists is about
    the square root of the number of alike variables: a power of two that is not above it.

    Args:
        kinds: For each variable something that is equal for those that are alike.
        sizes: The number of values of each variable.

    Examples:
        >>> in_lists(["w", "b", "w", "b", "b", "b", "b"], [2**20, 4, 2**20, 4, 4, 4, 4])
        [[0], [2], [1, 3], [4, 5], [6]]
    """
    places: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    found = []
    for alike in places.values():
        most = max(1, _MOST_VALUES // max(1, sizes[alike[0]]))
        length = min(most, 2 ** int(math.log2(len(alike)) / 2))
        found += [alike[start : start + length] for start in range(0, len(alike), length)]
    return found


def _is_variable(value: Any) -> bool:  # noqa: ANN401 - whatever an optimizer holds
    # Keras' variables, and nothing else of Keras, have `numpy`.
    is_of_any = isinstance(value, tf.Variable) or (is_of_keras(value) and hasattr(value, "numpy"))
    return is_of_any or _is_view(value)


def _is_view(value: Any) -> bool:  # noqa: ANN401 - as above
    """Return whether something stands for a variable, as the view of one in half precision does."""
    return isinstance(getattr(value, "variable", None), tf.Variable)


def _variable_in(value: Any) -> tf.Variable:  # noqa: ANN401 - a variable of any kind, or a view of one
    variable: tf.Variable = value.variable if _is_view(value) else of_tensorflow(value)
    return variable
