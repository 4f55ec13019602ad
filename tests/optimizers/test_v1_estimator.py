"""The wrapper under tf.estimator, on one device and on two replicas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

pytestmark = [
    pytest.mark.graph,
    pytest.mark.estimator,
]

_LEARNING_RATE = 0.5


def _inputs(rows: list[float]) -> Callable[[], tf.data.Dataset]:
    return lambda: tf.data.Dataset.from_tensor_slices((np.float32(rows), np.zeros(len(rows))))


def _model_fn(manager: tfmp.LossScaleManager | None = None, is_distributed: bool = False) -> Callable[..., Any]:
    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        del labels
        w = tf.compat.v1.get_variable("w", initializer=1.0)
        loss = w * features
        used = manager or tfmp.ExponentialUpdateLossScaleManager(1024, 3, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(_LEARNING_RATE), used, is_distributed)
        train_op = opt.minimize(loss, tf.compat.v1.train.get_or_create_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def _values(estimator: Any) -> dict[str, float]:
    names = ("loss_scale", "good_steps", "bad_steps", "global_step", "w")
    return {name: float(estimator.get_variable_value(name)) for name in names}


class _FetchesByName(tf.compat.v1.train.SessionRunHook):
    """Fetches the loss scale by its name, as hooks of legacy scripts do."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def before_run(self, run_context: Any) -> tf.compat.v1.train.SessionRunArgs:
        del run_context
        return tf.compat.v1.train.SessionRunArgs("loss_scale:0")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        del run_context
        self.seen.append(run_values.results)


def test_estimator_trains_skips_and_resumes(tmp_path: Path) -> None:
    estimator = tf.estimator.Estimator(_model_fn(), tmp_path)
    by_name = _FetchesByName()
    estimator.train(_inputs([1, np.inf, 1, -np.inf]), hooks=[by_name])
    after = _values(estimator)
    assert (after["loss_scale"], after["global_step"]) == (256, 2)
    assert len(by_name.seen) == 4
    assert set(by_name.seen) <= {1024, 512, 256}
    assert after["w"] == pytest.approx(1 - 2 * _LEARNING_RATE, abs=1e-5)
    # The second call of `train` builds a new graph and restores the scale from the checkpoint.
    estimator.train(_inputs([1, 1]))
    after = _values(estimator)
    assert (after["loss_scale"], after["good_steps"], after["global_step"]) == (256, 2, 4)
    assert {name for name, _ in tf.train.list_variables(str(tmp_path))} == {
        *("loss_scale", "good_steps", "bad_steps", "global_step"),
        *("w", "w/Adam", "w/Adam_1", "cond/beta1_power", "cond/beta2_power"),
    }


def test_manager_made_outside_the_model_fn_works_in_its_graphs(tmp_path: Path) -> None:
    manager = tfmp.ExponentialUpdateLossScaleManager(1024, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    estimator = tf.estimator.Estimator(_model_fn(manager), tmp_path)
    for scale in (512, 256):
        estimator.train(_inputs([1, np.inf]))
        assert _values(estimator)["loss_scale"] == scale


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")
@pytest.mark.parametrize("shared_manager", [False, True], ids=["manager-per-replica", "manager-outside"])
@pytest.mark.parametrize("bad_replica", [0, 1])
def test_overflow_on_one_replica_skips_both(
    tmp_path: Path,
    two_replicas: tf.distribute.MirroredStrategy,
    caplog: pytest.LogCaptureFixture,
    bad_replica: int,
    shared_manager: bool,
) -> None:
    manager = None
    if shared_manager:
        manager = tfmp.ExponentialUpdateLossScaleManager(1024, 3, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    config = tf.estimator.RunConfig(train_distribute=two_replicas)
    estimator = tf.estimator.Estimator(_model_fn(manager, is_distributed=True), tmp_path, config)
    # Each step takes a row, with a column for each replica. The second and the fourth step overflow on one replica.
    rows = np.ones([6, 2])
    rows[[1, 3], bad_replica] = np.inf
    by_name = _FetchesByName()
    with caplog.at_level("INFO", logger="tfmp"):
        hook = tfmp.LossScaleLoggingHook(every_n_steps=100)
        estimator.train(_inputs(rows.ravel().tolist()), hooks=[hook, by_name])
    after = _values(estimator)
    assert (after["loss_scale"], after["good_steps"], after["global_step"]) == (256, 2, 4)
    assert after["w"] == pytest.approx(1 - 4 * _LEARNING_RATE, abs=1e-5)
    assert set(by_name.seen) <= {1024, 512, 256}
    # The hook reports one manager, although each replica may have made one.
    assert [record.getMessage() for record in caplog.records if record.name == "tfmp"] == [
        "loss scale 1024, global step 1, steps applied 1, skipped 0 (0 in a row)",
        "loss scale 256, global step 4, steps applied 4, skipped 2 (0 in a row)",
        "overflow in w:0: 1 inf",
        "overflows by variable:\nvariable  skipped steps  at the last one\nw:0                   2  1 inf",
    ]
