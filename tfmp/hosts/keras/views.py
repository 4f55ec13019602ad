"""Sees objects of Keras in another form: optimizers with other settings, and variables as those of TensorFlow."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def view_of(optimizer: Any, **attributes: Any) -> Iterator[Any]:  # noqa: ANN401 - of any Keras
    """Yield a view of an optimizer, which shares all its variables, with other values of some attributes.

    What the view's methods set, such as a counter of steps in Python, is set on the optimizer when the context ends; by
    an error too, as if the optimizer's own methods had run.

    Examples:
        >>> import keras
        >>> optimizer = keras.optimizers.SGD(0.5, clipvalue=1.0)
        >>> with view_of(optimizer, clipvalue=None) as view:
        ...     view.clipvalue, optimizer.clipvalue, view.iterations is optimizer.iterations
        (None, 1.0, True)
    """
    # copy.copy would serialize the optimizer and make new variables.
    view = object.__new__(type(optimizer))
    shared = dict(vars(optimizer))
    vars(view).update(shared, **attributes)
    try:
        yield view
    finally:
        for name, value in vars(view).items():
            if name not in attributes and (name not in shared or shared[name] is not value):
                vars(optimizer)[name] = value


def of_tensorflow(variable: Any) -> tf.Variable:  # noqa: ANN401 - of any Keras
    """Return the variable of TensorFlow in one of Keras 3, which trains both; return any other variable unchanged."""
    # The test is not for `keras.Variable`, because variables of Keras are not instances of that class before Keras 3.7.
    return variable if isinstance(variable, tf.Variable) else variable.value
