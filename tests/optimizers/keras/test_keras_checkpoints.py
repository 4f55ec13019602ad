"""A checkpoint holds a wrapped optimizer as without a wrapper, and the wrapper is restored whoever saved it."""

from pathlib import Path
from types import ModuleType

import pytest
import tensorflow as tf
from kerases import for_every_keras
from moving import CHECKPOINT, make_model, run_of, scale_and_count, train, trained


@for_every_keras("keras3")
def test_checkpoint_of_tfmp_is_refused_by_keras_3s_own_wrapper(keras: ModuleType, tmp_path: Path) -> None:
    # As that of an optimizer without a wrapper. It is restored into the optimizer inside instead.
    CHECKPOINT.save(keras, trained(keras, "tfmp"), tmp_path)
    own = make_model(keras, "own")
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected dtype int64 does not equal"):
        CHECKPOINT.load(keras, own, tmp_path, own.optimizer)


@for_every_keras("keras3")
def test_checkpoint_never_holds_the_optimizers_of_a_multi_optimizer(keras: ModuleType, tmp_path: Path) -> None:
    source, target = (make_model(keras, "bare", name="MultiOptimizer", use_ema=False) for _ in range(2))
    CHECKPOINT.save(keras, train(source, range(3)), tmp_path)
    CHECKPOINT.load(keras, target, tmp_path, target.optimizer)
    assert [int(each.iterations) for each in (target.optimizer, *target.optimizer.optimizers)] == [3, 0, 0]


@for_every_keras()
def test_keys_are_those_without_a_wrapper_and_more(keras: ModuleType, tmp_path: Path) -> None:
    keys = {}
    for kind in ("bare", "tfmp"):
        path = tf.train.Checkpoint(optimizer=trained(keras, kind).optimizer).write(str(tmp_path / kind))
        keys[kind] = {key for key, _ in tf.train.list_variables(path)}
    assert keys["bare"] < keys["tfmp"]
    more = keys["tfmp"] - keys["bare"]
    # With Keras 3 the state of the manager is there under its own names, too, as in checkpoints of earlier versions.
    manager = "optimizer/_loss_scale_manager/state/values/{}/.ATTRIBUTES/VARIABLE_VALUE"
    of_manager = {manager.format(name) for name in ("loss_scale", "good_steps", "bad_steps")}
    assert {key for key in more if not key.startswith("optimizer/_variables/state_")} == (
        of_manager if keras.__version__.startswith("3.") else set()
    )


@for_every_keras()
def test_layouts_are_told_apart_in_each_restore(keras: ModuleType, tmp_path: Path) -> None:
    model = make_model(keras, "tfmp")
    for restore, kind in enumerate(["own", "bare", "own", "tfmp", "bare"]):
        source = train(make_model(keras, kind), range(restore, 2 * restore + 1))
        CHECKPOINT.save(keras, source, tmp_path / str(restore))
        CHECKPOINT.load(keras, model, tmp_path / str(restore), model.optimizer)
        assert run_of(model) == run_of(source)
        if kind != "bare":
            assert scale_and_count(model) == scale_and_count(source)
