"""The state of a `GradScaler`: in checkpoints, SavedModels and copies, and as it is shown."""

import copy
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from scaler_loops import counts, sgd

import tfmp


def _step(scaler: Any, *grads: float, updates: bool = True) -> list[float]:
    optimizer, weight = sgd(), tf.Variable(0.0)
    for grad in grads:
        scaler.step(optimizer, [(scaler.scale(tf.constant(grad)), weight)])
        if updates:
            scaler.update()
    return [float(weight), float(scaler.loss_scale), *counts(scaler)]


def test_counts_are_loaded_as_the_floats_of_a_json_file_and_a_disabled_scaler_has_none() -> None:
    scaler = tfmp.GradScaler(8, growth_interval=3)
    scaler.load_state_dict(json.loads('{"loss_scale": 512.0, "good_steps": 2.0, "bad_steps": 0.0}'))
    assert scaler.state_dict() == {"loss_scale": 512.0, "good_steps": 2, "bad_steps": 0}
    assert _step(scaler, 8.0)[1] == 1024
    disabled = tfmp.GradScaler(enabled=False)
    disabled.load_state_dict({"anything": 8.0})
    assert disabled.state_dict() == {}


def test_checkpoint_holds_the_managers_state_and_no_results_of_steps(tmp_path: Path) -> None:
    scaler = tfmp.GradScaler(1024)
    _step(scaler, math.inf)
    # The iteration of this step has no update before the checkpoint is saved.
    _step(scaler, math.inf, updates=False)
    path = tf.train.Checkpoint(scaler=scaler).save(str(tmp_path / "checkpoint"))
    keys = [name for name, _ in tf.train.list_variables(path) if name.startswith("scaler")]
    assert keys == [
        f"scaler/manager/state/values/{name}/.ATTRIBUTES/VARIABLE_VALUE"
        for name in ("bad_steps", "good_steps", "loss_scale")
    ]
    # The checkpoint is restored before the other scaler takes a step.
    other = tfmp.GradScaler(8)
    tf.train.Checkpoint(scaler=other).restore(path).assert_consumed()
    assert float(other.loss_scale) == 512
    with pytest.raises(RuntimeError, match="call step first"):
        other.update()


def test_exported_module_trains(tmp_path: Path) -> None:
    class Trainer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaler, self.weight, self._optimizer = tfmp.GradScaler(8), tf.Variable(0.0), sgd()

        @tf.function(input_signature=[tf.TensorSpec([])])
        def train(self, grad: tf.Tensor) -> tf.Tensor:
            self.scaler.step(self._optimizer, [(self.scaler.scale(grad), self.weight)])
            self.scaler.update()
            return self.scaler.loss_scale

    trainer = Trainer()
    trainer.train(tf.constant(math.inf))
    tf.saved_model.save(trainer, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert [float(loaded.train(tf.constant(grad))) for grad in (1.0, math.inf)] == [4, 2]
    assert float(loaded.weight) == -1


@pytest.mark.parametrize(
    ("settings", "shown"),
    [({}, ""), ({"enabled": False}, "enabled=False, "), ({"is_distributed": True}, "is_distributed=True, ")],
)
def test_repr_shows_the_settings_that_are_not_the_default(settings: dict[str, bool], shown: str) -> None:
    assert repr(tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(8), **settings)) == (
        f"<tfmp.GradScaler({shown}<FixedLossScaleManager(loss_scale=8.0)>): applied_steps=0, skipped_steps=0>"
    )


class _Halving(tfmp.LossScaleManager):  # type: ignore[misc] # of any type
    """A manager of a user, without get_config."""

    def __init__(self) -> None:
        self.scale = tf.Variable(64.0, trainable=False)

    def get_loss_scale(self) -> tf.Tensor:
        return tf.convert_to_tensor(self.scale)

    def update_loss_scale(self, finite_grads: tf.Tensor) -> Any:
        return self.scale.assign(tf.where(finite_grads, self.scale, self.scale / 2))

    def state_dict(self) -> dict[str, float]:
        return {"scale": float(self.scale)}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
@pytest.mark.parametrize(
    "make_settings",
    [
        lambda: {"init_scale": 1024.0, "growth_interval": 3},
        lambda: {"manager": 8},
        lambda: {"manager": "log_max", "overflow_detector": tfmp.SaturationDetector()},
        lambda: {"init_scale": 1024.0, "skip_spikes": tfmp.SpikeDetector(max_norm=100.0)},
        lambda: {"enabled": False},
        lambda: {"manager": _Halving()},
    ],
    ids=["exponential", "fixed", "log_max", "spikes", "disabled", "own"],
)
def test_copy_goes_on_from_the_same_state_and_shares_nothing(
    copied: Callable[..., Any], make_settings: Callable[[], dict[str, Any]]
) -> None:
    scaler = tfmp.GradScaler(**make_settings())
    _step(scaler, math.inf, 1.0, 2.0, 1e6)
    made = copied(scaler)
    assert (type(made), repr(made).split(" object")[0]) == (tfmp.GradScaler, repr(scaler).split(" object")[0])
    assert made.state_dict() == scaler.state_dict()
    assert bool(made.last_step_finite) == bool(scaler.last_step_finite)
    before = repr(scaler), scaler.state_dict()
    after = _step(made, 1.0, math.inf, 2.0)
    assert (repr(scaler), scaler.state_dict()) == before
    assert _step(scaler, 1.0, math.inf, 2.0) == after
    assert scaler.spike_detector is None or made.spike_detector is not scaler.spike_detector
