"""Names of the NPU bridge for devices, processes and operations, for a script that trains in one process on CPU or GPU.

Each returns its argument, or what a single process has. The environment variable RANK_SIZE tells the bridge how many
processes train together. If RANK_SIZE is greater than 1, these names raise a RuntimeError, because tfmp leaves several
processes to Horovod.
"""

import functools
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import tensorflow as tf

_Optimizer = TypeVar("_Optimizer")

NpuEmptyHook = tf.compat.v1.train.SessionRunHook
"""A hook that does nothing: `tf.compat.v1.train.SessionRunHook` itself."""


def require_one_process(instead: str) -> None:
    """Raise an error that names what to use instead if RANK_SIZE says that several processes train together."""
    size = os.environ.get("RANK_SIZE", "1")
    if size.strip() not in ("", "0", "1"):
        raise RuntimeError(
            f"RANK_SIZE is {size!r}: the script expects the NPU bridge to connect as many processes, and tfmp.npu has "
            "names for one process only. To train in one process, set the environment variable RANK_SIZE to 1. To "
            f"train in several, `import horovod.tensorflow as hvd`, and in place of this name use {instead}."
        )


def npu_config_proto(config_proto: tf.compat.v1.ConfigProto | None = None) -> tf.compat.v1.ConfigProto:
    """Return the configuration of a session itself, or a new one, with `allow_soft_placement` on as in the bridge.

    TensorFlow ignores the settings of the graph pass 'NpuOptimizer' where there is no NPU.

    Examples:
        >>> npu_config_proto().allow_soft_placement
        True
    """
    require_one_process("config.gpu_options.visible_device_list = str(hvd.local_rank())")
    config = tf.compat.v1.ConfigProto() if config_proto is None else config_proto
    config.allow_soft_placement = True
    return config


def set_keras_session_npu_config(config: tf.compat.v1.ConfigProto | None = None) -> tf.compat.v1.Session:
    """Return a new session that Keras 2 uses from now on."""
    session = tf.compat.v1.Session(config=npu_config_proto(config))
    tf.compat.v1.keras.backend.set_session(session)
    return session


def init_resource(config: tf.compat.v1.ConfigProto | None = None) -> tuple[tf.compat.v1.Session, tf.Operation]:
    """Return a session, and an op for `shutdown_resource` that does nothing.

    Examples:
        >>> with tf.Graph().as_default():
        ...     session, shutdown = init_resource()
        >>> shutdown_resource(session, shutdown)
        >>> close_session(session)
    """
    return tf.compat.v1.Session(config=npu_config_proto(config)), tf.no_op(name="npu_shutdown")


def shutdown_resource(sess: tf.compat.v1.Session, npu_shutdown: tf.Operation) -> None:
    """Do nothing: there is no device to shut down."""
    del sess, npu_shutdown


def close_session(sess: tf.compat.v1.Session) -> None:
    """Close a session."""
    sess.close()


def npu_distributed_optimizer_wrapper(optimizer: _Optimizer) -> _Optimizer:
    """Return the optimizer itself, since one process has no gradients to average.

    Examples:
        >>> optimizer = tf.compat.v1.train.AdamOptimizer(1e-3)
        >>> npu_distributed_optimizer_wrapper(optimizer) is optimizer
        True
    """
    require_one_process("hvd.DistributedOptimizer(opt)")
    return optimizer


NPUDistributedOptimizer = npu_tf_optimizer = npu_distributed_optimizer_wrapper
"""The same as `npu_distributed_optimizer_wrapper`."""
KerasDistributeOptimizer = npu_keras_optimizer = npu_distributed_optimizer_wrapper
"""The same as `npu_distributed_optimizer_wrapper`."""


def npu_hooks_append(hooks_list: Sequence[Any] = ()) -> list[Any]:
    """Return the list of hooks itself, since one process has no variables to broadcast; a new list without an argument.

    Examples:
        >>> npu_hooks_append()
        []
    """
    require_one_process("hvd.BroadcastGlobalVariablesHook(0) among the hooks")
    return hooks_list if isinstance(hooks_list, list) else list(hooks_list)


def npu_callbacks_append(callbacks_list: Sequence[Any] = ()) -> list[Any]:
    """Return the list of callbacks itself, as `npu_hooks_append` does with hooks."""
    require_one_process("BroadcastGlobalVariablesCallback(0) of horovod.tensorflow.keras.callbacks")
    return callbacks_list if isinstance(callbacks_list, list) else list(callbacks_list)


def get_rank_size(group: str = "") -> int:
    """Return 1, the number of processes."""
    del group
    require_one_process("hvd.size(), or hvd.local_size() for those of this machine")
    return 1


def get_rank_id(group: str = "") -> int:
    """Return 0, the number of this process."""
    del group
    require_one_process("hvd.rank(), or hvd.local_rank() for the number on this machine")
    return 0


get_local_rank_size = get_npu_rank_size = get_rank_size
"""The same as `get_rank_size`."""
get_local_rank_id = get_npu_rank_id = get_npu_local_rank_id = get_rank_id
"""The same as `get_rank_id`."""

ops_adapter = SimpleNamespace(size=get_rank_size, rank=get_rank_id)
"""A module of Huawei's MoXing with the functions `size` and `rank`, which the bridge's manual uses."""

npu_ops = SimpleNamespace(dropout=tf.compat.v1.nn.dropout, initialize_system=tf.no_op, shutdown_system=tf.no_op)
"""TensorFlow 1's `dropout`, and two ops that do nothing. The other operations of the NPU are not here."""

npu_unary_ops = SimpleNamespace(gelu=functools.partial(tf.nn.gelu, approximate=True))
"""`gelu` by tanh, as the bridge's manual defines it."""
