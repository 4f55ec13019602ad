"""TensorBoard summaries that are written while `fit` of any Keras trains."""

from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf

from tfmp.ranges import tensorboard
from tfmp.ranges.histogram import RangeHistogram

_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"),
    data_class=1,  # the value of DATA_CLASS_SCALAR, which TensorFlow does not export
)


class FitSummaries:
    """Writes numbers and histograms to a directory for TensorBoard; without one it writes nothing.

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
                tf.summary.write(tag, tensorboard.buckets(histogram), metadata=tensorboard.HISTOGRAM_METADATA)
        self._writer.flush()
