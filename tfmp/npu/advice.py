"""Advice for the names of the NPU bridge that `tfmp.npu` does not define: what to use in place of each.

`tfmp.npu` and the source rewriter `tfmp.migrate` read this table, so this module must not import TensorFlow.
"""

from collections.abc import Mapping
from types import MappingProxyType

_NO_DEVICE_SETTING = "leave it out: it only sets up the NPU"
_NO_DEVICE_SCOPE = "leave it out, with its scopes: it only tells the NPU how to compile"
_SUBGROUPS = "use a process set, hvd.add_process_set of horovod.tensorflow"
_PROTOBUF = "import it from tensorflow.core.protobuf"
_REDUCING = "use hvd.allreduce(tensor, op=hvd.Sum) of horovod.tensorflow, or op=hvd.Average"
_BROADCAST_HOOK = "use hvd.BroadcastGlobalVariablesHook(0) of horovod.tensorflow, or in one process leave it out"

#: The advice for each name. It completes a sentence, so it starts in lower case and has no full stop.
ADVICE: Mapping[str, str] = MappingProxyType(
    {
        # Estimator
        "npu_estimator": "import its names from tfmp.npu",
        "NPUCheckpointSaverHook": "use tf.compat.v1.train.CheckpointSaverHook",
        "NPUOutputTensorHook": "use tf.compat.v1.train.LoggingTensorHook",
        # Settings
        "npu_session_config_init": "use npu_config_proto of tfmp.npu",
        **dict.fromkeys(("RewriterConfig", "rewriter_config_pb2", "config_pb2"), _PROTOBUF),
        "npu_graph_options": "pass the tf.compat.v1.GraphOptions itself, or nothing",
        "npu_optimizer_options": "pass the tf.compat.v1.OptimizerOptions itself, or nothing",
        **dict.fromkeys(
            ("DynamicInputConfig", "NpuExecutePlacement", "experimental_options", "npu_config"), _NO_DEVICE_SETTING
        ),
        # Sessions
        "npu_clear_session": "use tf.keras.backend.clear_session()",
        # Several devices
        **dict.fromkeys(("allreduce", "npu_allreduce", "hccl_ops"), _REDUCING),
        **dict.fromkeys(("NPUBroadcastGlobalVariablesHook", "npu_hook"), _BROADCAST_HOOK),
        "NPUOptimizer": "use the optimizer inside it; around hvd.DistributedOptimizer(opt) or opt itself put "
        "NPULossScaleOptimizer, if it scaled the loss too",
        "npu_optimizer": "use tfmp.npu.NPULossScaleOptimizer, and hvd.DistributedOptimizer of horovod.tensorflow",
        "NPUBroadcastGlobalVariablesCallback": "leave it out in one process and under a tf.distribute strategy",
        **dict.fromkeys(("npu_strategy", "NPUStrategy"), "use tf.distribute.MirroredStrategy()"),
        **dict.fromkeys(
            ("create_group", "destroy_group", "get_world_rank_from_group_rank", "get_group_rank_from_world_rank"),
            _SUBGROUPS,
        ),
        **dict.fromkeys(
            ("set_split_strategy_by_idx", "set_split_strategy_by_size"),
            "leave it out: Horovod fuses gradients by itself",
        ),
        # Operations
        "npu_dropout": "use tf.compat.v1.nn.dropout",
        "npu_convert_dropout": "leave it out: tf.compat.v1.nn.dropout works as it stands",
        "npu_aicore_ops": "use npu_unary_ops.gelu of tfmp.npu for its gelu",
        **dict.fromkeys(
            ("DynamicRNN", "DynamicGRUV2", "DynamicAUGRU", "npu_dynamic_rnn"),
            "use tf.compat.v1.nn.dynamic_rnn with a cell and time_major=True",
        ),
        "npu_rnn": "use tf.compat.v1.nn.static_rnn",
        "deformable_conv2d": "TensorFlow has no such operation, and the model needs another layer",
        **dict.fromkeys(("npu_scope", "npu_variable_scope", "npu_stage_scope"), _NO_DEVICE_SCOPE),
        "keras_to_npu": "pass the Keras model itself, or tf.keras.estimator.model_to_estimator (up to 2.15)",
        # Whole modules
        "util": "leave it out: it tells the NPU how many iterations to run in one session.run",
        **dict.fromkeys(("npu_plugin", "tf_adapter", "npu_cpu_ops", "embeddingrankid"), _NO_DEVICE_SETTING),
        **dict.fromkeys(("npu_init", "npu_bridge"), "import the names of tfmp.npu one by one, or all by *"),
    }
)
