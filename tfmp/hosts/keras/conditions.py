"""What an update depends on: the conditions under which it is compiled, views of optimizers, their variables."""

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core.tracing import within_xla

#: The smallest numbers of values, in all variables together and on average in each, for which compiling saves time.
#: With fewer values the compilation takes longer than what it saves in hundreds of steps.
_MANY = 2**20
_MANY_FOR_EACH = 2**14


def can_be_compiled() -> bool:
    """Return whether an update at this point can be a compiled program of its own.

    It cannot be one if XLA compiles the whole step already, or if the replicas of a `tf.distribute` strategy update
    variables together.
    """
    return not (within_xla() or tf.distribute.has_strategy())


def worth_compiling(variables: Sequence[tf.Variable]) -> bool:
    """Return whether compiling the update of these variables is possible on their device and saves time.

    The time to compile grows with the number of variables. The time saved at each step grows with the number of their
    values. The variables must therefore have at least 2**20 values together and at least 2**14 on average. They must
    all be on one device, which must not be an Apple GPU.
    """
    values = sum(math.prod(variable.shape) for variable in variables)
    is_large = values >= max(_MANY, _MANY_FOR_EACH * len(variables))
    # An XLA program runs on a single device.
    is_on_one_device = len({variable.device for variable in variables}) == 1
    apple_gpu = sys.platform == "darwin" and bool(tf.config.list_physical_devices("GPU"))
    return is_large and is_on_one_device and not apple_gpu


def of_tensorflow(variable: Any) -> tf.Variable:  # noqa: ANN401 - of any Keras
    """Return the variable of TensorFlow in one of Keras 3, which trains both; return any other variable unchanged."""
    # The test is not for `keras.Variable`, because variables of Keras are not instances of that class before Keras 3.7.
    return variable if isinstance(variable, tf.Variable) else variable.value


@contextlib.contextmanager
def view_of(optimizer: Any, **attributes: Any) -> Iterator[Any]:  # noqa: ANN401 - of any Keras
    """Yield a view of an optimizer, which shares all its variables, with other values of some attributes.

    What the view's methods set, such as a counter of steps in Python, is set on the optimizer when the context ends.

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
    yield view
    for name, value in vars(view).items():
        if name not in attributes and (name not in shared or shared[name] is not value):
            vars(optimizer)[name] = value


def has_no_conditional(optimizer: Any) -> bool:  # noqa: ANN401 - of either Keras
    """Return whether an update of Keras' own contains no conditional, which would copy variables in an XLA program."""
    # The settings of a MultiOptimizer say nothing about the optimizers inside it. The optimizers of Keras 2 do not
    # accumulate gradients.
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    return not (_inner_optimizers(optimizer) or optimizer.ema_overwrite_frequency or accumulates)


def parts_with_code(optimizer: Any, variables: Sequence[Any]) -> list[object]:  # noqa: ANN401 - of either Keras
    """Return the objects whose code computes an update: the optimizer, its schedule and the constraints."""
    optimizers = [optimizer, *_inner_optimizers(optimizer)]
    # `_learning_rate` is private, but the public property gives only the value at this step, not the schedule.
    rates = [each._learning_rate for each in optimizers]
    constraints = [getattr(variable, "constraint", None) for variable in variables]
    # In Keras 2 a learning rate that is no schedule is a variable of TensorFlow's.
    parts = [each for each in [*rates, *constraints] if not (each is None or isinstance(each, tf.Variable))]
    return [*optimizers, *parts]


def _inner_optimizers(optimizer: Any) -> list[Any]:  # noqa: ANN401 - of either Keras
    # Only a MultiOptimizer has some. Older versions of Keras do not have this class.
    return list(getattr(optimizer, "optimizers", []))
