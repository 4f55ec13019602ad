"""Compiles the update of variables into one program, which reads and writes each of them once."""

import math
import sys
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfmp.core import numerics
from tfmp.core.xla import within_xla
from tfmp.types import Gradients

#: Variables with fewer values are updated in less time than their program is compiled in, for hundreds of steps.
_MANY = 2**20
_MANY_FOR_EACH = 2**14


def run_compiled(
    update: Callable[[Gradients, Sequence[tf.Tensor]], object], grads: Gradients, tensors: Sequence[tf.Tensor]
) -> None:
    """Run an update of variables as a program that XLA compiles.

    Every call makes its own program, so it belongs into a `tf.function`, which calls once for each of its traces: what
    the update finds in Python objects is then as new as all else in that trace. The program is compiled again for other
    shapes; sparse gradients get rows of zeros, so that batches of many sizes make few of them.

    Args:
        update: Updates variables by gradients and further tensors.
        grads: The gradients.
        tensors: What else the update needs.

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

    padded = [numerics.pad_rows(grad) for grad in grads]
    tf.function(run, jit_compile=True, autograph=False)(padded, list(map(tf.convert_to_tensor, tensors)))


def can_be_compiled() -> bool:
    """Tell whether an update that is called here can be compiled by itself.

    It cannot in eager code, nor where XLA compiles the whole step, nor where replicas of a `tf.distribute` strategy
    update variables together.

    Example:
        >>> can_be_compiled()
        False
    """
    return not (tf.executing_eagerly() or within_xla() or tf.distribute.has_strategy())


def worth_compiling(variables: Sequence[tf.Variable]) -> bool:
    """Tell whether variables are so large that compiling their update pays, and where XLA can update them.

    Time to compile grows with their number, the time won at each step with the number of their values. The rule: 2**20
    values or more, and 2**14 or more to a variable on average; all on one device, which is no GPU of Apple's.

    Args:
        variables: The variables.

    Example:
        >>> worth_compiling([tf.Variable(tf.zeros([10]))])
        False
        >>> worth_compiling([tf.Variable(tf.zeros([1024, 1024]))])
        True
    """
    values = sum(math.prod(variable.shape) for variable in variables)
    is_large = values >= max(_MANY, _MANY_FOR_EACH * len(variables))
    is_on_one_device = len({variable.device for variable in variables}) == 1
    apple_gpu = sys.platform == "darwin" and bool(tf.config.list_physical_devices("GPU"))
    return is_large and is_on_one_device and not apple_gpu
