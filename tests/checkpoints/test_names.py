"""A checkpoint whose names differ from those of the graph is restored through a map of names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp

pytestmark = pytest.mark.graph

tf1 = tf.compat.v1

_RECORDINGS = Path(__file__).parent.parent / "recordings"
_OPTIMIZERS = {
    "adam": lambda: tf1.train.AdamOptimizer(0.01),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.0625, 0.875),
}


def _manager() -> tfmp.LossScaleManager:
    return tfmp.ExponentialUpdateLossScaleManager(1024, 3)


def _after_conditionals(opt: Any, loss: tf.Tensor, x: tf.Tensor) -> Any:
    for _ in range(2):
        loss += tf.cond(x[0] > 100, lambda: 1.0, lambda: 0.0)
    return opt.minimize(loss, tf1.train.get_or_create_global_step())


def _inside_a_conditional(opt: Any, loss: tf.Tensor, x: tf.Tensor) -> Any:
    global_step = tf1.train.get_or_create_global_step()
    grads_and_vars = opt.compute_gradients(loss)
    return tf.cond(x[0] < 100, lambda: tf.group(opt.apply_gradients(grads_and_vars, global_step)), tf.no_op)


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
@pytest.mark.parametrize("build", [_after_conditionals, _inside_a_conditional])
def test_run_of_contrib_is_restored_under_other_names(
    session: tf1.Session, optimizer: str, build: Callable[..., Any]
) -> None:
    path = str(_RECORDINGS / optimizer / "model.ckpt")
    x = tf1.placeholder(tf.float32, [3])
    w, b = tf1.get_variable("w", [3]), tf1.get_variable("b", [])
    opt = tfmp.LossScaleOptimizer(_OPTIMIZERS[optimizer](), _manager())
    build(opt, tf.reduce_sum(w * x) + b, x)
    key_to_variable = tfmp.checkpoints.variable_map(path)
    if optimizer == "adam":
        inside = key_to_variable["cond/beta1_power"].op.name
        # Control flow v2 builds the branch as a separate graph, in which the first conditional has no number.
        nested = "cond/beta1_power" if tf1.control_flow_v2_enabled() else "cond/cond/beta1_power"
        assert inside == ("cond_2/beta1_power" if build is _after_conditionals else nested)
    tf1.train.Saver(key_to_variable).restore(session, path)
    assert {key: value.tolist() for key, value in session.run(key_to_variable).items()} == _values_in(path)


def _values_in(prefix: str) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(prefix)
    return {key: reader.get_tensor(key).tolist() for key in reader.get_variable_to_shape_map()}


def _saved(build: Callable[[], Any], path: Path) -> dict[str, Any]:
    """Build, give each variable a value of its own, save, and return the values by their keys."""
    with tf.Graph().as_default(), tf1.Session() as session:
        build()
        for number, variable in enumerate(tf1.global_variables(), 2):
            variable.load(np.full(variable.shape, number, variable.dtype.base_dtype.as_numpy_dtype), session)
        return _values_in(tf1.train.Saver().save(session, str(path / "model.ckpt")))


def _restored(build: Callable[[], Any], path: Path) -> dict[str, Any]:
    """Build, restore through the map, and return the values by the variables' names in this graph."""
    with tf.Graph().as_default(), tf1.Session() as session:
        build()
        prefix = str(path / "model.ckpt")
        tf1.train.Saver(tfmp.checkpoints.variable_map(prefix)).restore(session, prefix)
        return _values_in(tf1.train.Saver().save(session, str(path / "again.ckpt")))


def _adams(
    count: int,
    *,
    wrap: bool = True,
    manager: Callable[[], tfmp.LossScaleManager] = _manager,
    conditionals: int = 0,
    names_taken: int = 0,
    parts: int | None = None,
) -> Callable[[], None]:
    """Return a function that builds optimizers in a graph, some of whose names may be taken before."""

    def build() -> None:
        x = tf1.placeholder(tf.float32, [])
        for _ in range(names_taken):
            tf.identity(x, name="loss_scale")
        for _ in range(conditionals):
            x = tf.cond(x > 0, lambda x=x: x, lambda x=x: -x)
        w = tf1.get_variable("w", [4], partitioner=None if parts is None else tf1.fixed_size_partitioner(parts))
        for _ in range(count):
            opt = tf1.train.AdamOptimizer()
            opt = tfmp.LossScaleOptimizer(opt, manager()) if wrap else opt
            opt.minimize(tf.reduce_sum(w) * x)

    return build


def test_optimizers_are_taken_in_their_order_whatever_their_numbers(tmp_path: Path) -> None:
    # `cond_2` is the scope of the first optimizer here, and was that of the second in the saved graph.
    saved = _saved(_adams(2), tmp_path)
    restored = _restored(_adams(2, conditionals=2, names_taken=1), tmp_path)
    for here, there in {
        "cond_2/beta1_power": "cond/beta1_power",
        "cond_4/beta1_power": "cond_2/beta1_power",
        "loss_scale_1": "loss_scale",
        "loss_scale_2": "loss_scale_1",
        "bad_steps_1": "bad_steps_1",
        "w/Adam_2": "w/Adam_2",
    }.items():
        assert restored[here] == saved[there], here
    assert len(restored) == len(saved)
    # As texts, names with 10 would come before those with 8 and 9.
    restored = _restored(_adams(2, conditionals=8, names_taken=9), tmp_path)
    for name in ("beta1_power", "beta2_power"):
        assert restored[f"cond_8/{name}"] == saved[f"cond/{name}"]
        assert restored[f"cond_10/{name}"] == saved[f"cond_2/{name}"]
    assert [restored[f"loss_scale_{number}"] for number in (9, 10)] == [saved["loss_scale"], saved["loss_scale_1"]]


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare-tfmp", "tfmp-bare"])
def test_optimizers_are_taken_in_their_order_from_without_loss_scaling_and_back(wrapped: bool, tmp_path: Path) -> None:
    to_wrapped = _adams(2, manager=lambda: tfmp.FixedLossScaleManager(8))
    saved = _saved(_adams(2, wrap=wrapped), tmp_path)
    restored = _restored(_adams(2, wrap=False) if wrapped else to_wrapped, tmp_path)
    assert {restored[f"w/Adam{end}"] == saved[f"w/Adam{end}"] for end in ("", "_1", "_2", "_3")} == {True}
    of_saved, of_restored = (sorted(key for key in values if "beta2_power" in key) for values in (saved, restored))
    assert len(of_saved) == 2
    assert [restored[key] for key in of_restored] == [saved[key] for key in of_saved]


def test_partitioned_variable_is_restored_whole(tmp_path: Path) -> None:
    saved = _saved(_adams(1, parts=2), tmp_path)
    assert saved["w"] == [2, 2, 3, 3]
    restored = _restored(_adams(1, conditionals=1, parts=2), tmp_path)
    assert (restored["w"], restored["w/Adam"]) == (saved["w"], saved["w/Adam"])
    assert restored["cond_1/beta1_power"] == saved["cond/beta1_power"]
    assert _restored(_adams(1, conditionals=1), tmp_path)["w"] == saved["w"]


def test_checkpoint_of_variables_by_their_ops_names_is_restored(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf1.Session() as session:
        _adams(1)()
        session.run(tf1.global_variables_initializer())
        by_op_name = {variable.op.name: variable for variable in tf1.global_variables()}
        next(variable for name, variable in by_op_name.items() if "scale" in name).load(np.float32(64), session)
        tf1.train.Saver(by_op_name).save(session, str(tmp_path / "model.ckpt"))
    assert _restored(_adams(1), tmp_path)["loss_scale"] == 64


def _faults(path: Path, variables: Any = None) -> list[str]:
    """Return what the error says of each variable that the checkpoint does not fit."""
    with pytest.raises(ValueError, match="leave the variables that it does not hold out of `variables`") as raised:
        tfmp.checkpoints.variable_map(path, variables)
    first, *faults = str(raised.value).splitlines()
    assert f"does not fit {len(faults)} of " in first
    return [fault.strip() for fault in faults]


def test_what_is_missing_is_listed_with_what_is_nearest(tmp_path: Path) -> None:
    _saved(_adams(2, wrap=False), tmp_path)
    with tf.Graph().as_default():
        _adams(2)()
        of_managers = [f"{name}{number}" for number in ("", "_1") for name in ("loss_scale", "good_steps", "bad_steps")]
        assert sorted(fault.partition(":")[0] for fault in _faults(tmp_path)) == sorted(of_managers)
        own = [v for v in tf1.global_variables() if "scale" not in v.name and "steps" not in v.name]
        slots = [f"w/Adam{number}" for number in ("", "_1", "_2", "_3")]
        powers = [f"beta{beta}_power{number}" for beta in (1, 2) for number in ("", "_1")]
        assert set(tfmp.checkpoints.variable_map(tmp_path, own)) == {"w", *slots, *powers}
        others = [tf1.get_variable(name, [4]) for name in ("w/Adam_7", "w/m", "kernel")]
        assert _faults(tmp_path, others) == [
            "w/Adam_7: missing, the nearest are w/Adam_3, w/Adam_2, w/Adam_1",
            "w/m: missing, the nearest are w/Adam, w/Adam_3, w/Adam_2",
            "kernel: missing",
        ]


def test_ambiguous_names_are_listed_and_those_whose_exact_names_were_saved_are_not(tmp_path: Path) -> None:
    _saved(_adams(2), tmp_path)
    with tf.Graph().as_default():
        _adams(1, conditionals=1)()
        assert _faults(tmp_path)[0] == (
            "cond_1/beta1_power: ambiguous, there are cond_1/beta1_power in the graph "
            "and cond/beta1_power, cond_2/beta1_power in the checkpoint"
        )
    with tf.Graph().as_default():
        _adams(2)()
        second = [v for v in tf1.global_variables() if v.op.name.startswith("cond_2/")]
        found = tfmp.checkpoints.variable_map(tmp_path, second)
    assert {key: variable.op.name for key, variable in found.items()} == {
        key: key for key in ("cond_2/beta1_power", "cond_2/beta2_power")
    }


def test_another_shape_or_type_is_listed_and_what_is_no_variable_or_checkpoint_refused(tmp_path: Path) -> None:
    _saved(_adams(1), tmp_path)
    with tf.Graph().as_default():
        variables = [tf1.get_variable("w", [3]), tf1.get_variable("good_steps", [], tf.int64, tf1.zeros_initializer())]
        assert _faults(tmp_path, variables) == [
            "w: float32 of shape (3,) in the graph, float32 of shape (4,) in the checkpoint",
            "good_steps: int64 of shape () in the graph, int32 of shape () in the checkpoint",
        ]
        with pytest.raises(TypeError, match=r"variables must be .*, and it holds 'w' of type str"):
            tfmp.checkpoints.variable_map(tmp_path, ["w"])
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            tfmp.checkpoints.variable_map(tmp_path / "other.ckpt")
