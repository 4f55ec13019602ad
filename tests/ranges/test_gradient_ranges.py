"""The powers of two of gradients are recorded on the steps that were asked for, and on no others."""

import functools
import math
from collections.abc import Callable
from typing import Any

import kerases
import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import MODES, in_every_mode

import tfmp
from tfmp.ranges.gradient_ranges import GradientRanges

#: What is recorded of a step: for each variable, how many values have which exponent; and the factor of the gradients.
_Found = tuple[list[dict[str, int]], float]


def _found(ranges: GradientRanges) -> list[_Found]:
    return [
        ([tfmp.ranges.RangeHistogram(row).to_dict() for row in recorded.counts], recorded.scaled_by)
        for recorded in ranges.read()
    ]


def _sgd() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(0.5)


class _V1:
    """Steps of a wrapped TF1 optimizer, which unscales gradients before they are checked."""

    scaled_by = 1.0

    def __init__(self, **settings: Any) -> None:
        self.opt = tfmp.LossScaleOptimizer(_sgd(), tfmp.FixedLossScaleManager(1024), **settings)
        self.weight = tf.Variable([1.0, 2.0], name="kernel")

    def take(self, grad: tf.Tensor) -> None:
        self.opt.minimize(lambda: tf.reduce_sum(self.weight * grad), var_list=[self.weight])


class _Keras:
    """Steps of a wrapped optimizer of a Keras, which checks gradients before they are unscaled where it is compiled."""

    scaled_by = 1024.0

    def __init__(self, keras: Any, **settings: Any) -> None:
        self.opt = tfmp.LossScaleOptimizer(kerases.optimizer(keras), tfmp.FixedLossScaleManager(1024), **settings)
        self.weight = kerases.variable(keras, [1.0, 2.0])
        self.opt.build([self.weight])

    def take(self, grad: tf.Tensor) -> None:
        kerases.take_step(self.opt, [self.weight], [grad])


class _Scaler:
    """Steps of a `GradScaler`."""

    scaled_by = 1.0

    def __init__(self) -> None:
        self.opt = tfmp.GradScaler(1024)
        self.weight = tf.Variable([1.0, 2.0], name="kernel")
        self.inner = _sgd()

    def take(self, grad: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = self.opt.scale(tf.reduce_sum(self.weight * grad))
        self.opt.step(self.inner, [(tape.gradient(loss, self.weight), self.weight)])
        self.opt.update()


_HOSTS: dict[str, Callable[[], Any]] = {
    "v1": _V1,
    "scaler": _Scaler,
    **{name: functools.partial(_Keras, keras) for name, keras in kerases.installed().items()},
}
with_every_host = pytest.mark.parametrize("host", _HOSTS)


@in_every_mode
@with_every_host
def test_only_the_step_after_a_request_is_recorded_also_if_it_overflows(host: str, mode: str) -> None:
    training, traced = _HOSTS[host](), []
    ranges = training.opt.record_gradient_ranges()

    def step(grad: tf.Tensor) -> None:
        traced.append(grad)
        training.take(grad)

    step = MODES[mode](step)
    step(tf.constant([1.0, 1.0]))
    assert ranges.read() == []
    # The update of so few values is compiled within XLA only.
    scaled_by = training.scaled_by if mode == "xla" else 1.0
    shift = int(math.log2(scaled_by))
    for grad, expected in [
        ([4.0, -0.75], {str(shift - 1): 1, str(shift + 2): 1}),
        ([math.inf, math.nan], {"infinite": 1, "nan": 1}),
        ([0.0, 1.0], {str(shift): 1, "zero": 1}),
    ]:
        ranges.request()
        assert ranges.read() == []
        step(tf.constant(grad))
        assert _found(ranges) == [([expected], scaled_by)]
        # Later steps leave what was recorded, until the next one is asked for.
        step(tf.constant([0.0, 16.0]))
        assert _found(ranges) == [([expected], scaled_by)]
    (recorded,) = ranges.read()
    assert [name.partition(":")[0] for name in recorded.names] == ["kernel"]
    assert (recorded.counts.shape, recorded.counts.dtype) == ((1, 283), np.int64)
    # Once to make variables, once more without.
    assert mode == "eager" or len(traced) <= 2


@with_every_host
def test_training_is_the_same_with_requests_as_without(host: str) -> None:
    for recorded in (False, True):
        training = _HOSTS[host]()
        step = tf.function(training.take)
        for grad in ([1.0, -3.0], [math.inf, 1.0], [0.5, 0.25]):
            if recorded:
                training.opt.record_gradient_ranges().request()
            step(tf.constant(grad))
        assert training.weight.numpy().tolist() == [0.25, 3.375]
    # A function that was traced before does not record.
    training = _HOSTS[host]()
    step = tf.function(training.take)
    step(tf.constant([1.0, 1.0]))
    ranges = training.opt.record_gradient_ranges()
    ranges.request()
    step(tf.constant([1.0, 1.0]))
    assert ranges.read() == []


def test_gradients_that_the_user_unscaled_are_recorded_unscaled() -> None:
    training = _Scaler()
    scaler, weight, ranges = training.opt, training.weight, training.opt.record_gradient_ranges()
    ranges.request()
    with tf.GradientTape() as tape:
        loss = scaler.scale(tf.reduce_sum(weight * [8.0, 2.0**-20]))
    (grad,) = scaler.unscale(training.inner, tape.gradient(loss, [weight]))
    scaler.step(training.inner, [(tf.clip_by_value(grad, -1.0, 1.0), weight)])
    scaler.update()
    assert _found(ranges) == [([{"-20": 1, "0": 1}], 1.0)]


@in_every_mode
def test_every_list_of_variables_has_a_record_of_its_own(mode: str) -> None:
    opt = tfmp.LossScaleOptimizer(_sgd(), tfmp.FixedLossScaleManager(8))
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
    assert _found(ranges) == [([{"1": 2}], 1.0), ([{"2": 2}, {"2": 1}], 1.0)]
    ranges.request()
    assert ranges.read() == []
    step(tf.constant(8.0), 2)
    assert _found(ranges) == [([{"3": 2}, {"3": 1}], 1.0)]


@in_every_mode
def test_rows_of_sparse_gradients_are_counted_and_variables_without_a_gradient_keep_their_row(mode: str) -> None:
    scaler, optimizer = tfmp.GradScaler(2), _sgd()
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
    assert _found(ranges) == [([{}, {"0": 8}, {}, {"-21": 1, "0": 1, "2": 1, "zero": 1}, {}], 1.0)]


@pytest.mark.parametrize("mode", ["eager", "function"])
@with_every_host
def test_counts_are_sums_over_replicas(host: str, mode: str, two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        training = _HOSTS[host]()
    ranges = training.opt.record_gradient_ranges()

    def of_replica() -> None:
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        training.take(tf.stack([1.0, 4 * replica]))

    step = MODES[mode](lambda: two_replicas.run(of_replica))
    step()
    assert ranges.read() == []
    ranges.request()
    assert ranges.read() == []
    step()
    # An optimizer of Keras 2 sums gradients before they are checked: each replica has [2, 4] then.
    sums_first = host in ("keras2", "tf_keras")
    assert _found(ranges) == [([{"1": 2, "2": 2} if sums_first else {"0": 2, "2": 1, "zero": 1}], 1.0)]


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("host", [host for host in _HOSTS if host != "scaler"])
def test_windows_end_is_what_is_recorded(host: str, mode: str) -> None:
    training = _HOSTS[host](accumulation_steps=3)
    ranges = training.opt.record_gradient_ranges()
    step = MODES[mode](training.take)
    ranges.request()
    for grad in ([1.0, 0.0], [2.0, 0.0]):
        step(tf.constant(grad))
        assert ranges.read() == []
    step(tf.constant([9.0, 3.0]))
    # The means are 4 and 1.
    ((rows, scaled_by),) = _found(ranges)
    shift = int(math.log2(scaled_by))
    assert rows == [{str(shift): 1, str(shift + 2): 1}]
