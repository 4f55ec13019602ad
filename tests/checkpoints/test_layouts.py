"""Among the saved values, each loss scale is found with the counters that belong to it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import systems
import tensorflow as tf

import tfmp


def _saved(values: dict[str, Any], path: Path) -> Path:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {
            key: tf.compat.v1.get_variable(f"v{index}", initializer=value, use_resource=True)
            for index, (key, value) in enumerate(values.items())
        }
        session.run(tf.compat.v1.global_variables_initializer())
        return Path(tf.compat.v1.train.Saver(variables).save(session, str(path / "model.ckpt")))


@pytest.mark.graph
def test_managers_of_several_classes_are_not_taken_for_each_other_in_a_checkpoint_of_a_saver(tmp_path: Path) -> None:
    makers = [systems.own_manager, systems.log_max_manager]
    path = systems.train_in_session(lambda opt: systems.own(opt, makers.pop()), tmp_path, optimizers=2)
    with pytest.raises(ValueError, match=r"the scales loss_scale, loss_scale_1 of managers of several classes"):
        tfmp.read_loss_scale_state(path)


@pytest.mark.graph
def test_variables_that_look_like_those_of_another_manager_change_nothing(tmp_path: Path) -> None:
    scale = {"loss_scale": np.float32(8), "good_steps": np.int32(1), "bad_steps": np.int32(2)}
    path = _saved(scale | {"log_mean": np.float32(1), "margin": np.int32(3)}, tmp_path)
    assert tfmp.read_loss_scale_state(path)[:3] == (8, 1, 2)


@pytest.mark.graph
def test_counters_belong_to_the_scale_of_their_scope_and_turn(tmp_path: Path) -> None:
    counts = {"good_steps": np.int32(1), "bad_steps": np.int32(2)}
    values = {f"a/b/{key}": value for key, value in counts.items()} | {"a/b/loss_scale_2": np.float32(8)}
    values |= {f"{key}{below}": value + 2 for key, value in counts.items() for below in ("/value", "_1/value")}
    values |= {
        "good_steps_1/value": np.int32(5),
        "loss_scale/value": np.float32(16),
        "loss_scale_3/value": np.float32(32),
    }
    path = _saved(values, tmp_path)
    assert tfmp.read_loss_scale_state(path, "a/b/loss_scale_2")[:3] == (8, 1, 2)
    assert tfmp.read_loss_scale_state(path, "loss_scale/value")[:3] == (16, 3, 4)
    assert tfmp.read_loss_scale_state(path, "loss_scale_3/value")[:3] == (32, 5, 4)


@pytest.mark.graph
def test_scale_without_counters_is_none_of_these_systems(tmp_path: Path) -> None:
    path = _saved({"loss_scale": np.float32(8), "w": np.float32(1)}, tmp_path)
    with pytest.raises(ValueError, match=r"holds no loss scale\. tfmp looked for .*Its keys: loss_scale, w\."):
        tfmp.read_loss_scale_state(path)
