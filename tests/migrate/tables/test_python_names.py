"""The names of the private modules, against TensorFlow."""

import importlib

import pytest
import tensorflow as tf

from tfmp.migrate.tables.python_names import missing_part, replacement

_PRESENT = (
    *(
        "framework.ops.convert_to_tensor",
        "ops.nn.relu",
        "ops.rnn_cell.RNNCell",
        "util.nest.flatten",
        "ops.math_ops.add",
    ),
    *("training.checkpoint_management.get_checkpoint_state", "training.checkpoint_state_pb2.CheckpointState"),
    *(
        "layers.core.Dense",
        "client.device_lib.list_local_devices",
        "ops.gen_array_ops.deep_copy",
        "platform.gfile.Open",
    ),
)
_MISSING = (
    *("training.distribution_strategy_context", "pywrap_tensorflow.NewCheckpointReader", "util.nest.is_sequence"),
    *("framework.ops.Tensor", "ops.control_flow_ops.cond", "training.tracking", "distribute.all_reduce"),
)


def _is_in_tensorflow(name: str) -> bool:
    module, _, word = f"tensorflow.python.{name}".rpartition(".")
    try:
        return hasattr(importlib.import_module(module), word) or bool(importlib.import_module(f"{module}.{word}"))
    except ImportError:
        return False


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="the table is of TensorFlow 2.15")
@pytest.mark.parametrize("name", [*_PRESENT, *_MISSING])
def test_the_table_knows_what_tensorflow_has(name: str) -> None:
    assert (missing_part(name) == "") is _is_in_tensorflow(name)


def test_a_missing_name_is_cut_after_its_first_missing_word() -> None:
    assert missing_part("training.no_such_module.f") == "training.no_such_module"
    assert missing_part("util.nest.no_such_name.f") == "util.nest.no_such_name"


def test_a_public_name_is_the_replacement_before_a_module() -> None:
    assert replacement("ops.control_flow_ops.cond") == "tf.compat.v1.cond"
    assert replacement("distribute.all_reduce") == "tensorflow.python.distribute.v1.all_reduce"
    assert replacement("ops.rnn_cell_impl._no_such_name") == ""
