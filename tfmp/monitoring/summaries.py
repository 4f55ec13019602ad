"""Summaries for TensorBoard: numbers, and histograms over powers of two.

TensorBoard's own op for histograms cannot be used: it fails on values that are not finite, and its buckets are linear,
so that all small values share one. Here the horizontal axis is the exponent, and only finite values are shown.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfmp.ranges.exponents import LOWEST_EXPONENT
from tfmp.ranges.histogram import RangeHistogram

# These tell TensorBoard which of its plugins shows a tensor.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"),
    data_class=1,  # the value of DATA_CLASS_SCALAR, which TensorFlow does not export
)
_HISTOGRAM = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="histograms"),
    data_class=2,  # the value of DATA_CLASS_TENSOR, which TensorFlow does not export
)


class FitSummaries:
    """Writes numbers and histograms during `fit`, to a directory for TensorBoard; without one it writes nothing.

    The file is made when something is written first.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._writer: tf.summary.SummaryWriter | None = None

    def write(
        self, step: int, scalars: Mapping[str, float], histograms: Iterable[tuple[str, RangeHistogram]] = ()
    ) -> None:
        """Write to the disk."""
        if self._directory is None:
            return
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._directory)
        # record_if: Keras' TensorBoard callback sets for the whole of `fit` whether summaries are recorded.
        with self._writer.as_default(step), tf.summary.record_if(True):
            for tag, value in scalars.items():
                # This writes what tf.summary.scalar would write; that function needs TensorBoard to be installed.
                tf.summary.write(tag, np.float32(value), metadata=_SCALAR)
            for tag, histogram in histograms:
                tf.summary.write(tag, buckets(histogram), metadata=_HISTOGRAM)
        self._writer.flush()


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
    return tf.compat.v1.Summary.Value(tag=tag, metadata=_HISTOGRAM, tensor=tf.make_tensor_proto(buckets(histogram)))
