"""The loss scale is read from the files of each system as plain data; one that is damaged is an error that names it."""

import functools
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import h5py
import kerases
import numpy as np
import pytest
import systems
import tensorflow as tf
from systems import FIXED, OWN, STOCK

import tfmp

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


_FILES = ("model.keras", "model.weights.h5", "model.h5", "model.hdf5")
_OF_KERAS2 = ("model.ckpt", "weights", "saved_model")
_FORMATS = {"keras2": _OF_KERAS2, "tf_keras": _OF_KERAS2, "keras3": ("model.ckpt", *_FILES, "saved_model")}
_WRITERS = {"keras2": _KERAS2, "tf_keras": _KERAS2, "keras3": _KERAS3}

_Make: TypeAlias = Callable[[], tfmp.LossScaleManager]


@pytest.fixture(params=kerases.installed().items(), ids=list(kerases.installed()), scope="module")
def keras(request: pytest.FixtureRequest) -> tuple[str, ModuleType]:
    return request.param


@pytest.mark.parametrize(
    ("make", "expected"), [(None, STOCK), *systems.OWN_MANAGERS.values()], ids=["Keras' own", *systems.OWN_MANAGERS]
)
def test_every_format_is_read(keras: Any, make: _Make | None, expected: Any, tmp_path: Path) -> None:
    name, module = keras
    opt = systems.stock_around(module) if make is None else systems.own_around(module, make)
    model = systems.trained_model(module, opt)
    for file in _FORMATS[name] if make is None else dict.fromkeys([*_FORMATS[name], *_FILES]):
        _check(systems.save(model, tmp_path, file), expected, _WRITERS[name] if make is None else "tfmp")


def test_fixed_scale_is_read_where_keras_describes_the_optimizer(keras: tuple[str, ModuleType], tmp_path: Path) -> None:
    name, module = keras
    optimizers = {"tfmp's FixedLossScaleManager": systems.own_around(module, lambda: tfmp.FixedLossScaleManager(128))}
    if name != "keras3":
        fixed = systems.stock_around(module, dynamic=False, initial_scale=128.0)
        optimizers[f"{_KERAS2} with a fixed scale"] = fixed
    for writer, optimizer in optimizers.items():
        model = systems.trained_model(module, optimizer)
        for file in ("model.keras", "model.h5"):
            _check(systems.save(model, tmp_path, file), FIXED, writer)
        for file in ("model.ckpt", "model.weights.h5") if writer.startswith("tfmp") else ():
            with pytest.raises(ValueError, match=r"holds no loss scale.*A fixed scale is not saved in a checkpoint"):
                tfmp.checkpoints.read_loss_scale_state(systems.save(model, tmp_path, file))


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


def _manager_of(name: str) -> dict[str, Any]:
    return {"loss_scale_manager": {"class_name": name, "config": {"loss_scale": 8}}}


@pytest.mark.graph
@pytest.mark.parametrize(
    "config",
    [
        *({}, {"compile_config": None}, {"compile_config": {"optimizer": None}}),
        *(
            {"compile_config": {"optimizer": {"config": optimizer}}}
            for optimizer in (
                *({}, None, _manager_of("Own"), {"loss_scale_manager": None}),
                *({"dynamic": False}, {"initial_scale": 4}),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    ("count", "listed"),
    [
        (0, "It has no keys."),
        (10, "Its keys: v0, v1, v2, v3, v4, v5, v6, v7, v8, v9."),
        (11, "The first keys: v0, v1, v10, v2, v3, v4, v5, v6, v7, v8."),
    ],
)
def test_file_without_a_scale_is_refused_with_its_first_keys(
    config: dict[str, Any], count: int, listed: str, tmp_path: Path
) -> None:
    path = _keras_file(tmp_path, config, [f"v{number}" for number in range(count)])
    with pytest.raises(ValueError, match=rf"model\.keras holds no loss scale\. .* {re.escape(listed)}$"):
        tfmp.checkpoints.read_loss_scale_state(path)


@pytest.mark.graph
@pytest.mark.usefixtures("no_graph_rewrite_after")
@pytest.mark.parametrize("wrap", [systems.tensorflows, systems.tensorflows_rewrite])
def test_checkpoint_of_a_saver_with_tensorflows_wrapper_is_read(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    prefix = systems.train_in_session(wrap, tmp_path)
    for path in (prefix, prefix.with_name("model.ckpt.index"), tmp_path):
        _check(path, STOCK, _TENSORFLOW)


@pytest.mark.graph
@pytest.mark.parametrize("kind", systems.OWN_MANAGERS)
def test_checkpoint_of_a_saver_is_read_with_each_manager(kind: str, tmp_path: Path) -> None:
    make, expected = systems.OWN_MANAGERS[kind]
    path = systems.train_in_session(functools.partial(systems.own, make=make), tmp_path, optimizers=2)
    writer = "tfmp" if kind == "log_max" else _CONTRIB
    for key in ("loss_scale", "loss_scale_1"):
        assert tfmp.checkpoints.read_loss_scale_state(path, key) == (*expected, writer, key)


@pytest.mark.parametrize("kind", systems.OWN_MANAGERS)
def test_checkpoint_of_a_manager_is_read(kind: str, tmp_path: Path) -> None:
    make, expected = systems.OWN_MANAGERS[kind]
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


_DAMAGED = r"the checkpoint .*model\.ckpt cannot be read, it may be damaged or incomplete: "


@pytest.mark.graph
def test_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("model.ckpt", "model.keras", "model.weights.h5", "model.hdf5"):
        with pytest.raises(FileNotFoundError, match=f"there is no .*{name}"):
            tfmp.checkpoints.read_loss_scale_state(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"holds neither a checkpoint .* nor a SavedModel"):
        tfmp.checkpoints.read_loss_scale_state(tmp_path)


@pytest.mark.graph
@pytest.mark.parametrize("name", ["scales/keras3_stock/model.keras", "scales/keras3_stock/model.weights.h5"])
@pytest.mark.parametrize("length", [0, 100, 9000])
def test_broken_file_is_named(name: str, length: int, tmp_path: Path) -> None:
    path = tmp_path / Path(name).name
    path.write_bytes((_RECORDINGS / name).read_bytes()[:length])
    with pytest.raises(ValueError, match=f"{path.name} cannot be read, it may be damaged or incomplete"):
        tfmp.checkpoints.read_loss_scale_state(path)


@pytest.mark.graph
@pytest.mark.parametrize("broken", ["index", "data-00000-of-00001"])
@pytest.mark.parametrize("length", [None, 0, 40])
def test_broken_checkpoint_is_named(broken: str, length: int | None, tmp_path: Path) -> None:
    for path in (_RECORDINGS / "scales/keras3_stock").glob("model.ckpt.*"):
        shutil.copy(path, tmp_path)
    part = tmp_path / f"model.ckpt.{broken}"
    whole = part.read_bytes()
    part.unlink()
    if length is not None:
        part.write_bytes(whole[:length])
    no_index = (broken, length) == ("index", None)
    expected, message = (FileNotFoundError, "there is no checkpoint") if no_index else (ValueError, _DAMAGED)
    with pytest.raises(expected, match=message):
        tfmp.checkpoints.read_loss_scale_state(tmp_path / "model.ckpt")
    # The data are not read for a map of names.
    if broken == "index":
        with pytest.raises(expected, match=message):
            tfmp.checkpoints.variable_map(tmp_path / "model.ckpt")
