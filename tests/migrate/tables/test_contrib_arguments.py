"""The arguments of tf.contrib's names, against those of their successors."""

import inspect
import re
from functools import reduce

import numpy as np
import pytest
import tensorflow as tf

from tfmp.migrate.tables.contrib_successors import SUCCESSORS, advice

# As TensorFlow 1.15 had them, in their order, as far as scripts give them.
_ARGUMENTS = {
    "data.map_and_batch": "map_func batch_size num_parallel_batches drop_remainder num_parallel_calls",
    "data.parallel_interleave": (
        "map_func cycle_length block_length sloppy buffer_output_elements prefetch_input_elements"
    ),
    "data.shuffle_and_repeat": "buffer_size count seed",
    "data.group_by_window": "key_func reduce_func window_size window_size_func",
    "data.bucket_by_sequence_length": (
        "element_length_func bucket_boundaries bucket_batch_sizes padded_shapes padding_values pad_to_bucket_boundary"
    ),
    "data.prefetch_to_device": "device buffer_size",
    "data.copy_to_device": "target_device source_device",
    "data.enumerate_dataset": "start",
    "data.rejection_resample": "class_func target_dist initial_dist seed",
    "data.sample_from_datasets": "datasets weights seed",
    "data.choose_from_datasets": "datasets choice_dataset",
    "data.get_single_element": "dataset",
    "data.make_batched_features_dataset": "file_pattern batch_size features reader label_key reader_args num_epochs",
    "data.make_saveable_from_iterator": "iterator",
    "data.dense_to_sparse_batch": "batch_size row_shape",
    "tpu.TPUEstimator": (
        "model_fn model_dir config params use_tpu train_batch_size eval_batch_size predict_batch_size batch_axis"
    ),
    "tpu.TPUEstimatorSpec": "mode predictions loss train_op eval_metrics export_outputs scaffold_fn host_call",
    "tpu.TPUConfig": "iterations_per_loop num_shards num_cores_per_replica per_host_input_for_training",
    "tpu.CrossShardOptimizer": "opt reduction name group_assignment",
    "tpu.rewrite": "computation inputs infeed_queue device_assignment name",
    "tpu.shard": "computation inputs num_shards input_shard_axes outputs_from_all_shards output_shard_axes",
    "tpu.cross_replica_sum": "x group_assignment name",
    "cluster_resolver.TPUClusterResolver": "tpu zone project",
    "rnn.BasicLSTMCell": "num_units forget_bias state_is_tuple activation reuse name dtype",
    "rnn.BasicRNNCell": "num_units activation reuse name dtype",
    "rnn.LSTMCell": (
        "num_units use_peepholes cell_clip initializer num_proj proj_clip num_unit_shards num_proj_shards forget_bias "
        "state_is_tuple activation reuse name dtype"
    ),
    "rnn.GRUCell": "num_units activation reuse kernel_initializer bias_initializer name dtype",
    "rnn.MultiRNNCell": "cells state_is_tuple",
    "rnn.static_rnn": "cell inputs initial_state dtype sequence_length scope",
    "rnn.static_bidirectional_rnn": (
        "cell_fw cell_bw inputs initial_state_fw initial_state_bw dtype sequence_length scope"
    ),
    "framework.get_or_create_global_step": "graph",
    "framework.get_global_step": "graph",
    "framework.create_global_step": "graph",
    "framework.assert_global_step": "global_step_tensor",
    "framework.sort": "values axis direction name",
    "framework.argsort": "values axis direction stable name",
    "framework.nest.flatten": "structure",
    "framework.nest.assert_same_structure": "nest1 nest2 check_types",
    "framework.nest.pack_sequence_as": "structure flat_sequence",
    "framework.nest.is_sequence": "seq",
    "lookup.KeyValueTensorInitializer": "keys values key_dtype value_dtype name",
    "lookup.TextFileInitializer": "filename key_dtype key_index value_dtype value_index vocab_size delimiter name",
    "util.constant_value": "tensor partial",
    "util.make_tensor_proto": "values dtype shape verify_shape",
    "util.make_ndarray": "tensor",
    "training.checkpoints_iterator": "checkpoint_dir min_interval_secs timeout timeout_fn",
    "training.FinalOpsHook": "final_ops final_ops_feed_dict",
    "estimator.add_metrics": "estimator metric_fn",
    "estimator.InMemoryEvaluatorHook": "estimator input_fn steps hooks name every_n_iter",
    "estimator.stop_if_no_decrease_hook": "estimator metric_name max_steps_without_decrease eval_dir min_steps",
    "signal.frame": "signal frame_length frame_step pad_end pad_value axis name",
    "signal.stft": "signals frame_length frame_step fft_length window_fn pad_end name",
    "signal.inverse_stft": "stfts frame_length frame_step fft_length window_fn name",
    "signal.hann_window": "window_length periodic dtype name",
    "signal.linear_to_mel_weight_matrix": (
        "num_mel_bins num_spectrogram_bins sample_rate lower_edge_hertz upper_edge_hertz dtype name"
    ),
    "signal.mfccs_from_log_mel_spectrograms": "log_mel_spectrograms name",
    "signal.overlap_and_add": "signal frame_step name",
    "compiler.jit.experimental_jit_scope": "compile_ops separate_compiled_gradients",
    "compiler.xla.compile": "computation inputs",
    "stateless.stateless_random_uniform": "shape seed minval maxval dtype name",
    "stateless.stateless_random_normal": "shape seed mean stddev dtype name",
}


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="the successors are those of TensorFlow 2.15")
@pytest.mark.parametrize("name", sorted(_ARGUMENTS))
def test_a_successor_takes_the_arguments_in_their_order(name: str) -> None:
    successor = reduce(getattr, SUCCESSORS[name].name.split("."), tf.compat.v1)
    arguments = _ARGUMENTS[name].split()
    assert list(inspect.signature(successor).parameters)[: len(arguments)] == arguments


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="tf.layers needs Keras 2")
def test_a_batch_norm_that_is_written_as_advised_normalizes_as_that_of_contrib() -> None:
    written = re.search(r"tf\.layers\.batch_normalization\([^)]+\)", advice("layers.batch_norm"))
    assert written is not None
    values = np.random.default_rng(0).normal(3.0, 5.0, (64, 4)).astype(np.float32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with pytest.warns(UserWarning, match="is deprecated"):
            output = eval(written[0], {"tf": tf.compat.v1, "inputs": tf.constant(values)})
        updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
        session.run(tf.compat.v1.global_variables_initializer())
        np.testing.assert_allclose(session.run(output).std(0), np.ones(4), rtol=1e-3)
        session.run(updates)
        beta, mean, variance = session.run(tf.compat.v1.global_variables())
    assert beta.tolist() == [0.0] * 4
    np.testing.assert_allclose(mean, 0.001 * values.mean(0), rtol=1e-3)
    np.testing.assert_allclose(variance, 0.999 + 0.001 * values.var(0), rtol=1e-4)


def test_all_arguments_are_of_names_in_the_table() -> None:
    assert _ARGUMENTS.keys() <= SUCCESSORS.keys()
