"""The powers of two of gradients are recorded on the steps that were asked for, and on no others."""

import functools
import math
from typing import Any

import kerases
import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import MODES, in_every_mode
from kit.hosts import Loop, V1Eager
from kit.keras_hosts import KerasLoop, by_xla, compiled
from kit.oracle import Rule
from kit.scaler_hosts import Scaler
from kit.structures import Structure

import tfmp
from tfmp.ranges.gradient_ranges import GradientRanges


def _found(ranges: GradientRanges) -> list[list[dict[str, int]]]:
    """Return what is recorded of a step: for each variable, how many values have which exponent."""
    return [[tfmp.ranges.RangeHistogram(row).to_dict() for row in recorded.counts] for recorded in ranges.read()]


_ONE_VARIABLE = Structure(
    {"kernel": np.float32([1, 2])},
    {"kernel": tf.TensorSpec([2])},
    lambda variables, fed: tf.reduce_sum(variables["kernel"] * fed["kernel"]),
    {},
)
_COMPILED: dict[str, Any] = {"eager": None, "function": compiled, "xla": by_xla}
_HOSTS: dict[str, Any] = {
    "v1": V1Eager,
    "scaler": Scaler,
    **{name: functools.partial(KerasLoop, keras=keras) for name, keras in kerases.installed().items()},
}
with_every_host = pytest.mark.parametrize("host", _HOSTS)


def _trained(host: str, mode: str = "function", strategy: Any = None, **settings: Any) -> tuple[Loop, Any]:
    """Return a host that has begun, with a scale that is no power of two, and its wrapper or scaler."""
    training = _HOSTS[host](
        _ONE_VARIABLE,
        Rule(),
        lambda: {"loss_scale_manager": tfmp.FixedLossScaleManager(1500), **settings},
        compiled=_COMPILED[mode],
        strategy=strategy,
    )
    training.begin()
    return training, training.scaler if host == "scaler" else training._opt


def _step(training: Loop, *grads: list[float]) -> list[float]:
    """Take a step with a gradient for each replica; return the weights."""
    return training.train([[{"kernel": np.float32(grad)} for grad in grads]])[-1].moving[0].tolist()


@in_every_mode
@with_every_host
def test_only_the_step_after_a_request_is_recorded_also_if_it_overflows(host: str, mode: str) -> None:
    training, opt = _trained(host, mode)
    ranges = opt.record_gradient_ranges()
    _step(training, [1.0, 1.0])
    assert ranges.read() == []
    for grad, expected in [
        ([4.0, -0.75], {"-1": 1, "2": 1}),
        ([math.inf, math.nan], {"infinite": 1, "nan": 1}),
        ([0.0, 1.0], {"0": 1, "zero": 1}),
    ]:
        ranges.request()
        assert ranges.read() == []
        _step(training, grad)
        assert _found(ranges) == [[expected]]
        # Later steps leave what was recorded, until the next one is asked for.
        _step(training, [0.0, 16.0])
        assert _found(ranges) == [[expected]]
    (recorded,) = ranges.read()
    assert [name.partition(":")[0] for name in recorded.names] == ["kernel"]
    assert (recorded.counts.shape, recorded.counts.dtype) == ((1, 283), np.int64)


@with_every_host
def test_training_is_the_same_with_requests_as_without(host: str) -> None:
    for recorded in (False, True):
        training, opt = _trained(host)
        for grad in ([1.0, -3.0], [math.inf, 1.0], [0.5, 0.25]):
            if recorded:
                opt.record_gradient_ranges().request()
            weights = _step(training, grad)
        assert weights == [0.25, 3.375]
    # A function that was traced before does not record.
    training, opt = _trained(host)
    _step(training, [1.0, 1.0])
    ranges = opt.record_gradient_ranges()
    ranges.request()
    _step(training, [1.0, 1.0])
    assert ranges.read() == []


def test_gradients_that_the_user_unscaled_are_recorded_unscaled() -> None:
    scaler, optimizer = tfmp.GradScaler(1024), tf.compat.v1.train.GradientDescentOptimizer(0.5)
    weight = tf.Variable([1.0, 2.0])
    ranges = scaler.record_gradient_ranges()
    ranges.request()
    with tf.GradientTape() as tape:
        loss = scaler.scale(tf.reduce_sum(weight * [8.0, 2.0**-20]))
    (grad,) = scaler.unscale(optimizer, tape.gradient(loss, [weight]))
    scaler.step(optimizer, [(tf.clip_by_value(grad, -1.0, 1.0), weight)])
    scaler.update()
    assert _found(ranges) == [[{"-20": 1, "0": 1}]]


@in_every_mode
def test_every_list_of_variables_has_a_record_of_its_own(mode: str) -> None:
    opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), tfmp.FixedLossScaleManager(8))
    ranges = opt.record_gradient_ranges()
    variables = [tf.Variable([1.0, 2.0], name="first"), tf.Variable(1.0, name="second")]

    def take(grad: tf.Tensor, count: int) -> None:
        some = variables[:count]
        opt.minimize(lambda: tf.add_n([tf.reduce_sum(each * grad) for each in some]), var_list=some)

    step = MODES[mode](take)
    ranges.request()
    step(tf.constant(2.0), 1)
    assert [recorded.names for recorded in ranges.read()] == [["first:0"]]
    step(tf.constant(4.0), 2)
    assert [recorded.names for recorded in ranges.read()] == [["first:0"], ["first:0", "second:0"]]
    # The gradients for `first` in the second step are 4 for each of its values.
    assert _found(ranges) == [[{"1": 2}], [{"2": 2}, {"2": 1}]]
    ranges.request()
    assert ranges.read() == []
    step(tf.constant(8.0), 2)
    assert _found(ranges) == [[{"3": 2}, {"3": 1}]]


@in_every_mode
def test_rows_of_sparse_gradients_are_counted_and_variables_without_a_gradient_keep_their_row(mode: str) -> None:
    scaler, optimizer = tfmp.GradScaler(2), tf.compat.v1.train.GradientDescentOptimizer(0.5)
    rows = tf.constant([[2.0, 8.0], [0.0, 2.0**-20]])
    sparse = tf.IndexedSlices(rows, tf.constant([3, 0]), tf.constant([4, 2]))
    grads = [None, tf.fill([4, 2], 2.0), None, sparse, None]
    variables = [tf.Variable(tf.zeros([4, 2]), name=f"v{index}") for index in range(len(grads))]
    ranges = scaler.record_gradient_ranges()

    def step() -> None:
        scaler.scale(tf.constant(1.0))
        scaler.step(optimizer, list(zip(grads, variables, strict=True)))
        scaler.update()

    ranges.request()
    MODES[mode](step)()
    assert _found(ranges) == [[{}, {"0": 8}, {}, {"-21": 1, "0": 1, "2": 1, "zero": 1}, {}]]


@pytest.mark.parametrize("mode", ["eager", "function"])
@with_every_host
def test_counts_are_sums_over_replicas(host: str, mode: str, two_replicas: tf.distribute.MirroredStrategy) -> None:
    training, opt = _trained(host, mode, two_replicas)
    ranges = opt.record_gradient_ranges()
    _step(training, [1.0, 0.0], [1.0, 4.0])
    assert ranges.read() == []
    ranges.request()
    assert ranges.read() == []
    _step(training, [1.0, 0.0], [1.0, 4.0])
    # An optimizer of Keras 2 sums unscaled gradients before they are checked: each replica has [2, 4] then.
    sums_first = host in ("keras2", "tf_keras")
    assert _found(ranges) == [[{"1": 2, "2": 2} if sums_first else {"0": 2, "2": 1, "zero": 1}]]


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("host", [host for host in _HOSTS if host != "scaler"])
def test_windows_end_is_what_is_recorded(host: str, mode: str) -> None:
    # With a power of two, the mean is exact.
    manager = tfmp.FixedLossScaleManager(1024)
    training, opt = _trained(host, mode, accumulation_steps=3, loss_scale_manager=manager)
    ranges = opt.record_gradient_ranges()
    ranges.request()
    for grad in ([1.0, 0.0], [2.0, 0.0]):
        _step(training, grad)
        assert ranges.read() == []
    _step(training, [9.0, 3.0])
    # The means are 4 and 1.
    assert _found(ranges) == [[{"0": 1, "2": 1}]]
