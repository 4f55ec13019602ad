"""exponent_counts, the public function: the core's, and the sum over replicas."""

import tensorflow as tf

from tfmp.core.distribute import current_distribution
from tfmp.core.gradients import exponents
from tfmp.types import Gradients


def exponent_counts(tensors: Gradients, *, is_distributed: bool = False, name: str = "exponent_counts") -> tf.Tensor:
    """Count, on the device, how many values of each tensor have which binary exponent.

    Counts are exact for every dtype, subnormal numbers included, in eager code, in a `tf.function`, within XLA and in
    TF1 graphs. A row of the result is what `tfmp.ranges.RangeHistogram` takes.

    Args:
        tensors: Gradients, weights or activations of float16, bfloat16, float32 or float64, of any shape. A
            `tf.IndexedSlices` counts the values of its rows; rows with the same index are not summed before. None has
            no values.
        is_distributed: True to sum the counts over the replicas of the active `tf.distribute` strategy, or over the
            workers of Horovod. All of them must then call this function.
        name: A name for the exchange with other workers, different for each call in a step.

    Returns:
        An int64 tensor of shape `[len(tensors), 283]`. Its columns are the numbers of values from `2**e` to below
        `2**(e + 1)` for the exponents -150 to 127, then the numbers of zeros, of infinities, of NaN, and of float64
        values between 0 and `2**-150`, and finite ones from `2**128` on.

    Raises:
        TypeError: A tensor does not have a floating-point dtype.
        ValueError: `is_distributed` is True, and nothing distributes.

    Examples:
        >>> import tfmp
        >>> counts = tfmp.ranges.exponent_counts([tf.constant([0.75, -0.5, 3.0], tf.float16)])
        >>> int(counts[0, 150 - 1]), int(counts[0, 150 + 1])
        (2, 1)
        >>> tfmp.ranges.RangeHistogram(counts[0])
        <RangeHistogram of 3 values, 2^-1..2^1>
    """
    tensors = list(tensors)
    counts = exponents.exponent_counts(tensors) if tensors else tf.zeros([0, exponents.NUM_COUNTS], tf.int64)
    return current_distribution(True).total(counts, name) if is_distributed else counts
