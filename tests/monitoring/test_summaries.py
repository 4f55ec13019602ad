"""Event files with histograms whose values include infinities and NaN, as the callback and the hook write them."""

import importlib
import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.monitoring import summaries

tf1 = tf.compat.v1
_KERASES = [name for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]

#: The gradients of a step, and their buckets: what is not finite is left out.
_GRADIENTS = [0.5, 0.75, -2.0, math.inf, -math.inf, math.nan, 0.0]
_BUCKETS = [[-1, 0, 2], [0, 1, 0], [1, 2, 1]]


@pytest.fixture(params=_KERASES)
def keras(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def _read(directory: Path) -> dict[str, Any]:
    """Return the histograms of an event file, the last of each tag."""
    (path,) = directory.iterdir()
    found = {}
    for event in tf1.train.summary_iterator(str(path)):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "histograms":
                found[value.tag] = tf.make_ndarray(value.tensor)
    return found


def _assert_is_in_tensorboard(directory: Path, tag: str) -> None:
    """Assert that TensorBoard, if it is installed, reads the buckets of a tag as a histogram."""
    if importlib.util.find_spec("tensorboard") is None:
        return
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(directory), size_guidance={module.TENSORS: 0}).Reload()
    assert events.SummaryMetadata(tag).plugin_data.plugin_name == "histograms"
    assert [tf.make_ndarray(event.tensor_proto).tolist() for event in events.Tensors(tag)] == [_BUCKETS]


def test_callback_writes_exact_buckets(keras: ModuleType, tmp_path: Path) -> None:
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="last")
    model = keras.Sequential([keras.Input([len(_GRADIENTS)]), layer])
    opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.0), tfmp.FixedLossScaleManager(8))
    # The gradients for the kernel are the inputs.
    model.compile(opt, loss=lambda target, output: target * output)
    callback = tfmp.LossScaleCallback(ranges_every_n_steps=1, summary_dir=str(tmp_path))
    model.fit(np.float32([_GRADIENTS]), np.ones([1, 1], np.float32), verbose=0, callbacks=[callback])
    found = _read(tmp_path)
    (gradients,) = [tag for tag in found if tag.startswith("gradients/")]
    (weights,) = [tag for tag in found if tag.startswith("weights/")]
    assert set(found) == {gradients, weights}
    assert gradients.endswith("last/kernel")
    assert found[gradients].dtype == np.float64
    assert found[gradients].tolist() == _BUCKETS
    assert found[weights].tolist() == [[0, 1, 7]]
    _assert_is_in_tensorboard(tmp_path, gradients)


@pytest.mark.graph
def test_hook_writes_exact_buckets(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        w = tf1.get_variable("w", initializer=tf.ones([len(_GRADIENTS)]))
        opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.0), tfmp.FixedLossScaleManager(8))
        train_op = opt.minimize(tf.reduce_sum(w * _GRADIENTS), tf1.train.get_or_create_global_step())
        hook = tfmp.LossScaleLoggingHook(ranges_every_n_steps=1, summary_dir=str(tmp_path))
        with tf1.train.MonitoredTrainingSession(hooks=[hook], log_step_count_steps=None) as session:
            session.run(train_op)
    found = _read(tmp_path)
    assert {tag: rows.tolist() for tag, rows in found.items()} == {"gradients/w": _BUCKETS, "weights/w": [[0, 1, 7]]}
    _assert_is_in_tensorboard(tmp_path, "gradients/w")


def test_histogram_without_finite_values_has_no_buckets() -> None:
    empty = summaries.buckets(tfmp.ranges.RangeHistogram.of(tf.constant([0.0, math.inf, math.nan])))
    assert (empty.shape, empty.dtype) == ((0, 3), np.float64)


def test_buckets_reach_from_the_lowest_exponent_to_the_highest() -> None:
    found = summaries.buckets(tfmp.ranges.RangeHistogram.of(tf.constant([2.0**-150, 2.0**127], tf.float64)))
    assert found[:, 2].sum() == 2
    assert found[[0, -1]].tolist() == [[-150, -149, 1], [127, 128, 1]]
    assert found[1:, 0].tolist() == found[:-1, 1].tolist()


def test_value_of_a_summary_has_its_tag_and_its_plugin() -> None:
    value = summaries.summary_value("gradients/w", tfmp.ranges.RangeHistogram.of(tf.constant([1.0, 1.5])))
    assert (value.tag, value.metadata.plugin_data.plugin_name) == ("gradients/w", "histograms")
    assert tf.make_ndarray(value.tensor).tolist() == [[0, 1, 2]]
