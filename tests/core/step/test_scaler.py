"""The path of gradients through a step, with adapters that keep what reaches them."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from function_steps import FunctionAdapter, take_step
from stand_in_horovod import run_horovod

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.core.gradients import arithmetic
from tfmp.core.gradients.origins import note_change
from tfmp.core.graph_search import with_ancestors
from tfmp.core.overflow.gradient_check import Scaling
from tfmp.core.overflow.local_check import LocalCheck
from tfmp.core.step.gradient_ranges import GradientRanges
from tfmp.core.step.result import StepResult
from tfmp.core.step.scaler import LossScaler, Step
from tfmp.types import Gradient, Gradients


def _scaler(detector: tfmp.NonFiniteDetector | tfmp.SaturationDetector | None = None) -> tuple:
    manager = tfmp.ExponentialUpdateLossScaleManager(8, 100, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    return LossScaler(manager, detector or tfmp.NonFiniteDetector(), is_distributed=False), manager


def test_scale_and_unscale_use_the_current_scale() -> None:
    scaler, manager = _scaler()
    manager.update_loss_scale(tf.constant(False))
    assert float(scaler.scale(tf.constant(3.0))) == 12
    assert float(scaler.unscale([tf.constant(12.0)])[0]) == 3


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_step_applies_finite_gradients_and_skips_others(compiled: bool, bad: float) -> None:
    scaler, manager = _scaler()
    weight = tf.Variable(0.0)

    def apply(grads: Gradients) -> tf.Operation:
        return tf.group(weight.assign_add(grads[0]))

    def step(grad: tf.Tensor) -> None:
        take_step(scaler, [grad, None], ["kernel", "bias"], apply)

    run = tf.function(step) if compiled else step
    for grad in [1.0, bad, 2.0]:
        run(tf.constant(grad))
    assert float(weight) == 3
    assert float(manager.get_loss_scale()) == 4


def test_detector_decides_what_is_skipped() -> None:
    scaler, manager = _scaler(tfmp.SaturationDetector())
    take_step(
        scaler, [tf.constant(65504.0 / 8)], ["kernel"], lambda grads: pytest.fail("a saturated gradient was applied")
    )
    assert float(manager.get_loss_scale()) == 4


class _Recording(FunctionAdapter):
    """Keeps with what it is asked to apply gradients, and which steps it is told of."""

    def __init__(
        self, *, unscales: bool = True, can_sum_first: bool = False, overwritten: Collection[int] = ()
    ) -> None:
        super().__init__(["kernel", "bias"], lambda grads: tf.no_op())
        self.overwritten = frozenset(overwritten)
        self.dtypes = [tf.float16, tf.float32]
        self.applied: list[Any] = []
        self.steps: list[bool] = []
        self._unscales, self._can_sum_first = unscales, can_sum_first

    def unscales(self, grads: Gradients) -> bool:
        return self._unscales and len(grads) == 2

    def can_sum_first(self, grads: Gradients) -> bool:
        return self._can_sum_first and len(grads) == 2

    def measure(self, grads: Gradients, loss_scale: tf.Tensor | None) -> list[tf.Tensor]:
        return [grads[0] / (1.0 if loss_scale is None else loss_scale)]

    def apply(self, grads: Gradients, loss_scale: Any = None, measures: Any = (), changes: Any = ()) -> tf.Operation:
        scale = None if loss_scale is None else float(loss_scale)
        self.applied.append((_numbers(grads), scale, _numbers(measures), changes))
        return tf.no_op()

    def on_step(self, applied: tf.Tensor) -> None:
        self.steps.append(bool(applied))


def _numbers(grads: Iterable[Gradient]) -> list[float | None]:
    return [None if grad is None else float(grad) for grad in grads]


class _SummedFirst(SingleProcess):
    """A process that says that gradients may be summed before the check, as the replicas of a strategy do."""

    can_sum_first = True


class _Stricter(tfmp.NonFiniteDetector):
    """A user's detector, which may look at more than whether the gradients are finite."""


def _manager(**settings: Any) -> tfmp.ExponentialUpdateLossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(8, 100, decr_every_n_nan_or_inf=1, decr_ratio=0.5, **settings)


def _scaler_of(manager: tfmp.LossScaleManager, detector: tfmp.OverflowDetector | None = None) -> LossScaler:
    return LossScaler(manager, detector or tfmp.NonFiniteDetector(), is_distributed=False)


def _log_max() -> tfmp.LossScaleManager:
    return tfmp.LogMaxLossScaleManager(init_loss_scale=8)


_SCALERS: dict[str, Callable[[], LossScaler]] = {
    "finite": lambda: _scaler_of(_manager()),
    "below 1": lambda: _scaler_of(_manager(min_loss_scale=0.5)),
    "saturation": lambda: _scaler_of(_manager(), tfmp.SaturationDetector()),
    "own detector": lambda: _scaler_of(_manager(), _Stricter()),
    "largest magnitude": lambda: _scaler_of(_log_max()),
}


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("finite", Scaling.CHECK_SCALED),
        ("below 1", Scaling.UNSCALE_FIRST),
        ("saturation", Scaling.UNSCALE_FIRST),
        ("largest magnitude", Scaling.CHECK_SCALED),
    ],
)
def test_gradients_stay_scaled_for_an_adapter_that_unscales_them(kind: str, scaling: Scaling) -> None:
    scaler, adapter, grads = _SCALERS[kind](), _Recording(), [tf.constant(16.0), None]
    step = scaler.step_of_scaled_grads(adapter, grads, SingleProcess())
    assert step == Step(adapter, grads, scaling, tf.constant(8.0))


def test_gradients_are_unscaled_and_typed_for_an_adapter_that_does_not() -> None:
    scaler, adapter = _scaler_of(_manager()), _Recording(unscales=False, overwritten=[1])
    step = scaler.step_of_scaled_grads(adapter, [tf.constant(16.0), tf.constant(16.0)], SingleProcess())
    assert step == Step(adapter, [tf.constant(2.0, tf.float16), tf.constant(16.0)])
    assert step.grads[0].dtype == tf.float16


@pytest.mark.parametrize(
    ("kind", "sums_first"),
    [
        ("finite", True),
        ("below 1", False),
        ("saturation", False),
        ("own detector", False),
        ("largest magnitude", False),
    ],
)
def test_gradients_are_summed_first_if_only_their_finiteness_has_to_be_known(kind: str, sums_first: bool) -> None:
    grads = [tf.constant(16.0), None]
    for distribution, can_sum_first, possible in [
        (_SummedFirst(), True, sums_first),
        (_SummedFirst(), False, False),
        (SingleProcess(), True, False),
    ]:
        scaler, adapter = _SCALERS[kind](), _Recording(unscales=False, can_sum_first=can_sum_first)
        assert scaler.step_of_scaled_grads(adapter, grads, distribution).sums_first is possible
        scaler.gradient_ranges = GradientRanges()
        assert not scaler.step_of_scaled_grads(adapter, grads, distribution).sums_first


@pytest.mark.graph
@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize(
    ("kind", "derived", "derived_if_clipped"),
    [
        ("finite", True, True),
        ("below 1", False, False),
        ("saturation", False, False),
        ("own detector", True, False),
        ("largest magnitude", True, False),
    ],
)
def test_step_of_a_graph_has_the_scaled_gradients_if_nothing_has_to_see_the_others(
    kind: str, derived: bool, derived_if_clipped: bool, is_clipped: bool, session: tf.compat.v1.Session
) -> None:
    scaler, scaled = _SCALERS[kind](), [tf.constant(16.0), None]
    grads, keeps_finite = scaler.unscale(scaled), tf.constant(True)
    if is_clipped:
        clipped = [grads[0] / 2, None]
        note_change(clipped[0], grads[0], lambda values: values / 2, keeps_finite)
        grads = clipped
    session.run(tf.compat.v1.global_variables_initializer())
    adapter = _Recording()
    step, known = scaler.step_of_unscaled_grads(adapter, grads)
    assert step.adapter is adapter
    if derived_if_clipped if is_clipped else derived:
        assert step.scaling is Scaling.CHECK_SCALED
        assert (step.grads, session.run(step.loss_scale)) == (scaled, 8)
        assert [change is None for change in step.changes] == [False, True] * is_clipped
        assert (known is not None) is is_clipped
        assert known is None or session.run(known.usable)
    else:
        assert (step.scaling, step.loss_scale, step.changes, known) == (Scaling.UNSCALED, None, (), None)
        assert step.grads[0].dtype == tf.float16
    step, _ = scaler.step_of_unscaled_grads(_Recording(unscales=False), grads)
    assert (step.scaling, step.grads[0].dtype) == (Scaling.UNSCALED, tf.float16)


@pytest.mark.graph
@pytest.mark.parametrize("before", [None, True, False])
@pytest.mark.parametrize("keeps_finite", [True, False])
def test_step_is_skipped_if_a_change_does_not_keep_gradients_finite(
    before: bool | None, keeps_finite: bool, session: tf.compat.v1.Session
) -> None:
    scaler, scaled = _scaler_of(tfmp.FixedLossScaleManager(8)), [tf.constant(16.0), None]
    grads = scaler.unscale(scaled)
    clipped = [grads[0] / 2, None]
    note_change(clipped[0], grads[0], lambda values: values / 2, tf.constant(keeps_finite))
    early = None if before is None else LocalCheck(tf.constant(before), checked=[*grads, tf.constant(1.0)])
    _, known = scaler.step_of_unscaled_grads(_Recording(), clipped, early)
    assert session.run(known.usable) == (keeps_finite and before is not False)
    # What was checked unscaled is known of the scaled gradients.
    assert list(known.checked)[:2] == ([] if early is None else scaled)


def test_early_check_tells_what_a_manager_has_to_know() -> None:
    grads = [tf.constant(-3.0), None]
    known = _SCALERS["finite"]().check_early(grads, SingleProcess())
    assert (bool(known.usable), known.max_abs, known.checked) == (True, None, grads)
    known = _SCALERS["largest magnitude"]().check_early(grads, SingleProcess())
    assert (bool(known.usable), float(known.max_abs)) == (True, 3)
    assert not _SCALERS["finite"]().check_early([tf.constant(math.inf)], SingleProcess()).usable


def test_mean_of_checked_micro_batches_is_checked_early_for_its_finiteness_alone() -> None:
    scaler = _SCALERS["saturation"]()
    for grad, usable, finite in [(65504 / 8, False, True), (math.inf, False, False), (1.0, True, True)]:
        grads = [tf.constant(grad)]
        assert bool(scaler.check_early(grads, SingleProcess()).usable) is usable
        assert bool(scaler.check_early(grads, SingleProcess(), already_checked=True).usable) is finite


class _OfTwo(SingleProcess):
    """Says that an optimizer sums the gradients of two replicas."""

    num_summed = 2


@pytest.mark.parametrize(("distribution", "usable"), [(SingleProcess(), True), (_OfTwo(), False)], ids=["alone", "two"])
def test_gradient_that_may_overflow_in_the_sum_over_replicas_is_skipped(
    distribution: SingleProcess, usable: bool
) -> None:
    scaler, adapter, grads = _scaler_of(_manager()), _Recording(), [tf.constant(3e38), None]
    assert bool(scaler.check_early(grads, distribution).usable) is usable
    scaler.step(Step(adapter, grads), distribution)
    assert adapter.steps == [usable]


@pytest.mark.parametrize(
    ("usable", "checked", "grad", "applied"),
    [
        (True, 2.0, 2.0, True),
        (False, 2.0, 2.0, False),
        # The same tensor is not checked again.
        (True, math.inf, None, True),
        (True, 2.0, math.inf, False),
        (False, 2.0, 3.0, False),
        (True, 2.0, 3.0, True),
    ],
)
def test_step_checks_only_gradients_that_changed_since_an_earlier_check(
    usable: bool, checked: float, grad: float | None, applied: bool
) -> None:
    scaler, adapter, before = _scaler_of(_manager()), _Recording(), tf.constant(checked)
    known = LocalCheck(tf.constant(usable), checked=[before])
    after = before if grad is None else tf.constant(grad)
    scaler.step(Step(adapter, [after, None]), SingleProcess(), known)
    assert adapter.steps == [applied]
    assert adapter.applied == [([float(after), None], None, [float(after)], ())] * applied
    assert float(scaler.scale(tf.constant(1.0))) == (8 if applied else 4)


@pytest.mark.parametrize(("max_abs", "expected"), [(None, 3.0), (5.0, 5.0)])
def test_largest_magnitude_is_that_of_an_earlier_check_if_it_has_one(max_abs: float | None, expected: float) -> None:
    known = LocalCheck(tf.constant(True), max_abs=None if max_abs is None else tf.constant(max_abs))
    step = Step(_Recording(), [tf.constant(-3.0), None])
    _, result = _SCALERS["largest magnitude"]().run(step, SingleProcess(), known)
    assert float(result.max_abs) == expected
    assert _SCALERS["finite"]().run(step, SingleProcess(), known)[1].max_abs is None


def test_adapter_measures_and_unscales_the_gradients_that_it_applies() -> None:
    scaler, adapter = _scaler_of(_manager()), _Recording()
    changes = [lambda values: values, None]
    step = scaler.step_of_scaled_grads(adapter, [tf.constant(16.0), None], SingleProcess())
    for each in (step, step._replace(changes=changes)):
        scaler.step(each, SingleProcess())
    # What is measured of scaled gradients says nothing of those that are changed.
    assert adapter.applied == [([16, None], 8, [2], ()), ([16, None], 8, [], changes)]


def test_gradients_that_are_not_averaged_yet_are_averaged_by_the_step() -> None:
    class Averaging(SingleProcess):
        def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
            asked.append((_numbers(grads), list(names), dtype))
            return [None if grad is None else grad / 2 for grad in grads]

    asked: list[Any] = []
    adapter = _Recording()
    scaler = LossScaler(_manager(), tfmp.NonFiniteDetector(), is_distributed=True, aggregation_dtype=tf.float16)
    for is_averaged in (True, False):
        scaler.step(Step(adapter, [tf.constant(2.0), None], is_averaged=is_averaged), Averaging())
    # In half precision they travel scaled.
    assert asked == [([16, None], ["kernel", "bias"], tf.float16)]
    assert [grads for grads, *_ in adapter.applied] == [[2, None], [1, None]]


@pytest.mark.parametrize("is_distributed", [False, True])
def test_setting_of_the_user_decides_whether_horovod_distributes(
    is_distributed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_horovod(monkeypatch, 2)
    scaler = LossScaler(_manager(), tfmp.NonFiniteDetector(), is_distributed)
    assert repr(scaler.distribution()) == ("Horovod()" if is_distributed else "SingleProcess()")
    scaler.worker_average.warn_if_missing()
    assert ("nothing averages the gradients" in caplog.text) is not is_distributed


@pytest.mark.parametrize(("is_step", "counted"), [(None, (1, 0)), (True, (1, 0)), (False, (0, 0))])
def test_result_that_is_no_step_moves_the_scale_and_is_not_counted(
    is_step: bool | None, counted: tuple[int, int]
) -> None:
    manager = _manager()
    applied, finite = tf.constant(True), tf.constant(False)
    result = StepResult(applied, finite, None)
    _scaler_of(manager).advance(result, None if is_step is None else tf.constant(is_step))
    status = manager.get_status()
    assert (int(status.applied_steps), int(status.skipped_steps)) == counted
    assert bool(status.last_step_finite) is (is_step is False)
    assert float(manager.get_loss_scale()) == 4


@pytest.mark.graph
def test_overflow_reports_are_those_of_the_graph_or_of_eager_code(session: tf.compat.v1.Session) -> None:
    scaler = _scaler_of(tfmp.FixedLossScaleManager(8))
    take_step(scaler, [tf.constant(1.0)], ["kernel"], lambda grads: tf.no_op())
    assert [report.names for report in scaler.overflow_reports()] == [["kernel"]]
    with tf.Graph().as_default():
        assert scaler.overflow_reports() == []
        take_step(scaler, [tf.constant(1.0)], ["bias"], lambda grads: tf.no_op())
        assert [report.names for report in scaler.overflow_reports()] == [["bias"]]


def test_counts_are_prepared_outside_of_replicas(two_replicas: tf.distribute.MirroredStrategy) -> None:
    scaler = _scaler_of(_manager())
    two_replicas.run(lambda: scaler.prepare(["on a replica"]))
    assert scaler.overflow_reports() == []
    with two_replicas.scope():
        scaler.prepare(["in a scope"])
    scaler.prepare(["alone"])
    assert [report.names for report in scaler.overflow_reports()] == [["in a scope"], ["alone"]]


class _Summing(_Recording):
    """Sums the gradients of two replicas, which are the same, before they are checked."""

    def __init__(self) -> None:
        super().__init__(can_sum_first=True)

    def sum(self, grads: Gradients) -> Gradients:
        def twice(rows: tf.Tensor) -> tf.Tensor:
            return tf.concat([rows, rows], axis=0)

        return [arithmetic.map_parts(lambda values: values * 2, twice, twice, grad) for grad in grads]

    def apply_sums(self, sums: Gradients, loss_scale: Any) -> tf.Operation:
        values = arithmetic.values_of([grad for grad in sums if grad is not None])
        self.applied.append(([each.numpy().tolist() for each in values], float(loss_scale)))
        return tf.no_op()


class _SummedOfTwo(_SummedFirst):
    num_summed = 2


@pytest.mark.parametrize(
    ("value", "is_sparse", "applied", "counts"),
    [
        (16.0, False, [([32], 8)], [[0, 0, 0], [0, 0, 0]]),
        (1.5e38, False, [([3e38], 8)], [[0, 0, 0], [0, 0, 0]]),
        (math.inf, False, [], [[1, 0, 0], [0, 0, 0]]),
        (16.0, True, [([[16, 16]], 8)], [[0, 0, 0], [0, 0, 0]]),
        # Rows of sparse gradients that have the same index are not added up yet.
        (2e38, True, [], [[1, 0, 0], [0, 0, 0]]),
    ],
)
def test_sums_are_what_is_checked_and_applied(
    value: float, is_sparse: bool, applied: list[Any], counts: list[list[int]]
) -> None:
    grad = tf.constant(value)
    if is_sparse:
        grad = tf.IndexedSlices(tf.reshape(grad, [1]), tf.constant([1]), tf.constant([3]))
    scaler, adapter = _scaler_of(_manager()), _Summing()
    step = scaler.step_of_scaled_grads(adapter, [grad, None], _SummedOfTwo())
    scaler.step(step, _SummedOfTwo())
    assert len(adapter.applied) == len(applied)
    for (found, scale), (values, loss_scale) in zip(adapter.applied, applied, strict=True):
        np.testing.assert_allclose(found, values, rtol=1e-6)
        assert scale == loss_scale
    assert adapter.steps == [bool(applied)]
    (report,) = scaler.overflow_reports()
    assert (report.names, report.last.numpy().tolist()) == (["kernel", "bias"], counts)


def test_replicas_agree_on_what_each_found() -> None:
    class Agreeing(_SummedFirst):
        def agree(
            self, usable: tf.Tensor, max_abs: tf.Tensor | None, grads: Gradients, names: Sequence[str]
        ) -> tuple[tf.Tensor, tf.Tensor | None]:
            asked.append((bool(usable), None if max_abs is None else float(max_abs), _numbers(grads), list(names)))
            return tf.constant(False), max_abs

    asked: list[Any] = []
    scaler, adapter = _SCALERS["largest magnitude"](), _Recording()
    scaler.step(Step(adapter, [tf.constant(-3.0), None]), Agreeing())
    result = scaler.agree_early(LocalCheck(tf.constant(True), max_abs=tf.constant(5.0)), Agreeing())
    assert asked == [(True, 3, [-3, None], ["kernel", "bias"]), (True, 5, [], [])]
    assert (bool(result.applied), bool(result.finite), float(result.max_abs)) == (False, False, 5)
    assert (adapter.applied, adapter.steps) == ([], [False])
    asked.clear()
    scaler, summing = _SCALERS["finite"](), _Summing()
    scaler.step(scaler.step_of_scaled_grads(summing, [tf.constant(16.0), None], Agreeing()), Agreeing())
    assert asked == [(True, None, [16, None], ["kernel", "bias"])]
    assert (summing.applied, summing.steps) == ([], [False])


@pytest.mark.parametrize(("complete", "finite"), [(None, True), (True, True), (False, False)])
def test_step_that_drops_a_micro_batch_is_applied_and_not_finite(complete: bool | None, finite: bool) -> None:
    known = LocalCheck(tf.constant(True), None if complete is None else tf.constant(complete))
    result = _scaler_of(_manager()).agree_early(known, SingleProcess())
    assert (bool(result.applied), bool(result.finite)) == (True, finite)
    assert (result.finite is result.applied) is (complete is None)


@pytest.mark.parametrize(
    ("grads", "overwritten", "already_checked", "applied"),
    [
        ([65504 / 8, 1.0], [], False, False),
        ([65504 / 8, 1.0], [], True, True),
        ([math.nan, 1.0], [], True, False),
        ([1.0, 65504 / 8], [], False, False),
        # What will be the next value of its variable was never scaled.
        ([1.0, 65504 / 8], [1], False, True),
    ],
)
def test_detector_looks_at_gradients_that_were_scaled_and_not_looked_at_before(
    grads: list[float], overwritten: list[int], already_checked: bool, applied: bool
) -> None:
    scaler, adapter = _SCALERS["saturation"](), _Recording(overwritten=overwritten)
    known = LocalCheck(tf.constant(True), already_checked=already_checked)
    scaler.step(Step(adapter, [tf.constant(grad) for grad in grads]), SingleProcess(), known)
    assert adapter.steps == [applied]


def test_sum_that_is_checked_needs_no_room_for_further_replicas() -> None:
    scaler, adapter = _scaler_of(_manager()), _Recording()
    adapter.sums_first = True
    scaler.step(Step(adapter, [tf.constant(3e38), None]), _OfTwo())
    assert adapter.steps == [True]


@pytest.mark.graph
@pytest.mark.parametrize("value", [1.0, math.inf])
def test_step_of_a_graph_moves_the_scale_and_runs_what_the_adapter_counts(
    value: float, session: tf.compat.v1.Session
) -> None:
    class Counting(FunctionAdapter):
        def on_step(self, applied: tf.Tensor) -> tf.Operation:
            return counted.assign(tf.where(applied, 1, 2)).op

    counted = tf.compat.v1.get_variable("counted", initializer=0, use_resource=True)
    manager = _manager()
    scaler = _scaler_of(manager)
    step = Step(Counting(["kernel"], lambda grads: tf.no_op()), [tf.constant(value)])
    done = scaler.step(step, SingleProcess())
    session.run(tf.compat.v1.global_variables_initializer())
    session.run(done)
    assert session.run([counted, manager.get_loss_scale()]) == ([1, 8] if math.isfinite(value) else [2, 4])


@pytest.mark.graph
@pytest.mark.parametrize(
    ("kind", "is_clipped", "reads_scaled", "max_abs"),
    [
        ("finite", False, True, None),
        ("finite", True, False, None),
        ("below 1", False, False, None),
        ("saturation", False, False, None),
        ("largest magnitude", False, True, 2.0),
        ("largest magnitude", True, False, 1.0),
    ],
)
def test_early_check_in_a_graph_reads_scaled_gradients_if_these_tell_the_same(
    kind: str, is_clipped: bool, reads_scaled: bool, max_abs: float | None, session: tf.compat.v1.Session
) -> None:
    scaler, scaled = _SCALERS[kind](), tf.compat.v1.placeholder(tf.float32, [])
    grads = scaler.unscale([scaled, None])
    if is_clipped:
        clipped = grads[0] / 2
        note_change(clipped, grads[0], lambda values: values / 2, tf.constant(True))
        grads = [clipped, None]
    known = scaler.check_early(grads, SingleProcess())
    session.run(tf.compat.v1.global_variables_initializer())
    assert [session.run(known.usable, {scaled: value}) for value in (16.0, math.inf)] == [True, False]
    assert (grads[0].op not in with_ancestors([known.usable.op])) is reads_scaled
    assert (None if max_abs is None else session.run(known.max_abs, {scaled: -16.0})) == max_abs


@pytest.mark.graph
def test_early_check_in_a_graph_leaves_room_for_the_sum_over_replicas(session: tf.compat.v1.Session) -> None:
    scaler = _scaler_of(tfmp.FixedLossScaleManager(1))
    grads = scaler.unscale([tf.constant(3e38)])
    assert session.run([scaler.check_early(grads, each).usable for each in (SingleProcess(), _OfTwo())]) == [
        True,
        False,
    ]


@pytest.mark.parametrize(("grad", "applied"), [(1e38, True), (3e38, False)])
def test_gradient_that_overflows_when_it_is_unscaled_is_skipped(grad: float, applied: bool) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(0.5, 100, min_loss_scale=0.5)
    scaler, adapter = _scaler_of(manager), _Recording()
    step = scaler.step_of_scaled_grads(adapter, [tf.constant(grad), None], SingleProcess())
    scaler.step(step, SingleProcess())
    assert adapter.steps == [applied]


@pytest.mark.parametrize(("grad", "last"), [(1.0, [[2, 1, 0], [0, 0, 0]]), (math.inf, [[3, 1, 0], [0, 0, 0]])])
def test_overflows_of_micro_batches_are_counted_whether_the_step_is_applied_or_not(
    grad: float, last: list[list[int]]
) -> None:
    scaler, of_window = _scaler_of(_manager()), [[2, 1, 0], [0, 0, 0]]
    known = LocalCheck(tf.constant(True), overflow_counts=tf.constant(of_window, tf.int64))
    scaler.step(Step(_Recording(), [tf.constant(grad), None]), SingleProcess(), known)
    (report,) = scaler.overflow_reports()
    assert (report.last.numpy().tolist(), report.steps.numpy().tolist()) == (last, [1, 0])
