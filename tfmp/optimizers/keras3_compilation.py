"""Compiles an optimizer's update with XLA into one program, which reads and writes each variable once."""

import math
import sys
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.core.tracing import within_xla
from tfmp.types import Gradients

#: The smallest numbers of values, in all variables together and on average in each, for which compiling saves time.
#: With fewer values the compilation takes longer than what it saves in hundreds of steps.
_MANY = 2**20
_MANY_FOR_EACH = 2**14


def run_compiled(
    update: Callable[[Gradients, Sequence[tf.Tensor]], object], grads: Gradients, tensors: Sequence[tf.Tensor]
) -> None:
    """Run an update of variables as a program that XLA compiles.

    Every call makes a program of its own. Call this function inside a `tf.function`, which calls it only once for each
    trace. The update then uses the values that Python objects have during that trace, like all other code of the trace.

    XLA compiles the program again for every new shape. Sparse gradients are therefore padded with rows of zeros, so
    that few different shapes occur.

    Args:
        update: A function of the gradients and the tensors that updates variables.
        grads: The gradients.
        tensors: Further tensors that the update needs, such as the learning rate.

    Example:
        >>> w = tf.Variable([1.0, 2.0])
        >>> @tf.function
        ... def step():
        ...     run_compiled(lambda grads, tensors: w.assign_sub(grads[0] * tensors[0]), [tf.ones([2])], [0.5])
        >>> step()
        >>> w.numpy()
        array([0.5, 1.5], dtype=float32)
    """

    def run(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        update(grads, tensors)

    padded = [arithmetic.pad_rows(grad) for grad in grads]
    tf.function(run, jit_compile=True, autograph=False)(padded, list(map(tf.convert_to_tensor, tensors)))


def can_be_compiled() -> bool:
    """Return whether an update that is built at this point can be compiled separately.

    It cannot be compiled in eager mode, where each call would compile it again; if XLA compiles the whole step already;
    or if the replicas of a `tf.distribute` strategy update variables together.

    Example:
        >>> can_be_compiled()
        False
    """
    return not (tf.executing_eagerly() or within_xla() or tf.distribute.has_strategy())


def worth_compiling(variables: Sequence[tf.Variable]) -> bool:
    """Return whether compiling the update of these variables is possible on their device and saves time.

    The time to compile grows with the number of variables. The time saved at each step grows with the number of their
    values. The variables must therefore have at least 2**20 values together and at least 2**14 on average. They must
    all be on one device, which must not be an Apple GPU.

    Args:
        variables: The variables that the update changes.

    Example:
        >>> worth_compiling([tf.Variable(tf.zeros([10]))])
        False
        >>> worth_compiling([tf.Variable(tf.zeros([1024, 1024]))])
        True
    """
    values = sum(math.prod(variable.shape) for variable in variables)
    is_large = values >= max(_MANY, _MANY_FOR_EACH * len(variables))
    # An XLA program runs on a single device.
    is_on_one_device = len({variable.device for variable in variables}) == 1
    apple_gpu = sys.platform == "darwin" and bool(tf.config.list_physical_devices("GPU"))
    return is_large and is_on_one_device and not apple_gpu
