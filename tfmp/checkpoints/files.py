"""What a training run was saved in, whichever system wrote it, as plain data."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2


class SavedObject(NamedTuple):
    """An object in a checkpoint of `tf.train.Checkpoint`.

    Attributes:
        children: The positions of the objects that it holds, by their names there.
        key: The key of its value; None if it is no variable.
    """

    children: Mapping[str, int]
    key: str | None


class SavedRun(NamedTuple):
    """What a training run was saved in.

    Attributes:
        path: The file, or the checkpoint's prefix.
        keys: The keys of all values.
        scalars: The values that are scalars, by their keys.
        objects: The objects of a `tf.train.Checkpoint`; None elsewhere.
        optimizer: How Keras describes the optimizer; None where it does not.
    """

    path: str
    keys: list[str]
    scalars: Mapping[str, np.generic]
    objects: list[SavedObject] | None = None
    optimizer: Mapping[str, Any] | None = None


def read_saved_run(path: str) -> SavedRun:
    """Read a checkpoint, a SavedModel or a file of Keras.

    Args:
        path: The prefix of a checkpoint; a directory that holds checkpoints, of which the latest is read, or a
            SavedModel; or a file `.keras` or `.h5`.

    Raises:
        FileNotFoundError: There is nothing of the kind.
        ValueError: What is there cannot be read.
    """
    if PurePosixPath(path).suffix in {".keras", ".h5", ".hdf5"}:
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"there is no file {path}.")
        try:
            with tf.io.gfile.GFile(path, "rb") as file:
                return _read_keras_file(path, file) if path.endswith(".keras") else _read_hdf5(path, file)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile, tf.errors.OpError) as error:
            raise ValueError(f"{path} cannot be read, it may be broken or not whole: {error}") from error
    prefix = _checkpoint_prefix(path)
    try:
        return _read_checkpoint(prefix)
    except (ValueError, IndexError, tf.errors.OpError) as error:
        raise ValueError(f"the checkpoint {prefix} cannot be read, it may be broken or not whole: {error}") from error


def open_checkpoint(path: str) -> Any:  # noqa: ANN401 - TensorFlow's reader
    """Return TensorFlow's reader of a checkpoint.

    Args:
        path: Its prefix, or a directory that holds checkpoints, of which the latest is read, or a SavedModel.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It cannot be read.
    """
    prefix = _checkpoint_prefix(path)
    try:
        return tf.train.load_checkpoint(prefix)
    except (ValueError, tf.errors.OpError) as error:
        raise ValueError(f"the checkpoint {prefix} cannot be read, it may be broken or not whole: {error}") from error


def _checkpoint_prefix(path: str) -> str:
    if tf.io.gfile.isdir(path):
        latest = tf.train.latest_checkpoint(path)
        if latest is not None:
            return str(latest)
        of_saved_model = f"{path}/variables/variables"
        if tf.io.gfile.exists(f"{of_saved_model}.index"):
            return of_saved_model
        raise FileNotFoundError(
            f"{path} holds neither a checkpoint that its file `checkpoint` names nor a SavedModel: pass the prefix of "
            "a checkpoint, the part of its files' names before `.index`."
        )
    prefix = path.removesuffix(".index")
    if not tf.io.gfile.exists(f"{prefix}.index"):
        raise FileNotFoundError(
            f"there is no checkpoint {prefix}: pass its prefix (the files are {prefix}.index and so on), a directory, "
            "or a file .keras or .h5."
        )
    return prefix


def _read_checkpoint(prefix: str) -> SavedRun:
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    dtypes = reader.get_variable_to_dtype_map()
    scalars = {key: reader.get_tensor(key) for key, shape in shapes.items() if shape == [] and dtypes[key] != tf.string}
    keys = sorted(key for key in shapes if key != _OBJECT_GRAPH)
    if _OBJECT_GRAPH not in shapes:
        return SavedRun(prefix, keys, scalars)
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor(_OBJECT_GRAPH))
    objects = [
        SavedObject(
            {child.local_name: child.node_id for child in node.children},
            next((value.checkpoint_key for value in node.attributes if value.checkpoint_key in scalars), None),
        )
        for node in graph.nodes
    ]
    return SavedRun(prefix, keys, scalars, objects)


_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def _read_keras_file(path: str, file: BinaryIO) -> SavedRun:
    with zipfile.ZipFile(file) as archive:
        config = json.loads(archive.read("config.json"))
        with archive.open("model.weights.h5") as weights:
            run = _read_hdf5(path, weights)
    return run._replace(optimizer=(config.get("compile_config") or {}).get("optimizer"))


def _read_hdf5(path: str, file: Any) -> SavedRun:  # noqa: ANN401 - a file, or a member of an archive
    # A dependency of TensorFlow, needed here alone.
    import h5py

    values: dict[str, Any] = {}
    with h5py.File(file, "r") as opened:

        def note(key: str, item: Any) -> None:  # noqa: ANN401 - a group or a dataset
            if isinstance(item, h5py.Dataset):
                values[key] = item[()] if item.shape == () else None

        opened.visititems(note)
        # Only models in Keras' legacy format have it.
        training = json.loads(opened.attrs.get("training_config", "{}"))
    scalars = {key: value for key, value in values.items() if isinstance(value, np.generic)}
    return SavedRun(path, sorted(values), scalars, optimizer=training.get("optimizer_config"))
