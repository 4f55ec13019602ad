"""Reads checkpoints, SavedModels and files of Keras, and returns their content as plain data."""

import contextlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2


class SavedObject(NamedTuple):
    """An object in a checkpoint that `tf.train.Checkpoint` wrote."""

    #: For each attribute of the object that is itself saved, the position of its value in `SavedRun.objects`.
    children: Mapping[str, int]
    #: The key of the object's value in `SavedRun.scalars`; None if the object is not a scalar variable.
    key: str | None


class SavedRun(NamedTuple):
    """The content of a checkpoint, a SavedModel or a file of Keras."""

    #: The path of the file, or the prefix of the checkpoint.
    path: str
    #: The keys of all saved values.
    keys: list[str]
    scalars: Mapping[str, np.generic]
    #: The saved objects if `tf.train.Checkpoint` wrote the checkpoint, otherwise None.
    objects: list[SavedObject] | None = None
    #: The optimizer's configuration if Keras saved it in the file, otherwise None.
    optimizer: Mapping[str, Any] | None = None


def read_saved_run(path: str) -> SavedRun:
    """Read a checkpoint, a SavedModel or a file of Keras.

    The path is the prefix of a checkpoint; a directory that holds checkpoints (the latest is read) or a SavedModel; or
    a file whose name ends in `.keras`, `.h5` or `.hdf5`.
    """
    if PurePosixPath(path).suffix in {".keras", ".h5", ".hdf5"}:
        if not tf.io.gfile.exists(path):
            raise FileNotFoundError(f"there is no file {path}.")
        with _named_if_damaged(path), tf.io.gfile.GFile(path, "rb") as file:
            return _read_keras_file(path, file) if path.endswith(".keras") else _read_hdf5(path, file)
    prefix = _checkpoint_prefix(path)
    with _named_if_damaged(f"the checkpoint {prefix}"):
        return _read_checkpoint(prefix)


def open_checkpoint(path: str) -> Any:  # noqa: ANN401 - TensorFlow's reader
    """Return TensorFlow's reader for the prefix of a checkpoint, or for a directory as `read_saved_run` takes it."""
    prefix = _checkpoint_prefix(path)
    with _named_if_damaged(f"the checkpoint {prefix}"):
        return tf.train.load_checkpoint(prefix)


@contextlib.contextmanager
def _named_if_damaged(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, LookupError, ValueError, zipfile.BadZipFile, tf.errors.OpError) as error:
        raise ValueError(f"{what} cannot be read, it may be damaged or incomplete: {error}") from error


def _checkpoint_prefix(path: str) -> str:
    if tf.io.gfile.isdir(path):
        latest = tf.train.latest_checkpoint(path)
        if latest is not None:
            return str(latest)
        saved_model_prefix = f"{path}/variables/variables"
        if tf.io.gfile.exists(f"{saved_model_prefix}.index"):
            return saved_model_prefix
        raise FileNotFoundError(
            f"{path} holds neither a checkpoint that its file `checkpoint` names nor a SavedModel: pass the prefix of "
            "a checkpoint, which is the part of its files' names before `.index`."
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
    # Imported here because only files of Keras need it. TensorFlow depends on it, so it is installed.
    import h5py

    values: dict[str, Any] = {}
    with h5py.File(file, "r") as opened:

        def note(key: str, item: Any) -> None:  # noqa: ANN401 - a group or a dataset
            if isinstance(item, h5py.Dataset):
                values[key] = item[()] if item.shape == () else None

        opened.visititems(note)
        # Only a model in the legacy `.h5` format of Keras has this attribute.
        training = json.loads(opened.attrs.get("training_config", "{}"))
    scalars = {key: value for key, value in values.items() if isinstance(value, np.generic)}
    return SavedRun(path, sorted(values), scalars, optimizer=training.get("optimizer_config"))
