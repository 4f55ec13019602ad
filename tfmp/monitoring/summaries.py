"""Summaries for TensorBoard: numbers, and histograms over powers of two.

TensorBoard's own op for histograms cannot be used: it fails on values that are not finite, and its buckets are linear,
so that all small values share one. Here the horizontal axis is the exponent, and only finite values are shown.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfmp.ranges.exponents import LOWEST_EXPONENT
from tfmp.ranges.histogram import RangeHistogram

_Histograms: TypeAlias = Iterable[tuple[str, RangeHistogram]]


def _metadata(plugin: str, data_class: int) -> tf.compat.v1.SummaryMetadata:
    """Return what tells TensorBoard which of its plugins shows a tensor; TensorFlow does not export the classes."""
    data = tf.compat.v1.SummaryMetadata.PluginData(plugin_name=plugin)
    return tf.compat.v1.SummaryMetadata(plugin_data=data, data_class=data_class)


_SCALAR, _HISTOGRAM = _metadata("scalars", data_class=1), _metadata("histograms", data_class=2)


class FitSummaries:
    """Writes during `fit` to a file in a directory, made when something is written first; without one, nothing."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._writer: tf.summary.SummaryWriter | None = None

    def write(self, step: int, scalars: Mapping[str, float], histograms: _Histograms = ()) -> None:
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

    def flush(self) -> None:
        """Do nothing: all is on the disk."""


class GraphSummaries:
    """Writes in a session of the current graph, to the file of a directory that other hooks write to as well."""

    def __init__(self, directory: str | None) -> None:
        self._writer = tf.compat.v1.summary.FileWriterCache.get(directory) if directory else None

    def write(self, step: int, scalars: Mapping[str, float], histograms: _Histograms = ()) -> None:
        """Write to the file, which may keep it in memory."""
        if self._writer is not None:
            value = tf.compat.v1.Summary.Value
            values = [value(tag=tag, simple_value=float(number)) for tag, number in scalars.items()]
            tensors = [(tag, tf.make_tensor_proto(buckets(histogram))) for tag, histogram in histograms]
            values += [value(tag=tag, metadata=_HISTOGRAM, tensor=tensor) for tag, tensor in tensors]
            self._writer.add_summary(tf.compat.v1.Summary(value=values), step)

    def flush(self) -> None:
        """Write to the disk."""
        if self._writer is not None:
            self._writer.flush()


def buckets(histogram: RangeHistogram) -> npt.NDArray[np.float64]:
    """Return a histogram as TensorBoard stores it: rows of a left edge, a right edge, and a count."""
    found = np.flatnonzero(histogram.counts)
    if not found.size:
        return np.zeros([0, 3])
    columns = np.arange(found[0], found[-1] + 1)
    edges = (columns + LOWEST_EXPONENT).astype(np.float64)
    return np.stack([edges, edges + 1, histogram.counts[columns]], axis=1)
