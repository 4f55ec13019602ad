"""Gradients are averaged scaled if they travel in half precision, and come back as they were."""

from collections.abc import Sequence

import pytest
import tensorflow as tf
from stand_in_horovod import run_horovod

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.step.worker_average import WorkerAverage
from tfmp.types import Gradient, Gradients


class _Recording(SingleProcess):
    """One process that records what it is asked to average, cast as on its way to others."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, float, tf.DType]] = []

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        travelling = [None if grad is None else tf.cast(grad, dtype or grad.dtype) for grad in grads]
        self.sent = [
            (name, float(grad), grad.dtype) for name, grad in zip(names, travelling, strict=True) if grad is not None
        ]
        return [None if grad is None else tf.cast(grad, tf.float32) for grad in travelling]


def test_gradients_of_a_process_alone_stay_as_they_are() -> None:
    average = WorkerAverage(tfmp.FixedLossScaleManager(8), is_distributed=False)
    grads = [tf.constant(2.0), None]
    assert average.mean(grads, ["kernel", "bias"], SingleProcess()) == grads


# As float16, the first gradient would be 0.
@pytest.mark.parametrize(("value", "dtype"), [(2.0**-28, tf.float32), (2.0**-20, tf.float16)])
def test_unscaled_gradients_travel_scaled_in_half_precision_and_come_back_in_their_type(
    value: float, dtype: tf.DType
) -> None:
    average, process = WorkerAverage(tfmp.FixedLossScaleManager(2.0**20), True, tf.float16), _Recording()
    mean, none = average.mean([tf.constant(value, dtype), None], ["kernel", "bias"], process, are_scaled=False)
    assert process.sent == [("kernel", value * 2**20, tf.float16)]
    assert (float(mean), mean.dtype, none) == (value, dtype, None)


@pytest.mark.parametrize(
    ("dtype", "are_scaled", "travelling"),
    [(None, False, tf.float32), (None, True, tf.float32), (tf.float16, True, tf.float16)],
)
def test_other_gradients_travel_as_they_are(dtype: tf.DType | None, are_scaled: bool, travelling: tf.DType) -> None:
    average, process = WorkerAverage(tfmp.FixedLossScaleManager(2.0**20), True, dtype), _Recording()
    (mean,) = average.mean([tf.constant(2.0**-8)], ["kernel"], process, are_scaled=are_scaled)
    assert (process.sent, float(mean)) == ([("kernel", 2.0**-8, travelling)], 2.0**-8)


@pytest.mark.parametrize(
    ("size", "is_distributed", "warnings"),
    [(None, False, 0), (1, False, 0), (2, True, 0), (2, False, 1), (3, False, 1)],
)
def test_one_warning_is_given_if_nothing_averages_over_the_processes(
    size: int | None,
    is_distributed: bool,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if size is not None:
        run_horovod(monkeypatch, size)
    average = WorkerAverage(tfmp.FixedLossScaleManager(8), is_distributed)
    for _ in range(2):
        average.mean([tf.constant(2.0)], ["kernel"], SingleProcess())
    assert caplog.text.count(f"Horovod runs {size} processes, and nothing averages the gradients over them") == warnings
