"""A scaler whose workers train together: when it averages their gradients, and when they must agree."""

import pytest
import tensorflow as tf
from scaler_loops import Training
from stand_ins import Workers, run_horovod

import tfmp


def _training(monkeypatch: pytest.MonkeyPatch, **settings: bool) -> tuple[Training, Workers]:
    training, workers = Training(tfmp.GradScaler(8, **settings)), Workers()
    monkeypatch.setattr(training.scaler._scaler, "distribution", lambda: workers)
    return training, workers


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("unscales", ["", "gradients", "window"])
def test_gradients_are_averaged_once_whether_they_are_unscaled_before_or_not(
    unscales: str, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, workers = _training(monkeypatch, enabled=enabled, is_distributed=True)
    accumulator, grads = tfmp.GradientAccumulator(training.weights, 1), [tf.constant(16.0), None]
    accumulator.add(grads)
    if unscales:
        grads = training.unscale(grads if unscales == "gradients" else accumulator)
    training.step(grads)
    # Those of a window are unscaled.
    mean = 1 if enabled and unscales != "window" else 8
    assert float(training.weights[0]) == 1 - mean / 2
    assert workers.averaged == [([16, None], ["gradient 0", "gradient 1"], None)]
    # Workers that check nothing need not agree, except on a window.
    num_checks = (2 if unscales else 1) if enabled else int(unscales == "window")
    assert workers.agreed == [True] * num_checks


def test_workers_need_no_strategy_if_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    training, _ = _training(monkeypatch, enabled=False)
    # A strategy that tfmp does not support would be refused here.
    monkeypatch.setattr(training.scaler._scaler, "distribution", lambda: pytest.fail("the strategy was looked up"))
    training.step(training.unscale([tf.constant(1.0), None]))
    assert float(training.weights[0]) == 0.5


@pytest.mark.parametrize("is_distributed", [True, False])
def test_setting_decides_whether_processes_of_horovod_train_together(
    is_distributed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_horovod(monkeypatch, 2)
    scaler = tfmp.GradScaler(8, is_distributed=is_distributed)
    assert repr(scaler._scaler.distribution()) == ("Horovod()" if is_distributed else "SingleProcess()")
    scaler._scaler.warn_if_not_averaged()
    assert ("nothing averages the gradients" in caplog.text) is not is_distributed
