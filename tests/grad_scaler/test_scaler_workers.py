"""A scaler whose workers train together: when it averages their gradients, and when they must agree."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf
from recording_adapters import numbers
from stand_in_horovod import run_horovod

import tfmp
from tfmp.core.distribute import SingleProcess
from tfmp.types import Gradient, Gradients


class _Workers(SingleProcess):
    """Two workers, of which the other has no gradients; keeps what they are asked."""

    def __init__(self) -> None:
        self.averaged: list[Any] = []
        self.agreed: list[bool] = []

    def mean(self, grads: Gradients, names: Sequence[str], dtype: tf.DType | None) -> list[Gradient]:
        self.averaged.append((numbers(grads), list(names), dtype))
        return [None if grad is None else grad / 2 for grad in grads]

    def agree(
        self, usable: tf.Tensor, max_abs: tf.Tensor | None, grads: Gradients, names: Sequence[str]
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        self.agreed.append(bool(usable))
        return super().agree(usable, max_abs, grads, names)


class _Training:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, enabled: bool = True, is_distributed: bool = True) -> None:
        self.workers, self.weight = _Workers(), tf.Variable(0.0)
        self.optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        self.scaler = tfmp.GradScaler(8, enabled=enabled, is_distributed=is_distributed)
        monkeypatch.setattr(self.scaler._scaler, "distribution", lambda: self.workers)

    def step(self, grads: Gradients) -> float:
        self.scaler.step(self.optimizer, zip(grads, [self.weight, tf.Variable(0.0)], strict=True))
        self.scaler.update()
        return float(self.weight)


@pytest.mark.parametrize(("enabled", "weight"), [(True, -1.0), (False, -8.0)])
@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_are_averaged_once_whether_they_are_unscaled_before_or_not(
    enabled: bool, weight: float, unscales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = _Training(monkeypatch, enabled=enabled)
    grads = [tf.constant(16.0), None]
    if unscales:
        grads = training.scaler.unscale(training.optimizer, grads)
        assert numbers(grads) == [-weight, None]
    assert training.step(grads) == weight
    assert training.workers.averaged == [([16, None], ["gradient 0", "gradient 1"], None)]
    # Workers that check nothing need not agree.
    assert training.workers.agreed == [True] * enabled * (2 if unscales else 1)


@pytest.mark.parametrize("enabled", [True, False])
def test_mean_of_a_window_is_averaged_when_it_is_unscaled(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    training = _Training(monkeypatch, enabled=enabled)
    accumulator = tfmp.GradientAccumulator([training.weight, tf.Variable(0.0)], 2)
    for grad in (1.0, 3.0):
        accumulator.add([tf.constant(grad), None])
    grads = training.scaler.unscale(training.optimizer, accumulator)
    assert numbers(grads) == [1, None]
    assert training.step(grads) == -1
    assert training.workers.averaged == [([2, None], ["gradient 0", "gradient 1"], None)]


def test_workers_that_train_apart_average_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    training = _Training(monkeypatch, is_distributed=False)
    assert training.step([tf.constant(8.0), None]) == -1
    assert training.workers.averaged == []


@pytest.mark.parametrize("is_distributed", [True, False])
def test_setting_decides_whether_processes_of_horovod_train_together(
    is_distributed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_horovod(monkeypatch, 2)
    scaler = tfmp.GradScaler(8, is_distributed=is_distributed)
    assert repr(scaler._scaler.distribution()) == ("Horovod()" if is_distributed else "SingleProcess()")
    scaler._scaler.worker_average.warn_if_missing()
    assert ("nothing averages the gradients" in caplog.text) is not is_distributed


def test_disabled_scaler_asks_for_no_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    training = _Training(monkeypatch, enabled=False, is_distributed=False)
    # A strategy that tfmp does not support would be refused here.
    monkeypatch.setattr(training.scaler._scaler, "distribution", lambda: pytest.fail("the strategy was looked up"))
    (grad,) = training.scaler.unscale(training.optimizer, [tf.constant(2.0)])
    assert training.step([grad, None]) == -2


def test_update_in_the_scope_of_a_strategy_is_outside_of_its_replicas(
    two_replicas: tf.distribute.MirroredStrategy,
) -> None:
    optimizer, scaler = tf.compat.v1.train.GradientDescentOptimizer(1.0), tfmp.GradScaler(8)
    with two_replicas.scope():
        weight = tf.Variable(0.0)
        two_replicas.run(lambda: scaler.step(optimizer, [(tf.constant(math.inf), weight)]))
        scaler.update()
    assert float(scaler.loss_scale) == 4
