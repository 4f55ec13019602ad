"""The successors of the names of `tf.contrib`.

The successors are below `tf.compat.v1` and take the arguments that the names took in TensorFlow 1.15. Successors below
`estimator` exist only in TensorFlow 2.15; those below `nn.rnn_cell` need Keras 2 or tf_keras.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Successor(NamedTuple):
    """The successor of a name of `tf.contrib`.

    Attributes:
        name: The name below `tf`, or below `module` if that is given.
        module: The module to import, which has the name; empty for `tf.compat.v1`.
        keywords: The only keyword arguments with which a call may be rewritten; None allows all.
        positional: The largest number of positional arguments with which a call may be rewritten; None allows all.
        minus_ones: Keyword arguments that a call must give with the value -1.
    """

    name: str
    module: str = ""
    keywords: frozenset[str] | None = None
    positional: int | None = None
    minus_ones: frozenset[str] = frozenset()

    @property
    def is_checked(self) -> bool:
        """Whether a use can be rewritten only if it is a call whose arguments the table allows."""
        return self.keywords is not None


def _same(old: str, new: str, names: str) -> dict[str, Successor]:
    return {f"{old}.{name}": Successor(f"{new}.{name}".lstrip(".")) for name in names.split()}


def _by_position(old: str, new: str, names: Mapping[str, int]) -> dict[str, Successor]:
    """Return successors whose arguments have other names, so that calls must give them by position."""
    return {f"{old}.{name}": Successor(f"{new}.{name}", "", frozenset(), count) for name, count in names.items()}


_XAVIER = Successor("glorot_uniform_initializer", "", frozenset(("seed", "dtype")), 0)
_BOTH_LAST = frozenset(("begin_norm_axis", "begin_params_axis"))

#: The successors, by the words after `tf.contrib.`.
SUCCESSORS: Mapping[str, Successor] = MappingProxyType(
    {
        **_same(
            "data",
            "data.experimental",
            "AUTOTUNE map_and_batch parallel_interleave shuffle_and_repeat "
            "group_by_window get_single_element ignore_errors prefetch_to_device copy_to_device unbatch "
            "dense_to_sparse_batch bucket_by_sequence_length enumerate_dataset rejection_resample "
            "sample_from_datasets choose_from_datasets make_batched_features_dataset make_csv_dataset "
            "make_saveable_from_iterator unique Counter RandomDataset CsvDataset SqlDataset get_next_as_optional "
            "parse_example_dataset TFRecordWriter",
        ),
        **_same("tpu", "estimator.tpu", "TPUEstimator TPUEstimatorSpec TPUConfig RunConfig InputPipelineConfig"),
        **_same(
            "tpu",
            "tpu",
            "CrossShardOptimizer bfloat16_scope core rewrite shard replicate batch_parallel initialize_system "
            "shutdown_system outside_compilation cross_replica_sum",
        ),
        **_same(
            "cluster_resolver",
            "distribute.cluster_resolver",
            "ClusterResolver TPUClusterResolver SimpleClusterResolver TFConfigClusterResolver GCEClusterResolver",
        ),
        # An import of these names gives TensorFlow's own copies, which need no Keras and name variables as before.
        **_same(
            "rnn",
            "nn.rnn_cell",
            "RNNCell BasicRNNCell BasicLSTMCell LSTMCell LSTMStateTuple GRUCell MultiRNNCell DropoutWrapper "
            "ResidualWrapper DeviceWrapper",
        ),
        **_same("rnn", "nn", "static_rnn static_state_saving_rnn static_bidirectional_rnn"),
        **_same(
            "framework",
            "train",
            "get_or_create_global_step get_global_step create_global_step assert_global_step",
        ),
        **_by_position("framework", "train", {"list_variables": 1, "load_checkpoint": 1, "load_variable": 2}),
        **_same("framework", "", "sort argsort"),
        **_same("framework.nest", "nest", "flatten map_structure assert_same_structure pack_sequence_as"),
        "framework.nest.is_sequence": Successor("nest.is_nested"),
        **_same("lookup", "lookup", "KeyValueTensorInitializer TextFileInitializer TextFileIndex"),
        "util.constant_value": Successor("get_static_value"),
        **_same("util", "", "make_tensor_proto make_ndarray"),
        **_same("training", "train", "checkpoints_iterator FinalOpsHook"),
        **{f"learn.ModeKeys.{name}": Successor(f"estimator.ModeKeys.{name}") for name in ("TRAIN", "EVAL")},
        "learn.ModeKeys.INFER": Successor("estimator.ModeKeys.PREDICT"),
        **_same("estimator", "estimator", "add_metrics"),
        **_same(
            "estimator",
            "estimator.experimental",
            "InMemoryEvaluatorHook make_early_stopping_hook make_stop_at_checkpoint_step_hook stop_if_higher_hook "
            "stop_if_lower_hook stop_if_no_decrease_hook stop_if_no_increase_hook",
        ),
        **_same(
            "signal",
            "signal",
            "frame stft inverse_stft inverse_stft_window_fn hann_window hamming_window linear_to_mel_weight_matrix "
            "mfccs_from_log_mel_spectrograms overlap_and_add",
        ),
        "compiler.jit.experimental_jit_scope": Successor("xla.experimental.jit_scope"),
        "compiler.xla.compile": Successor("xla.experimental.compile"),
        "stateless.stateless_random_uniform": Successor("random.stateless_uniform"),
        "stateless.stateless_random_normal": Successor("random.stateless_normal"),
        "stateless.stateless_truncated_normal": Successor("random.stateless_truncated_normal"),
        "layers.xavier_initializer": _XAVIER,
        "layers.xavier_initializer_conv2d": _XAVIER,
        "layers.layer_norm": Successor(
            "layer_norm", "tfmp.bert", frozenset(("inputs", "scope")) | _BOTH_LAST, 1, _BOTH_LAST
        ),
    }
)

_ADDONS = "the discontinued package tensorflow-addons has part of it for TensorFlow 2"
_SLIM = "the package tf_slim has it: `import tf_slim`, and write tf_slim.{name}"
_SLIM_FRAMEWORK = (
    "add_arg_scope add_model_variable arg_scope arg_scope_func_key arg_scoped_arguments assert_or_get_global_step "
    "assign_from_checkpoint assign_from_checkpoint_fn assign_from_values assign_from_values_fn current_arg_scope "
    "filter_variables get_local_variables get_model_variables get_trainable_variables get_unique_variable "
    "get_variables get_variables_by_name get_variables_by_suffix get_variables_to_restore has_arg_scope local_variable "
    "model_variable variable VariableDeviceChooser"
)
_SLIM_LAYERS = (
    "apply_regularization avg_pool2d avg_pool3d bias_add bucketize conv1d conv2d conv2d_in_plane conv2d_transpose "
    "conv3d conv3d_transpose convolution convolution2d convolution2d_transpose convolution3d dropout elu flatten "
    "fully_connected gdn group_norm instance_norm l1_l2_regularizer legacy_fully_connected linear max_pool2d "
    "max_pool3d maxout one_hot_encoding recompute_grad relu relu6 repeat rev_block scale_gradient separable_conv2d "
    "softmax spatial_softmax stack sum_regularizer summarize_activation summarize_activations summarize_tensor "
    "summarize_tensors summarize_variables unit_norm variance_scaling_initializer"
)
_BATCH_NORM = "write tf.layers.batch_normalization; tf_slim's batch_norm fails on TensorFlow 2.15"
_HALF = "write tf.keras.regularizers.{name}({amount}) if the scale is a number"

#: Advice for names that have no successor, or one with other arguments; `{name}` stands for the last word.
ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "": "write each of the names that are used through it, and those of mixed_precision as tfmp has them",
        "slim": "the package tf_slim has it: `import tf_slim as slim`. Its batch_norm fails on TensorFlow 2.15",
        "framework.python.ops.audio_ops": "write tf.raw_ops.AudioSpectrogram, tf.raw_ops.Mfcc, tf.audio.decode_wav",
        **{f"framework.{name}": _SLIM for name in _SLIM_FRAMEWORK.split()},
        **{f"layers.{name}": _SLIM for name in _SLIM_LAYERS.split()},
        "layers.batch_norm": _BATCH_NORM,
        "layers.python.layers.batch_norm": _BATCH_NORM,
        "layers.optimize_loss": "write out its optimizer and its clipping; tf_slim's fails on TensorFlow 2.15",
        "layers.l2_regularizer": _HALF.format(name="l2", amount="0.5 * scale"),
        "layers.l1_regularizer": _HALF.format(name="l1", amount="scale"),
        "layers.xavier_initializer": (
            "write tf.glorot_uniform_initializer(seed=..., dtype=...); uniform=False has another standard deviation "
            "than tf.glorot_normal_initializer, and tf_slim has both"
        ),
        "layers.layer_norm": (
            "tfmp.bert.layer_norm(inputs, begin_norm_axis=-1, begin_params_axis=-1, scope=None) is it for the last "
            "axis, tf_slim.layer_norm for others"
        ),
        "data.batch_and_drop_remainder": "write dataset.batch(batch_size, drop_remainder=True)",
        "data.padded_batch_and_drop_remainder": "write dataset.padded_batch(batch_size, shapes, drop_remainder=True)",
        "training.HParams": "a class of your own, or types.SimpleNamespace, holds the values",
        "distribute.MirroredStrategy": (
            "tf.distribute.MirroredStrategy(devices, cross_device_ops) counts the batch of all replicas, not of one"
        ),
        "distribute": "see what tf.distribute has of that name: arguments have changed",
        "seq2seq": _ADDONS,
        "crf": _ADDONS,
        "opt": _ADDONS,
        "image": _ADDONS,
        "sparsemax": _ADDONS,
        "resampler": _ADDONS,
        "rnn.LayerNormBasicLSTMCell": _ADDONS,
        "distributions": "the package tensorflow-probability has it",
        "tensorboard.plugins.projector": "write `from tensorboard.plugins import projector`",
        "quantize": "the package tensorflow-model-optimization has its successor",
        "tensorrt": "see tf.experimental.tensorrt",
        "keras": "write tf.keras",
        "summary": "tf.compat.v2.summary has it, with other arguments: scalar(name, data, step)",
        "lookup.HashTable": "tf.lookup.StaticHashTable has no shared_name and no attribute init",
        "lookup.MutableHashTable": "tf.lookup.experimental.MutableHashTable has no shared_name",
        "staging.StagingArea": "prefetch with tf.data.experimental.prefetch_to_device",
        "cudnn_rnn": "tf.keras.layers.LSTM and GRU use cuDNN; their checkpoints are others",
        "predictor.from_saved_model": "load it in a session: tf.saved_model.load",
        "metrics": "see what tf.metrics has of that name, without streaming_",
        "learn": "tf.estimator has what is left of it",
        "offline_train": "it is the NPU's: tfmp.npu has its optimizer and its loss scale managers",
    }
)


def find_successor(name: str) -> tuple[str, Successor] | None:
    """Return the longest part of a dotted name that has a successor, with the successor; None without one.

    Example:
        >>> find_successor("tpu.InputPipelineConfig.PER_HOST_V2")[0]
        'tpu.InputPipelineConfig'
    """
    words = name.split(".")
    names = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next(((name, SUCCESSORS[name]) for name in names if name in SUCCESSORS), None)


def advice(name: str) -> str:
    """Return the advice for a name: the end of a sentence, without a full stop; empty if there is none."""
    words = name.split(".")
    names = (".".join(words[:count]) for count in range(len(words), 0, -1))
    found = next((ADVICE[name] for name in names if name in ADVICE), "")
    successor = SUCCESSORS.get(name)
    if found or successor is None:
        return found.format(name=words[-1])
    return f"write tf.{successor.name}{', its arguments without their names' if successor.is_checked else ''}"
