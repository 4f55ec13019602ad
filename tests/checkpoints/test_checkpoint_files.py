"""Files and checkpoints are read as plain data; one that is missing or damaged is an error that names it."""

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.checkpoints.files import SavedRun, read_saved_run

_RECORDINGS = Path(__file__).parent.parent / "recordings"
_DAMAGED = r"the checkpoint .*model\.ckpt cannot be read, it may be damaged or incomplete: "


@pytest.mark.graph
def test_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("model.ckpt", "model.keras", "model.weights.h5"):
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


@pytest.mark.graph
@pytest.mark.parametrize("name", ["model.h5", "model.hdf5"])
@pytest.mark.parametrize(
    ("training", "optimizer"), [({}, None), ({"optimizer_config": {"lr": 1}}, {"lr": 1}), (None, None)]
)
def test_values_of_an_hdf5_file_are_listed_and_its_scalars_kept(
    name: str, training: dict[str, Any] | None, optimizer: dict[str, Any] | None, tmp_path: Path
) -> None:
    path = str(tmp_path / name)
    with h5py.File(path, "w") as file:
        for key, value in {"opt/scale": np.float32(2), "opt/kernel": np.ones([2]), "kind": "SGD"}.items():
            file[key] = value
        file.create_group("empty")
        if training is not None:
            file.attrs["training_config"] = json.dumps(training)
    expected = SavedRun(path, ["kind", "opt/kernel", "opt/scale"], {"opt/scale": np.float32(2)}, None, optimizer)
    assert read_saved_run(path) == expected


@pytest.mark.graph
@pytest.mark.parametrize("wanted", ["model.ckpt", "model.ckpt.index", ""])
def test_values_of_a_savers_checkpoint_are_listed_and_its_scalars_kept(wanted: str, tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name, value in {"scale": 2.0, "kernel": [1.0], "kind": "SGD"}.items():
            tf.compat.v1.get_variable(name, initializer=value, use_resource=True)
        session.run(tf.compat.v1.global_variables_initializer())
        path = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"))
    expected = SavedRun(path, ["kernel", "kind", "scale"], {"scale": np.float32(2)})
    assert read_saved_run(str(tmp_path / wanted)) == expected


def test_objects_of_a_checkpoint_are_listed_with_the_keys_of_scalars(tmp_path: Path) -> None:
    values = {"scale": tf.Variable(2.0), "kernel": tf.Variable([1.0]), "kind": tf.Variable("SGD")}
    run = read_saved_run(tf.train.Checkpoint(**values).write(str(tmp_path / "model.ckpt")))
    keys = {name: f"{name}/.ATTRIBUTES/VARIABLE_VALUE" for name in values}
    assert (run.keys, run.scalars) == (sorted(keys.values()), {keys["scale"]: 2})
    children = run.objects[0].children
    assert {name: run.objects[children[name]].key for name in values} == {
        "scale": keys["scale"],
        "kernel": None,
        "kind": None,
    }
