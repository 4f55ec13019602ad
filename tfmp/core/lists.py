"""Turns the iterables of gradients, variables, pairs or names that users pass into lists, and checks their elements."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp.types import Gradient, GradsAndVars

#: The largest number of characters of a wrong argument in an error message: the text of a tensor can be very long.
_MOST_CHARACTERS = 200
#: What is certainly no gradient: perhaps a pair, or a list in the list.
_NO_GRADIENT = (str, bytes, Mapping, Sequence, Set)


def gradients(grads: Iterable[Gradient]) -> list[Gradient]:
    """Return gradients as a list."""
    what = "a list of gradients, one for each variable"
    listed = items("grads", grads, what, "pass what tape.gradient(loss, variables) returns", single="grad")
    for grad in listed:
        if isinstance(grad, _NO_GRADIENT):
            raise TypeError(
                f"grads must be {what}, and it holds {_shown(grad)}: pass the gradients alone, without their variables."
            )
    return listed


def refuse_all_none(grads: Iterable[Gradient], names: Iterable[str] = ()) -> None:
    """Refuse gradients of a loss that depends on none of the variables; the error lists the variables' names."""
    if all(grad is None for grad in grads):
        which = " ".join(["the variables", ", ".join(names)]).strip()
        raise ValueError(
            f"every gradient is None: the loss depends on none of {which}, or was scaled outside of the tape: compute "
            "it, and scale it, within `with tf.GradientTape() as tape:`."
        )


def refuse_complex(grads: Iterable[Gradient], names: Sequence[str] = ()) -> None:
    """Refuse complex gradients: they are neither finite nor infinite to TensorFlow, which compares real numbers only.

    The error has the name of the variable; without names, the number of the gradient.
    """
    for index, grad in enumerate(grads):
        dtype = tf.as_dtype(getattr(grad, "dtype", tf.float32))
        if dtype.is_complex:
            which = f"the gradient of {names[index]}" if names else f"gradient {index}"
            raise TypeError(
                f"{which} is of type {dtype.name}, and loss scaling is for real numbers: train the real and the "
                "imaginary part as two variables, and join them by tf.complex(real, imaginary)."
            )


def refuse_other_number(grads: Sequence[Gradient], variables: Sequence[Any]) -> None:
    """Refuse a list of gradients that does not have one entry for each variable."""
    if len(grads) != len(variables):
        raise ValueError(
            f"there are {len(grads)} gradients for {len(variables)} variables: pass one for each, None where the loss "
            "does not depend on it."
        )


def variables(name: str, given: Iterable[Any]) -> list[Any]:
    """Return TensorFlow or Keras variables as a list; `name` is that of the argument, for the error message."""
    listed = items(name, given, "a list of variables", "pass the variables to train", single="variable")
    for variable in listed:
        # No base class is common to the variables of TensorFlow, Keras 2 and Keras 3.
        if not hasattr(variable, "assign"):
            raise TypeError(
                f"{name} must be a list of variables, and it holds {_shown(variable)}: pass the variables themselves, "
                "alone."
            )
    return listed


def pairs(grads_and_vars: GradsAndVars) -> list[tuple[Gradient, Any]]:
    """Return pairs of a gradient and its variable as a list of tuples."""
    what, advice = "pairs of a gradient and its variable", "pass zip(grads, variables)"
    listed = items("grads_and_vars", grads_and_vars, what, advice)
    for pair in listed:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or isinstance(pair[0], _NO_GRADIENT) or not hasattr(pair[1], "assign"):
            raise TypeError(f"grads_and_vars must be {what}, and it holds {_shown(pair)}: {advice}.")
    return [(grad, variable) for grad, variable in listed]


def names(name: str, given: Iterable[Any], of: str = "names") -> list[Any]:
    """Return strings or compiled regular expressions as a list; `of` is the noun for them in the error message."""
    if isinstance(given, str):
        raise TypeError(f"{name} must be a list of {of}, got the string {given!r}: write [{given!r}].")
    listed = items(name, given, f"a list of {of}", "pass a list of strings")
    for each in listed:
        if not isinstance(each, str | re.Pattern):
            raise TypeError(f"{name} must be a list of {of}, and it holds {_shown(each)}: pass strings.")
    return listed


def items(name: str, given: Iterable[Any], what: str, advice: str, *, single: str | None = None) -> list[Any]:
    """Return the elements of an ordered iterable as a list; sets are refused, because they have no order.

    Strings, dicts, tensors and arrays are refused too: iterating over them would silently give letters, keys or rows.
    The error says `what` the right argument is, and gives `advice`; for an array, to pass it as a `single` element.
    """
    # A variable of Keras 3 is not a TensorFlow tensor, so `tf.is_tensor` does not find it; yet it can be iterated.
    is_array = tf.is_tensor(given) or isinstance(given, np.ndarray) or hasattr(given, "assign")
    # `set` and `frozenset` instead of `collections.abc.Set`: the keys and items of a dict are a `Set`, but ordered.
    is_other = isinstance(given, str | bytes | Mapping | set | frozenset)
    if is_array and single is not None:
        advice = f"pass [{single}] for a single one"
    if is_array or is_other or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be {what}, got {_shown(given)}: {advice}.")
    return list(given)


def values(grad: Gradient) -> Any:  # noqa: ANN401 - a tensor, or before `of_tensors` an array or a variable
    """Return what holds a gradient's values, by which it is known: its rows if it is sparse; None for None."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def of_tensors(grads: Iterable[Gradient]) -> list[Gradient]:
    """Return gradients with tensors as the parts of each `IndexedSlices`: these may be arrays or variables.

    The result has other objects, so first ask what needs the user's own.
    """

    def tensor(part: Any) -> tf.Tensor | None:  # noqa: ANN401 - an array or a variable too
        return None if part is None else tf.convert_to_tensor(part)

    return [
        tf.IndexedSlices(tensor(grad.values), tensor(grad.indices), tensor(grad.dense_shape))
        if isinstance(grad, tf.IndexedSlices)
        else grad
        for grad in grads
    ]


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    shown = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."
    return f"{shown} of type {type(value).__name__}"
