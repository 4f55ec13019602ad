"""Makes lists of the gradients, variables and pairs that users pass."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.types import Gradient, GradsAndVars

#: How much of a wrong argument an error shows: the values of a tensor may be many.
_MOST_CHARACTERS = 200


def gradients(grads: Iterable[Gradient]) -> list[Gradient]:
    """Return gradients as a list; a generator could be gone through only once.

    Args:
        grads: What the user gave: any iterable of gradients and None, in an order.

    Raises:
        TypeError: It is none, or holds something else, such as pairs.

    Example:
        >>> [float(grad) for grad in gradients(tf.constant(value) for value in (1.0, 2.0))]
        [1.0, 2.0]
        >>> gradients(zip([None], ["kernel"]))
        Traceback (most recent call last):
            ...
        TypeError: grads must be a list of gradients, one for each variable, and it holds (None, 'kernel') of type
        tuple: pass the gradients alone, without their variables.
    """
    what = "a list of gradients, one for each variable"
    single = "pass [grad] for a single one" if _is_array(grads) else "pass what tape.gradient(loss, variables) returns"
    listed = items("grads", grads, what, single)
    for grad in listed:
        if isinstance(grad, str | bytes | Mapping | Sequence | Set):
            raise TypeError(
                f"grads must be {what}, and it holds {_shown(grad)}: pass the gradients alone, without their variables."
            )
    return listed


def refuse_all_none(grads: Iterable[Gradient], names: Iterable[str] = ()) -> None:
    """Refuse gradients of a loss that depends on none of the variables.

    Args:
        grads: The gradients.
        names: The names of the variables, for the error.

    Raises:
        ValueError: Every gradient is None.

    Example:
        >>> refuse_all_none([None], ["kernel"])
        Traceback (most recent call last):
            ...
        ValueError: every gradient is None: the loss depends on none of the variables kernel.
    """
    if all(grad is None for grad in grads):
        which = " ".join(["the variables", ", ".join(names)]).strip()
        raise ValueError(f"every gradient is None: the loss depends on none of {which}.")


def variables(name: str, given: Iterable[Any]) -> list[Any]:
    """Return variables as a list.

    Args:
        name: The argument's name, for the error.
        given: What the user gave: any iterable of variables, of TensorFlow or Keras, in an order.

    Raises:
        TypeError: It is none, or holds something else.

    Example:
        >>> variables("var_list", ["kernel"])
        Traceback (most recent call last):
            ...
        TypeError: var_list must be a list of variables, and it holds 'kernel' of type str: pass the variables
        themselves, alone.
    """
    advice = "pass [variable] for a single one" if _is_array(given) else "pass the variables to train"
    listed = items(name, given, "a list of variables", advice)
    for variable in listed:
        if not _is_variable(variable):
            raise TypeError(
                f"{name} must be a list of variables, and it holds {_shown(variable)}: pass the variables themselves, "
                "alone."
            )
    return listed


def pairs(grads_and_vars: GradsAndVars) -> list[tuple[Gradient, Any]]:
    """Return pairs of a gradient and its variable as a list.

    Args:
        grads_and_vars: What the user gave.

    Raises:
        TypeError: These are no pairs, or of other things.

    Example:
        >>> pairs([None])
        Traceback (most recent call last):
            ...
        TypeError: grads_and_vars must be pairs of a gradient and its variable, and it holds None of type NoneType:
        pass zip(grads, variables).
    """
    what, advice = "pairs of a gradient and its variable", "pass zip(grads, variables)"
    listed = items("grads_and_vars", grads_and_vars, what, advice)
    for pair in listed:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not (is_pair and _is_variable(pair[1]) and not isinstance(pair[0], str | bytes | Mapping | Sequence | Set)):
            raise TypeError(f"grads_and_vars must be {what}, and it holds {_shown(pair)}: {advice}.")
    return [(grad, variable) for grad, variable in listed]


def names(name: str, given: Iterable[str], of: str = "names") -> list[str]:
    """Return names as a list; a string, whose letters would be taken for names, is refused.

    Args:
        name: The argument's name, for the error.
        given: What the user gave.
        of: What the names are.

    Raises:
        TypeError: It is a string, or no list at all.

    Example:
        >>> names("var_names", "bias")
        Traceback (most recent call last):
            ...
        TypeError: var_names must be a list of names, got the string 'bias': write ['bias'].
    """
    if isinstance(given, str):
        raise TypeError(f"{name} must be a list of {of}, got the string {given!r}: write [{given!r}].")
    listed = items(name, given, f"a list of {of}", "pass a list of strings")
    for each in listed:
        # Where they are searched for, compiled expressions do too.
        if not isinstance(each, str | re.Pattern):
            raise TypeError(f"{name} must be a list of {of}, and it holds {_shown(each)}: pass strings.")
    return listed


def items(name: str, given: Iterable[Any], what: str, advice: str) -> list[Any]:
    """Return what an iterable holds, in its order, as a list.

    Args:
        name: The argument's name, for the error.
        given: What the user gave.
        what: What it must be.
        advice: What to do if it is not.

    Raises:
        TypeError: It is no iterable with an order; or a string, a dict, or one tensor, whose rows would be taken.
    """
    # The keys, values and items of a dict have an order.
    is_other = isinstance(given, str | bytes | Mapping | set | frozenset) or _is_array(given)
    if is_other or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be {what}, got {_shown(given)}: {advice}.")
    return list(given)


def _is_array(value: object) -> bool:
    # Variables of Keras 3 are no tensors of TensorFlow, and can be iterated too.
    return tf.is_tensor(value) or isinstance(value, np.ndarray) or _is_variable(value)


def _is_variable(value: object) -> bool:
    return hasattr(value, "assign")


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    shown = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."
    return f"{shown} of type {type(value).__name__}"
