"""Histograms over powers of two in the form of TensorBoard's histograms.

TensorBoard's own op cannot be used: it fails on values that are not finite, and its buckets are linear, so that all
small values share one. Here the horizontal axis is the exponent, and only finite values are shown.
"""

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfmp.core.gradients.exponents import LOWEST_EXPONENT
from tfmp.ranges.histogram import RangeHistogram

#: Tells TensorBoard's plugin for histograms that a tensor is one.
HISTOGRAM_METADATA = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="histograms"),
    data_class=2,  # the value of DATA_CLASS_TENSOR, which TensorFlow does not export
)


def buckets(histogram: RangeHistogram) -> npt.NDArray[np.float64]:
    """Return a histogram as TensorBoard stores it: rows of a left edge, a right edge, and a count.

    Examples:
        >>> buckets(RangeHistogram.of(tf.constant([0.5, 0.75, 2.0, float("inf")]))).tolist()
        [[-1.0, 0.0, 2.0], [0.0, 1.0, 0.0], [1.0, 2.0, 1.0]]
    """
    found = np.flatnonzero(histogram.counts)
    if not found.size:
        return np.zeros([0, 3])
    columns = np.arange(found[0], found[-1] + 1)
    edges = (columns + LOWEST_EXPONENT).astype(np.float64)
    return np.stack([edges, edges + 1, histogram.counts[columns]], axis=1)


def summary_value(tag: str, histogram: RangeHistogram) -> tf.compat.v1.Summary.Value:
    """Return a histogram for a `tf.compat.v1.Summary`."""
    return tf.compat.v1.Summary.Value(
        tag=tag, metadata=HISTOGRAM_METADATA, tensor=tf.make_tensor_proto(buckets(histogram))
    )
