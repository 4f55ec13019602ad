"""The loss scale is read from the files of each system, whichever of the systems are installed."""

import functools
import io
import json
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import h5py
import numpy as np
import pytest
import systems
import tensorflow as tf
from systems import FIXED, OWN, STOCK

import tfmp

pytestmark = [
    # Keras 3 passes its variables to h5py, which asks NumPy for a copy.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning"),
]

_RECORDINGS = Path(__file__).parent.parent / "recordings"
_TENSORFLOW = "TensorFlow's MixedPrecisionLossScaleOptimizer"
_KERAS2 = "Keras 2's LossScaleOptimizer"
_KERAS3 = "Keras 3's LossScaleOptimizer"
_CONTRIB = "tf.contrib.mixed_precision or tfmp"


def _check(path: Path, expected: tuple[float, int, int], writer: str) -> None:
    state = tfmp.checkpoints.read_loss_scale_state(path)
    assert (*state[:3], state.writer) == (*expected, writer)
    assert [type(value) for value in state] == [float, int, int, str, str]


@pytest.mark.graph
@pytest.mark.parametrize(
    ("path", "expected", "writer"),
    [
        ("adam/model.ckpt", (512, 1, 1), _CONTRIB),
        ("momentum/model.ckpt", (512, 1, 1), _CONTRIB),
        ("scales/tensorflow/model.ckpt", STOCK, _TENSORFLOW),
        ("scales/keras2_stock/model.ckpt", STOCK, _KERAS2),
        ("scales/keras3_stock/model.ckpt", STOCK, _KERAS3),
        ("scales/keras3_stock/model.keras", STOCK, _KERAS3),
        ("scales/keras3_stock/model.weights.h5", STOCK, _KERAS3),
        *[
            (f"scales/{keras}_own/model.{ending}", OWN, "tfmp")
            for keras in ("keras2", "keras3")
            for ending in ("ckpt", "keras", "weights.h5")
        ],
    ],
)
def test_recorded_file_is_read(path: str, expected: tuple[float, int, int], writer: str) -> None:
    _check(_RECORDINGS / path, expected, writer)


_FILES = (systems.keras_file, systems.weights_file, systems.legacy_file)
_FORMATS = {
    **dict.fromkeys(("keras2", "tf_keras"), (systems.checkpoint, systems.tensorflow_weights, systems.saved_model)),
    "keras3": (systems.checkpoint, *_FILES, systems.saved_model),
}
_WRITERS = {"keras2": _KERAS2, "tf_keras": _KERAS2, "keras3": _KERAS3}


_Make: TypeAlias = Callable[[], tfmp.LossScaleManager]
_each_manager = pytest.mark.parametrize(
    ("make", "expected"), systems.OWN_MANAGERS.values(), ids=list(systems.OWN_MANAGERS)
)


@pytest.fixture(params=_WRITERS, scope="module")
def keras(request: pytest.FixtureRequest) -> tuple[str, ModuleType]:
    if (found := systems.keras_of(request.param)) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param, found


@pytest.mark.parametrize(
    ("make", "expected"), [(None, STOCK), *systems.OWN_MANAGERS.values()], ids=["Keras' own", *systems.OWN_MANAGERS]
)
def test_every_format_of_each_wrapper_is_read(
    keras: tuple[str, ModuleType], make: _Make | None, expected: tuple[float, int, int], tmp_path: Path
) -> None:
    name, module = keras
    opt = systems.stock_around(module) if make is None else systems.own_around(module, make)
    model = systems.trained_model(module, opt)
    for save in _FORMATS[name] if make is None else {*_FORMATS[name], *_FILES}:
        _check(save(model, tmp_path), expected, _WRITERS[name] if make is None else "tfmp")


def test_fixed_scale_is_read_where_keras_describes_the_optimizer(keras: tuple[str, ModuleType], tmp_path: Path) -> None:
    name, module = keras
    model = systems.trained_model(module, systems.own_fixed_around(module))
    for save in (systems.keras_file, systems.legacy_file):
        _check(save(model, tmp_path), FIXED, "tfmp's FixedLossScaleManager")
    for save in (systems.checkpoint, systems.weights_file):
        with pytest.raises(ValueError, match=r"holds no loss scale.*A fixed scale is not saved in a checkpoint"):
            tfmp.checkpoints.read_loss_scale_state(save(model, tmp_path))
    if name != "keras3":
        model = systems.trained_model(module, systems.fixed_around(module))
        for save in (systems.keras_file, systems.legacy_file):
            _check(save(model, tmp_path), FIXED, f"{_KERAS2} with a fixed scale")


def test_file_that_leaves_the_scale_out_says_so_and_names_the_initial_one() -> None:
    with pytest.raises(ValueError, match=r"Keras 2's own LossScaleOptimizer leaves it out.*initial scale, 1024"):
        tfmp.checkpoints.read_loss_scale_state(_RECORDINGS / "scales/keras2_stock/model.keras")


def _keras_file(path: Path, config: dict[str, Any], values: Sequence[str] = ()) -> Path:
    """Write a file of Keras by hand: a configuration, and a weights file with some values."""
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        for value in values:
            file[value] = np.float32(1)
    with zipfile.ZipFile(path / "model.keras", "w") as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("model.weights.h5", weights.getvalue())
    return path / "model.keras"


_OTHER_MANAGER = {"class_name": "Own", "config": {"loss_scale": 8}}
_FIXED_MANAGER = {"class_name": "FixedLossScaleManager", "config": {"loss_scale": 8}}


@pytest.mark.graph
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"loss_scale_manager": _FIXED_MANAGER}, (8.0, 0, 0, "tfmp's FixedLossScaleManager", "loss_scale_manager")),
        ({"dynamic": False, "initial_scale": 4}, (4.0, 0, 0, f"{_KERAS2} with a fixed scale", "initial_scale")),
        *((config, None) for config in ({}, {"loss_scale_manager": _OTHER_MANAGER}, {"loss_scale_manager": None})),
        *((config, None) for config in ({"dynamic": False}, {"initial_scale": 4}, None)),
    ],
)
def test_fixed_scale_is_read_from_the_optimizers_configuration(
    optimizer: dict[str, Any] | None, expected: tuple[float, int, int, str, str] | None, tmp_path: Path
) -> None:
    path = _keras_file(tmp_path, {"compile_config": {"optimizer": {"config": optimizer}}})
    if expected is not None:
        assert tfmp.checkpoints.read_loss_scale_state(path) == expected
        return
    with pytest.raises(ValueError, match=r"model\.keras holds no loss scale\. tfmp .*It has no keys\."):
        tfmp.checkpoints.read_loss_scale_state(path)


@pytest.mark.graph
@pytest.mark.parametrize("config", [{}, {"compile_config": None}, {"compile_config": {"optimizer": None}}])
@pytest.mark.parametrize(
    ("count", "listed"),
    [
        (10, "Its keys: v0, v1, v2, v3, v4, v5, v6, v7, v8, v9."),
        (11, "The first keys: v0, v1, v10, v2, v3, v4, v5, v6, v7, v8."),
    ],
)
def test_model_that_was_not_compiled_has_no_scale_and_the_first_keys_are_listed(
    config: dict[str, Any], count: int, listed: str, tmp_path: Path
) -> None:
    path = _keras_file(tmp_path, config, [f"v{number}" for number in range(count)])
    with pytest.raises(ValueError, match=rf"holds no loss scale.* {re.escape(listed)}$"):
        tfmp.checkpoints.read_loss_scale_state(path)


@pytest.mark.graph
@pytest.mark.usefixtures("no_graph_rewrite_after")
@pytest.mark.parametrize("wrap", [systems.tensorflows, systems.tensorflows_rewrite])
def test_checkpoint_of_a_saver_with_tensorflows_wrapper_is_read(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    prefix = systems.train_in_session(wrap, tmp_path)
    for path in (prefix, prefix.with_name("model.ckpt.index"), tmp_path):
        _check(path, STOCK, _TENSORFLOW)


@pytest.mark.graph
@_each_manager
def test_checkpoint_of_a_saver_is_read_with_each_manager(
    make: _Make, expected: tuple[float, int, int], tmp_path: Path
) -> None:
    path = systems.train_in_session(functools.partial(systems.own, make=make), tmp_path, optimizers=2)
    writer = "tfmp" if make is systems.log_max_manager else _CONTRIB
    for key in ("loss_scale", "loss_scale_1"):
        state = tfmp.checkpoints.read_loss_scale_state(path, key)
        assert state == (*expected, writer, key)


def test_checkpoint_of_tensorflows_wrapper_is_read_that_its_objects_made(tmp_path: Path) -> None:
    w = tf.Variable(1.0)
    opt = systems.tensorflows(tf.compat.v1.train.AdamOptimizer(0.5))
    for factor in systems.FACTORS:
        opt.minimize(lambda factor=factor: w * factor, var_list=[w])
    _check(Path(tf.train.Checkpoint(opt=opt).save(str(tmp_path / "model.ckpt"))), STOCK, _TENSORFLOW)


@_each_manager
def test_checkpoint_of_a_manager_is_read(make: _Make, expected: tuple[float, int, int], tmp_path: Path) -> None:
    manager = make()
    for factor in systems.FACTORS:
        manager.update_loss_scale(tf.math.is_finite(factor), *[tf.constant(1.0)] * manager.needs_max_abs)
    _check(Path(tf.train.Checkpoint(m=manager).save(str(tmp_path / "model.ckpt"))), expected, "tfmp")


@pytest.mark.graph
@pytest.mark.parametrize("wrap", [systems.tensorflows, systems.own])
def test_of_several_scales_one_is_chosen_by_its_key(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    path = systems.train_in_session(wrap, tmp_path, optimizers=2)
    name = "loss_scale" if wrap is systems.own else "current_loss_scale"
    with pytest.raises(ValueError, match=f"several loss scales: pass key=, one of '{name}', '{name}_1'"):
        tfmp.checkpoints.read_loss_scale_state(path)
    assert tfmp.checkpoints.read_loss_scale_state(path, key=f"{name}_1").key == f"{name}_1"
    with pytest.raises(ValueError, match=f"no loss scale with the key 'mine'.*Its loss scales: {name}, {name}_1"):
        tfmp.checkpoints.read_loss_scale_state(path, key="mine")
