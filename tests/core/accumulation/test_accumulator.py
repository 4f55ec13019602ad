"""Windows of micro-batches, against a model in NumPy: any values, forms, types and settings."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.oracle import Window
from recording_adapters import scaler_of, take_step

import tfmp
from tfmp.core.accumulation import accumulation_settings, accumulator_of_optimizer
from tfmp.core.gradients.arithmetic import densify

tf1 = tf.compat.v1

_SCALE = 1024.0
#: The largest number of float16: scaled gradients that reach it are saturated.
_LIMIT = 65504.0
#: The variables of the model: their types, those of their sums, and their shapes.
_TYPES = [tf.float16, tf.bfloat16, tf.float64]
_WIDE = [np.float32, np.float32, np.float64]
_SHAPES: list[tuple[int, ...]] = [(4, 1), (2,), ()]


class Model:
    """What the class promises: wide sums of the micro-batches that are finite, and counts of all.

    A gradient is None, or its form with its values; the values of a sparse one are those of all rows.
    """

    def __init__(self, rule: Window, *, saturates: bool) -> None:
        self.rule, self.saturates, self.in_epoch = rule, saturates, 0
        self.forms: list[str | None] = [None] * len(_SHAPES)
        self.empty()

    def empty(self) -> None:
        self.sums = [np.zeros(shape, dtype) for shape, dtype in zip(_SHAPES, _WIDE, strict=True)]
        self.kept = self.tried = 0
        self.largest, self.overflows = 0.0, np.zeros([len(_SHAPES), 3])

    def add(self, grads: list[Any], scale: float) -> None:
        counts, unscaled = np.zeros([len(_SHAPES), 3]), []
        for index, grad in enumerate(grads):
            if grad is not None:
                self.forms[index], values = grad
                unscaled.append((index, values / values.dtype.type(scale)))
                saturated = self.saturates & np.isfinite(values) & (abs(values) >= _LIMIT - 16)
                counts[index] = [np.isinf(values).sum(), np.isnan(values).sum(), saturated.sum()]
        self.overflows += counts
        if not counts.any():
            self.kept += 1
            for index, values in unscaled:
                self.sums[index] = self.sums[index] + values
                self.largest = max(self.largest, np.float32(abs(values).max()))
        self.tried, self.in_epoch = self.tried + 1, self.in_epoch + 1

    def is_full(self) -> bool:
        return self.tried == self.rule.accumulation_steps or self.in_epoch == self.rule.micro_batches_per_epoch

    def usable(self) -> bool:
        return self.kept == self.tried if self.rule.overflow_drops == "window" else self.kept > 0

    def means(self) -> list[Any]:
        """Return the means of what was kept; zeros if nothing was."""
        return [
            (total / total.dtype.type(self.kept or 1)).astype(dtype.as_numpy_dtype)
            for total, dtype in zip(self.sums, _TYPES, strict=True)
        ]

    def end(self) -> None:
        self.empty()
        if self.rule.micro_batches_per_epoch in (None, self.in_epoch):
            self.in_epoch = 0

    def accumulator(self) -> tfmp.GradientAccumulator:
        return tfmp.GradientAccumulator(
            [tf.Variable(tf.zeros(shape, dtype)) for shape, dtype in zip(_SHAPES, _TYPES, strict=True)],
            **dataclasses.asdict(self.rule),
            overflow_detector=tfmp.SaturationDetector() if self.saturates else None,
        )


def _tensor(grad: Any) -> Any:
    if grad is None:
        return None
    form, values = grad
    if form == "dense":
        return tf.constant(values)
    # The last row is given twice, the second time as 0; the largest magnitude is that of single values.
    rows = [0, 3, 1, 2, 3]
    values = values[rows] * np.float32([[1], [1], [1], [1], [0]])
    # Its shape is that of the variable: a gradient need not name it.
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows))


def _assert_means(grads: Sequence[Any], model: Model) -> None:
    for grad, expected, form, dtype in zip(grads, model.means(), model.forms, _TYPES, strict=True):
        assert (grad is None) is (form is None)
        if grad is not None:
            assert (isinstance(grad, tf.IndexedSlices), grad.dtype) == (form == "sparse", dtype)
            if form == "sparse":
                assert grad.indices.numpy().tolist() == np.flatnonzero(model.sums[0]).tolist()
            np.testing.assert_array_equal(densify(grad), expected)


def _assert_is(accumulator: tfmp.GradientAccumulator, model: Model) -> None:
    assert [each.numpy().tolist() for each in accumulator.sums] == [total.tolist() for total in model.sums]
    counts = [accumulator.kept, accumulator.tried, accumulator.tried_in_epoch, accumulator.largest]
    assert list(map(float, counts)) == [model.kept, model.tried, model.in_epoch, model.largest]
    assert accumulator.overflows.numpy().tolist() == model.overflows.tolist()
    assert bool(accumulator.is_full) is model.is_full()
    if model.kept:
        _assert_means(accumulator.mean(), model)


_NUMBERS = st.integers(-64, 64).map(lambda number: number / 8)
_BAD = st.sampled_from([math.inf, -math.inf, math.nan, _LIMIT])
_RULES = st.builds(Window, st.integers(1, 4), st.sampled_from(["window", "micro_batch"]), st.none() | st.integers(1, 6))


@st.composite
def _micro_batches(draw: st.DrawFn) -> tuple[list[Any], Any]:
    scale = draw(st.sampled_from([1.0, _SCALE]))
    forms = [draw(st.sampled_from(each)) for each in (["dense", "sparse", None], ["dense", None], ["dense", None])]
    forms[1] = forms[1] or (None if any(forms) else "dense")
    grads: list[Any] = []
    for form, shape, dtype in zip(forms, _SHAPES, _WIDE, strict=True):
        values = np.array([draw(_NUMBERS) * scale for _ in range(math.prod(shape))], dtype).reshape(shape)
        grads.append(None if form is None else (form, values))
    bad = draw(st.one_of(*[st.none()] * 3, _BAD))
    of_bad = draw(st.sampled_from([grad for grad in grads if grad is not None]))
    if bad is not None and of_bad[0] == "dense":
        of_bad[1][...] = bad
    # The scale may be a tensor of any type.
    return grads, tf.constant(scale, tf.float64) if draw(st.booleans()) else scale


@settings(max_examples=20)
@given(st.builds(Model, _RULES, saturates=st.booleans()), st.lists(_micro_batches(), min_size=3, max_size=8))
def test_accumulator_is_the_model(model: Model, micro_batches: list[Any]) -> None:
    accumulator = model.accumulator()
    for grads, scale in micro_batches:
        accumulator.add(list(map(_tensor, grads)), scale)
        model.add(grads, float(scale))
        _assert_is(accumulator, model)
        if model.is_full():
            # A checkpoint of several replicas restores parts of a count: they are rounded up, so that none is lost.
            accumulator.overflows.assign_add([[0.0, 0.25, 0.0], *[[0.0] * 3] * 2])
            drained, known, _ = accumulator.drain(lambda counts: counts)
            _assert_means(drained, model)
            complete = known.found.complete
            assert (bool(known.found.usable), float(known.found.max_abs)) == (model.usable(), model.largest)
            assert (complete is None) is (model.rule.overflow_drops == "window")
            assert complete is None or bool(complete) is (model.kept == model.tried)
            model.overflows[0, 1] += 1
            assert known.window_counts.numpy().tolist() == model.overflows.tolist()
            assert known.of_window
            model.end()
            _assert_is(accumulator, model)
            with pytest.raises(RuntimeError, match=r"^the window is empty: add gradients first"):
                accumulator.drain(lambda counts: counts)


@pytest.mark.parametrize("follows", [True, False])
def test_manager_that_asks_for_it_gets_the_largest_magnitude_of_a_window_and_not_of_its_mean(follows: bool) -> None:
    manager, alone = tfmp.LogMaxLossScaleManager(), tfmp.LogMaxLossScaleManager()
    accumulator = tfmp.GradientAccumulator([tf.Variable(0.0)], 4)
    scaler = scaler_of(manager if follows else tfmp.FixedLossScaleManager(8))

    @tf.function
    def step(grad: tf.Tensor) -> None:
        take_step(scaler, [grad], ["w"], lambda _: tf.no_op(), accumulator=accumulator)

    for window in ([1.0, -8.0, 2.0, 0.5], [0.25, 0.5, 0.0, 2.0]):
        for value in window:
            step(tf.constant(value))
            # It is kept for such managers alone.
            assert follows or float(accumulator.largest) == 0
        alone.update_loss_scale(tf.constant(True), tf.constant(max(map(abs, window))))
        assert (manager.state_dict() == alone.state_dict()) is follows


def test_restored_window_has_the_gradients_that_it_was_saved_with(tmp_path: Path) -> None:
    def make() -> tuple[tfmp.GradientAccumulator, tf.train.Checkpoint]:
        accumulator = tfmp.GradientAccumulator([tf.Variable(0.0) for _ in range(3)], 2)
        return accumulator, tf.train.Checkpoint(accumulator=accumulator)

    saved, checkpoint = make()
    saved.add([tf.constant(2.0), tf.constant(4.0), None])
    path = checkpoint.save(tmp_path / "inside")
    for added, expected in [(None, [2, 4, None]), (6.0, [4, 2, None])]:
        restored, checkpoint = make()
        checkpoint.restore(path).assert_consumed()
        if added is not None:
            restored.add([tf.constant(added), None, None])
        # Only the sums can show which variables had gradients.
        assert [None if grad is None else float(grad) for grad in restored.mean()] == expected


def test_variable_that_a_traced_end_of_the_window_leaves_out_is_not_lost_silently() -> None:
    variables = [tf.Variable(0.0, name=name) for name in "xyz"]
    accumulator = tfmp.GradientAccumulator(variables, 2)

    def add(of_others: float | None) -> None:
        accumulator.add([tf.constant(1.0), *[of_others if of_others is None else tf.constant(of_others)] * 2])

    traced = tf.function(add)
    traced(None)
    assert tf.function(accumulator.mean)()[1:] == [None, None]
    for add_or_traced in (traced, add):
        with pytest.raises(ValueError, match=r"no gradient for y:0, z:0 when .* pass tf.zeros_like"):
            add_or_traced(2.0)
    assert accumulator.mean()[1:] == [None, None]
    # In the other order nothing was left out.
    accumulator = tfmp.GradientAccumulator(variables, 2)
    add(2.0)
    add(None)
    assert [float(grad) for grad in tf.function(accumulator.mean)()] == [1, 1, 1]


@pytest.mark.graph
def test_run_that_fails_before_it_has_gradients_does_not_count(session: tf1.Session) -> None:
    fed = tf1.placeholder(tf.float32, [])
    accumulator = tfmp.GradientAccumulator([tf1.get_variable("weight", initializer=0.0)], 2)
    added = accumulator.add([tf.debugging.check_numerics(fed, "the input ended")])
    session.run(tf1.global_variables_initializer())
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match="the input ended"):
            session.run(added, {fed: math.nan})
    session.run(added, {fed: 2.0})
    counters = [accumulator.tried, accumulator.tried_in_epoch, accumulator.kept]
    assert session.run([*counters, accumulator.largest]) == [1, 1, 1, 2]


@pytest.mark.parametrize("keeps_float32", [False, True])
def test_owner_of_the_variables_makes_them_and_may_keep_the_mean_in_float32(keeps_float32: bool) -> None:
    made = {}

    def add_buffer(name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        made[name] = tf.Variable(tf.zeros(shape, dtype))
        return made[name]

    variables, rule = [tf.Variable(tf.zeros([2, 3], tf.float16))], accumulation_settings(2, "window", None)
    accumulator = accumulator_of_optimizer(variables, rule, None, add_buffer, keeps_float32=keeps_float32)
    assert list(made) == ["sum_0", "kept", "tried", "tried_in_epoch", "largest", "overflows"]
    counters = [made[name] for name in ("kept", "tried", "tried_in_epoch")]
    for counter in counters:
        # Where float32 can count no further.
        counter.assign(2.0**24)
    accumulator.add_unscaled([tf.ones([2, 3])], tf.constant(1.0), keeps_max_abs=False)
    assert [float(each) for each in (*counters, accumulator.largest)] == [*[2**24 + 1] * 3, 0]
    # By default its variables are its own, and no optimizer trains them.
    by_default = accumulator_of_optimizer(variables, rule, None)
    by_default.add([tf.ones([2, 3])])
    found = [each.mean()[0].dtype for each in (accumulator, by_default)]
    assert found == [tf.float32 if keeps_float32 else tf.float16, tf.float16]
    assert by_default.trainable_variables == ()


@pytest.mark.parametrize(("steps", "per_epoch"), [(4, None), (8, 4)])
def test_window_is_full_within_and_outside_of_replicas(two_replicas: Any, steps: int, per_epoch: int | None) -> None:
    with two_replicas.scope():
        accumulator = tfmp.GradientAccumulator(
            [tf.Variable(tf.zeros([3, 1]))], steps, micro_batches_per_epoch=per_epoch
        )

    def add(values: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        values = tf.reshape(values[replica], [1, 1]) * [[1.0], [1.0]]
        accumulator.add([tf.IndexedSlices(values, tf.stack([replica, 0]), tf.constant([3, 1]))])

    on_replicas = tf.function(lambda values: two_replicas.run(add, args=(values,)))
    for end in (False, False, False, True):
        on_replicas(tf.constant([1.0, 2.0]))
        assert bool(accumulator.is_full) is end
        with two_replicas.scope():
            assert bool(accumulator.is_full) is end
    # Sparse, of the rows that each replica named.
    means = two_replicas.run(lambda: tuple(map(densify, accumulator.mean())))
    found = [part.numpy().ravel().tolist() for part in two_replicas.experimental_local_results(means[0])]
    assert found == [[2, 0, 0], [2, 2, 0]]
    two_replicas.run(accumulator.reset)
    message = r"^the accumulator belongs to the replicas of MirroredStrategy: .* strategy\.run"
    for method in (accumulator.mean, accumulator.reset, lambda: accumulator.add([tf.zeros([3, 1])])):
        for place in (contextlib.nullcontext(), two_replicas.scope()):
            with place, pytest.raises(RuntimeError, match=message):
                method()
    assert float(accumulator.tried.read_value()) == 0
    shared = tfmp.GradientAccumulator([tf.Variable(0.0)], 2)
    with pytest.raises(RuntimeError, match=r"^make the accumulator in the strategy's scope"):
        two_replicas.run(lambda: shared.add([tf.constant(1.0)]))
    # A single device has nothing to share.
    tf.distribute.OneDeviceStrategy("cpu:0").run(lambda: shared.add([tf.constant(1.0)]))
    assert float(shared.tried) == 1


_WHOLE = "must be a whole number from 1 to 2**31 - 1, got"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *(({"accumulation_steps": n}, ValueError, f"accumulation_steps {_WHOLE} {n}") for n in (0, 2**31, 1.5)),
        ({"accumulation_steps": "4"}, TypeError, "accumulation_steps must be a number, got '4'"),
        ({"micro_batches_per_epoch": 0}, ValueError, f"micro_batches_per_epoch {_WHOLE} 0"),
        *(
            ({"overflow_drops": bad}, ValueError, f'overflow_drops must be "window" or "micro_batch", got {bad!r}')
            for bad in ("batch", "Window", None)
        ),
        ({"variables": []}, ValueError, "variables is empty: pass the variables to train"),
        ({"variables": ["kernel"]}, TypeError, "variables must be a list of variables, and it holds 'kernel'"),
        ({"overflow_detector": max}, TypeError, "overflow_detector must be a tfmp.OverflowDetector, got <built-in"),
        ({"grads": [1.0, None]}, ValueError, "there are 2 gradients for 1 variables: pass one for each, None where"),
        ({"grads": [None]}, ValueError, "every gradient is None: the loss depends on none of the variables"),
        ({"loss_scale": 0.0}, ValueError, "loss_scale must be greater than 0, got 0.0"),
        ({"loss_scale": math.inf}, ValueError, "loss_scale must be finite, got inf"),
        ({"loss_scale": "8"}, TypeError, "loss_scale must be a number, got '8'"),
    ],
)
def test_wrong_argument_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"variables": [tf.Variable(0.0)], "accumulation_steps": 2} | arguments
    grads, loss_scale = given.pop("grads", [1.0]), given.pop("loss_scale", 1.0)

    def take() -> None:
        accumulator = tfmp.GradientAccumulator(**given)
        with pytest.raises(RuntimeError, match=r"^the window is empty: add gradients first"):
            accumulator.mean()
        try:
            accumulator.add([None if grad is None else tf.constant(grad) for grad in grads], loss_scale)
        finally:
            assert float(accumulator.tried) == 0

    with pytest.raises(error, match=f"^{re.escape(message)}"):
        take()
