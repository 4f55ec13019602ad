"""The loss scale is read from what each system saved, whichever is installed."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pytest
import systems
import tensorflow as tf
from systems import FIXED, OWN, STOCK

import tfmp

pytestmark = [
    # Keras 3 hands its variables to h5py, which asks NumPy for a copy.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning"),
]

_RECORDINGS = Path(__file__).parent.parent / "recordings"
_TENSORFLOW = "TensorFlow's MixedPrecisionLossScaleOptimizer"
_KERAS2 = "Keras 2's LossScaleOptimizer"
_KERAS3 = "Keras 3's LossScaleOptimizer"
_CONTRIB = "tf.contrib.mixed_precision or tfmp"


def _check(path: Path, expected: tuple[float, int, int], writer: str) -> None:
    state = tfmp.read_loss_scale_state(path)
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


_FORMATS = {
    "keras2": (systems.checkpoint, systems.tensorflow_weights, systems.saved_model),
    "tf_keras": (systems.checkpoint, systems.tensorflow_weights, systems.saved_model),
    "keras3": (
        systems.checkpoint,
        systems.keras_file,
        systems.weights_file,
        systems.legacy_file,
        systems.saved_model,
    ),
}
_FILES = {systems.keras_file, systems.weights_file, systems.legacy_file}
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


def test_every_format_of_keras_own_wrapper_is_read(keras: tuple[str, ModuleType], tmp_path: Path) -> None:
    name, module = keras
    model = systems.trained_model(module, systems.stock_around(module))
    for save in _FORMATS[name]:
        _check(save(model, tmp_path), STOCK, _WRITERS[name])


@_each_manager
def test_every_format_of_tfmps_wrapper_is_read(
    keras: tuple[str, ModuleType], make: _Make, expected: tuple[float, int, int], tmp_path: Path
) -> None:
    name, module = keras
    model = systems.trained_model(module, systems.own_around(module, make))
    for save in {*_FORMATS[name], *_FILES}:
        _check(save(model, tmp_path), expected, "tfmp")


def test_fixed_scale_is_read_where_keras_describes_the_optimizer(keras: tuple[str, ModuleType], tmp_path: Path) -> None:
    name, module = keras
    model = systems.trained_model(module, systems.own_fixed_around(module))
    for save in (systems.keras_file, systems.legacy_file):
        _check(save(model, tmp_path), FIXED, "tfmp's FixedLossScaleManager")
    for save in (systems.checkpoint, systems.weights_file):
        with pytest.raises(ValueError, match=r"holds no loss scale.*A fixed scale is not saved in a checkpoint"):
            tfmp.read_loss_scale_state(save(model, tmp_path))
    if name != "keras3":
        model = systems.trained_model(module, systems.fixed_around(module))
        for save in (systems.keras_file, systems.legacy_file):
            _check(save(model, tmp_path), FIXED, f"{_KERAS2} with a fixed scale")


def test_file_that_leaves_the_scale_out_says_so_and_names_the_initial_one() -> None:
    with pytest.raises(ValueError, match=r"Keras 2's own LossScaleOptimizer leaves it out.*initial scale, 1024"):
        tfmp.read_loss_scale_state(_RECORDINGS / "scales/keras2_stock/model.keras")


@pytest.mark.graph
def test_checkpoint_of_a_saver_is_read(tmp_path: Path) -> None:
    prefix = systems.train_in_session(systems.tensorflows, tmp_path)
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
        state = tfmp.read_loss_scale_state(path, key)
        assert state == (*expected, writer, key)


@pytest.mark.graph
def test_managers_of_several_kinds_are_not_taken_for_each_other_in_a_checkpoint_of_a_saver(tmp_path: Path) -> None:
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
@pytest.mark.usefixtures("no_graph_rewrite_after")
def test_checkpoint_of_the_graph_rewrite_is_read(tmp_path: Path) -> None:
    _check(systems.train_in_session(systems.tensorflows_rewrite, tmp_path), STOCK, _TENSORFLOW)


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
        tfmp.read_loss_scale_state(path)
    assert tfmp.read_loss_scale_state(path, key=f"{name}_1").key == f"{name}_1"
    with pytest.raises(ValueError, match=f"no loss scale with the key 'mine'.*Its loss scales: {name}, {name}_1"):
        tfmp.read_loss_scale_state(path, key="mine")


def _saved(values: dict[str, Any], path: Path) -> Path:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {
            key: tf.compat.v1.get_variable(f"v{index}", initializer=value, use_resource=True)
            for index, (key, value) in enumerate(values.items())
        }
        session.run(tf.compat.v1.global_variables_initializer())
        return Path(tf.compat.v1.train.Saver(variables).save(session, str(path / "model.ckpt")))


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


@pytest.mark.graph
def test_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("model.ckpt", "model.keras", "model.weights.h5"):
        with pytest.raises(FileNotFoundError, match=f"there is no .*{name}"):
            tfmp.read_loss_scale_state(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"holds neither a checkpoint .* nor a SavedModel"):
        tfmp.read_loss_scale_state(tmp_path)


@pytest.mark.graph
@pytest.mark.parametrize("name", ["scales/keras3_stock/model.keras", "scales/keras3_stock/model.weights.h5"])
@pytest.mark.parametrize("length", [0, 100, 9000])
def test_broken_file_is_named(name: str, length: int, tmp_path: Path) -> None:
    path = tmp_path / Path(name).name
    path.write_bytes((_RECORDINGS / name).read_bytes()[:length])
    with pytest.raises(ValueError, match=f"{path.name} cannot be read, it may be damaged or incomplete"):
        tfmp.read_loss_scale_state(path)


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
    expected = FileNotFoundError if (broken, length) == ("index", None) else ValueError
    with pytest.raises(expected, match=r"model\.ckpt"):
        tfmp.read_loss_scale_state(tmp_path / "model.ckpt")
