"""What the callback shows in the `fit` of every Keras and the hook shows in a session: the same, in the same words."""

import functools
import importlib
import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from reporters import HALVED, OVERFLOW, REPORTERS, SHOWN, Reporter, events, kinds

import tfmp

_Make = Callable[..., Reporter]
_SPIKES = {"max_norm": 50, "max_consecutive_skips": 3}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.graph if name == "session" else ()) for name in REPORTERS])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Make:
    return functools.partial(REPORTERS[request.param], tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("spikes", [None, _SPIKES], ids=["plain", "spikes"])
def test_each_step_shows_and_summaries_hold_its_scale_its_norm_and_what_was_skipped(
    make: _Make, spikes: dict[str, Any] | None, tmp_path: Path
) -> None:
    reporter, is_spike = make(spikes=spikes), int(spikes is not None)
    run = reporter.run([1, OVERFLOW, 2, 100, 4], every_n_steps=1, summary_dir=str(tmp_path))
    skipped_spikes = [0, 0, 0, is_spike, is_spike]
    expected = {
        "loss_scale": [1024, 512, 512, 512, 512],
        "attempted_steps": [1, 2, 3, 4, 5],
        "applied_steps": [1, 1, 2, 3 - is_spike, 4 - is_spike],
        "skipped_steps": [0, 1, 1, 1 + is_spike, 1 + is_spike],
        "consecutive_skipped_steps": [0, 1, 0, is_spike, 0],
        "last_step_applied": [1, 0, 1, 1 - is_spike, 1],
        "last_step_finite": [1, 0, 1, 1, 1],
        "gradient_norm": [5, math.inf, 10, 500, 20],
        **({"skipped_spikes": skipped_spikes} if spikes else {}),
    }
    assert run.shown == {name: expected[name] for name in SHOWN if name in expected}
    norms = {"step": expected["attempted_steps"], "gradient_norm": expected["gradient_norm"]}
    assert run.monitor.norms.to_dict() == {**norms, "skipped_spikes": skipped_spikes}
    steps = expected["applied_steps"]
    assert events(tmp_path) == {
        tag: list(zip(steps, values, strict=True)) + [(steps[-1], values[-1])] * reporter.repeats
        for tag, values in expected.items()
    }


@pytest.mark.parametrize("every", [1, 100])
def test_overflows_and_spikes_are_named_once_and_counted_by_run(make: _Make, every: int) -> None:
    reporter = make(spikes=_SPIKES)
    name = reporter.weight
    # The last report follows an applied step.
    first = reporter.run([1, OVERFLOW, 100, 1], every_n_steps=every)
    head = f"{'variable':{len(name)}}  skipped steps  at the last one"
    assert first.log.info == [
        f"overflow in {name}: 2 inf",
        f"spike: gradient norm 500 above the bound 50, from {name} (100 %); 1 skipped so far",
        f"overflows by variable:\n{head}\n{name:{len('variable')}}              1  2 inf",
    ]
    # The next run goes on where this one ended; its table has the overflows of its own only.
    second = reporter.run([1], every_n_steps=every)
    assert second.log.info == []
    assert second.shown["loss_scale"] == [512]
    third = reporter.run([OVERFLOW], every_n_steps=every)
    assert [line.split()[-3:] for line in third.log.info[1:]] == [["1", "2", "inf"]]


def test_spikes_without_end_are_no_reason_to_stop_but_one_to_warn(make: _Make) -> None:
    reporter = make(spikes=_SPIKES)
    # The next run begins where the last one ended, and warns of what is new only.
    for factors, warnings in [([100] * 5, 1), ([100, 1], 0), ([100] * 3, 1)]:
        run = reporter.run(factors, every_n_steps=1, on_stuck="raise", stuck_after=1)
        assert run.error is None
        assert run.log.warnings == warnings * [
            "the number of spikes in a row reached max_consecutive_skips=3: the gradients have grown for good, or "
            "training diverges. Steps are applied until a norm is within the bound again."
        ]


_HUGE = 2.0**110
#: The manager, the factors, how often training is stuck after as many back-offs as are said, after which step, and why.
_STUCK: dict[str, tuple[Any, list[float], int, int, str]] = {
    "NaN": (8, [1, math.nan, math.nan, math.nan], 64, 2, "the loss is NaN before it is scaled"),
    "infinite": (8, [1, -math.inf, -math.inf], 64, 2, "the loss is infinite before it is scaled"),
    # The scales are 2**21 and 2**20: the second step runs at the floor, but may be a single bad batch.
    "floor": (
        {**HALVED, "init_loss_scale": 2**21, "min_loss_scale": 2**20},
        [_HUGE] * 4,
        64,
        3,
        "the loss scale is at its floor, 1048576, and 2 steps in a row overflowed all the same",
    ),
    "fixed": (2**20, [_HUGE] * 5, 3, 3, "the last 3 steps were skipped, and the loss scale is 1048576 now: a fixed"),
}


@pytest.mark.parametrize(
    ("case", "policy"),
    [(case, "stop") for case in _STUCK] + [(case, policy) for case in ("NaN", "floor") for policy in ("warn", "raise")],
)
def test_training_that_is_stuck_is_warned_of_stopped_or_ended_by_an_error(
    make: _Make, case: str, policy: str, tmp_path: Path
) -> None:
    manager, factors, stuck_after, steps, reason = _STUCK[case]
    settings = {"every_n_steps": 1, "stuck_after": stuck_after, "summary_dir": str(tmp_path)}
    run = make(manager, learning_rate=0.25).run(factors, on_stuck=policy, **settings)
    steps = len(factors) if policy == "warn" else steps
    assert run.steps == steps
    if policy == "raise":
        assert reason in str(run.error)
        assert run.log.warnings == []
    else:
        (warning,) = run.log.warnings
        assert warning.startswith("training is stuck: ")
        assert reason in warning
        assert ("Training stops here, because on_stuck is 'stop'." in warning) == (policy == "stop")
    # The weights are those of the last applied step; the table and the summaries hold the last one, also of an error.
    applied = factors.count(1)
    assert run.weights == ([0.25, 0.0] if applied else [1.0, 1.0])
    assert re.search(rf" {steps - applied}  2 {'nan' if case == 'NaN' else 'inf'}$", run.log.info[-1])
    assert events(tmp_path)["attempted_steps"][-1] == (applied, steps)


#: What becomes of a factor's gradient in float16 at a scale of 512 or 1024.
_OUTCOMES = {
    1.0: "normal",
    2.0**-40: "lost",
    2.0**-28: "subnormal",
    0.0: "zero",
    OVERFLOW: "nonfinite",
    2.0**10: "overflow",
}


@pytest.mark.parametrize(("every", "reports"), [(1, 1), (2, 3), (3, 100), (7, 100)])
def test_ranges_are_those_of_every_nth_step_at_its_scale(make: _Make, every: int, reports: int) -> None:
    reporter, factors = make(), list(_OUTCOMES)
    ranges = reporter.run(factors, every_n_steps=reports, ranges_every_n_steps=every).monitor.ranges
    looks = range(every, len(factors) + 1, every)
    assert ranges.to_dict() == {
        "step": list(looks),
        # The fifth step overflows.
        "loss_scale": [1024 if step < 6 else 512 for step in looks],
        **{
            f"gradients_{outcome}": [float(_OUTCOMES[factors[step - 1]] == outcome) for step in looks]
            for outcome in ("zero", "lost", "subnormal", "normal", "overflow", "nonfinite")
        },
    }
    if not looks:
        assert ranges.last is None
    elif looks[-1] == len(factors):
        assert kinds(ranges) == {
            "gradients": {reporter.short: {"11": 1, "12": 1}},
            "weights": {reporter.short: {"0": 2}},
        }


def test_ranges_are_written_as_shares_and_exact_histograms(make: _Make, tmp_path: Path) -> None:
    make().run([2.0**-40, OVERFLOW, 1], ranges_every_n_steps=1, summary_dir=str(tmp_path))
    found = events(tmp_path)
    assert {tag: found[f"gradients_{tag}"] for tag in ("zero", "lost", "subnormal")} == {
        # An overflow is no part of these.
        "zero": [(1, 0), (1, 0), (2, 0)],
        "lost": [(1, 1), (1, 0), (2, 0)],
        "subnormal": [(1, 0)] * 2 + [(2, 0)],
    }
    (gradients,) = [tag for tag in found if tag.startswith("gradients/")]
    (weights,) = [tag for tag in found if tag.startswith("weights/")]
    # What is not finite is left out.
    rows = [[[-39, -38, 1], [-38, -37, 1]], [], [[1, 2, 1], [2, 3, 1]]]
    assert found[gradients] == list(zip([1, 1, 2], rows, strict=True))
    assert found[weights] == [(1, [[0, 1, 2]])] * 2 + [(2, [[0, 1, 2]])]
    if importlib.util.find_spec("tensorboard") is not None:
        module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        shown = module.EventAccumulator(str(tmp_path), size_guidance={module.TENSORS: 0}).Reload()
        assert shown.SummaryMetadata(gradients).plugin_data.plugin_name == "histograms"
        assert [tf.make_ndarray(event.tensor_proto).tolist() for event in shown.Tensors(gradients)] == rows


_CALLBACK, _HOOK = tfmp.LossScaleCallback, tfmp.LossScaleLoggingHook
_COUNT = "must be a whole number from 1 to 2**31 - 1, got"
_NO_MANAGER = "manager must be a tfmp.LossScaleManager, or a tfmp.LossScaleOptimizer or tfmp.GradScaler, got"


@pytest.mark.parametrize(
    ("monitors", "settings", "error", "message"),
    [
        ([_CALLBACK, _HOOK], {"on_stuck": "hold"}, ValueError, '"warn", "raise" or "stop", got \'hold\'.'),
        ([_CALLBACK, _HOOK], {"stuck_after": 0}, ValueError, f"stuck_after {_COUNT} 0."),
        ([_CALLBACK, _HOOK], {"every_n_steps": 0}, ValueError, f"every_n_steps {_COUNT} 0."),
        ([_CALLBACK, _HOOK], {"ranges_every_n_steps": "9"}, TypeError, "must be a number, got '9' of type str."),
        ([_CALLBACK], {"gradient_norm": 0}, TypeError, "gradient_norm must be True or False, got 0"),
        ([_CALLBACK], {"ranges_batch": ([1.0], [1.0])}, ValueError, "every ranges_every_n_steps steps: pass that, too"),
        ([_CALLBACK], {"scaler": 8}, TypeError, "scaler must be a tfmp.GradScaler or a tfmp.LossScaleOptimizer, got 8"),
        ([_HOOK], {"every_n_secs": -1.0}, ValueError, "every_n_secs must be greater than 0, got -1.0."),
        ([_HOOK], {"every_n_steps": 2, "every_n_secs": 1}, ValueError, "not both, got every_n_steps=2 and every_n_se"),
        ([_HOOK], {"manager": 8}, TypeError, f"{_NO_MANAGER} 8 of type int."),
    ],
)
def test_bad_setting_is_refused(monitors: list[Any], settings: Any, error: type[Exception], message: str) -> None:
    for monitor in monitors:
        with pytest.raises(error, match=re.escape(message)):
            monitor(**settings)


@pytest.mark.parametrize("monitor", [_CALLBACK, _HOOK])
def test_ranges_without_an_interval_are_refused(monitor: Any) -> None:
    with pytest.raises(ValueError, match=f"no ranges are looked at: pass ranges_every_n_steps to {monitor.__name__}"):
        _ = monitor().ranges
