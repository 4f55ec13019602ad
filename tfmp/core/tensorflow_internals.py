"""The private names of TensorFlow that tfmp uses, each behind a function that says why nothing public would do.

They were read in the source of TensorFlow 2.15.1, 2.16.2 and 2.21.0. `tests/test_private_names.py` lists the others:
those that `tfmp.autocast` replaces, and methods that a class of tfmp overrides.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context, record
from tensorflow.python.framework import op_callbacks, op_def_registry
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

#: How the attributes begin in which TensorFlow (2.15 to 2.21) notes the children of an object for checkpoints.
TRACKING_PREFIX = "_self_"

#: A part of the names of the files into which AutoGraph (2.15 to 2.21) writes what it converted.
GENERATED_FILE = "__autograph_generated_file"


def converted_as_here(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Return the function such that AutoGraph converts it, also later, if it converts the code that runs here.

    `tf.__internal__.autograph` of TensorFlow 2.15 to 2.21. The public `tf.autograph.to_graph` converts always.
    """
    autograph = tf.__internal__.autograph
    converted: Callable[Parameters, Returned] = autograph.tf_convert(function, autograph.control_status_ctx())
    return converted


def within_xla() -> bool:
    """Return whether the running code is traced for a `tf.function(jit_compile=True)`, directly or nested in one.

    `GraphOrParentsInXlaContext` of TensorFlow 2.15 to 2.21. A public way to ask a graph would replace it.
    """
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def control_flow_context(graph: tf.Graph) -> Any:  # noqa: ANN401 - TensorFlow has no types
    """Return the branch or loop of TF1's control flow in which a graph adds ops; None outside of these.

    `Graph._get_control_flow_context` of TensorFlow 2.15 to 2.21. Nothing public tells without adding an op.
    """
    return graph._get_control_flow_context()


def within_loop_of_tf1() -> bool:
    """Return whether ops are being added to a loop that `tf.while_loop` builds by the control flow of TF1.

    `GetContainingWhileContext` of TensorFlow 2.15 to 2.21. Nothing public tells what a context belongs to.
    """
    context_of_ops = control_flow_context(tf.compat.v1.get_default_graph())
    return control_flow_util.GetContainingWhileContext(context_of_ops) is not None


def at_top_level_of_graph() -> bool:
    """Return whether an op made now would be in a graph, outside functions, control dependencies and conditionals.

    `Graph._current_control_dependencies` and `_get_control_flow_context` of TensorFlow 2.15 to 2.21. Nothing public
    tells without adding an op.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or graph.building_function:
        return False
    return not graph._current_control_dependencies() and graph._get_control_flow_context() is None


def ops_are_watched() -> bool:
    """Return whether `tf.debugging` adds an op after each op that this thread builds; XLA cannot compile such ops.

    `op_callbacks` of TensorFlow 2.15 to 2.21. In public, the tools can be turned on and off, but not asked.
    """
    return bool(op_callbacks.should_invoke_op_callbacks())


def gradients_may_be_recorded() -> bool:
    """Return whether a tape or a forward accumulator records the ops of this thread.

    `record.could_possibly_record` of TensorFlow 2.15 to 2.21. In public, only who holds a tape knows of it.
    """
    return bool(record.could_possibly_record())


def number_of_tensor(tensor: Any) -> int | None:  # noqa: ANN401 - of any type
    """Return the number of a tensor, in the order in which a process makes all its tensors; None for anything else.

    `Tensor._id` of TensorFlow 2.15 to 2.21. In public, tensors can be told apart, but have no order.
    """
    return int(tensor._id) if isinstance(tensor, tf.Tensor) else None


def is_branch(graph: tf.Graph) -> bool:
    """Return whether a graph is a branch of a conditional: `CondBranchFuncGraph` of TensorFlow 2.15 to 2.21."""
    return isinstance(graph, control_flow_v2_func_graphs.CondBranchFuncGraph)


def is_unfinished_branch(graph: tf.Graph) -> bool:
    """Return whether a graph is a branch of a conditional that is still being built, or whose building has failed.

    `FuncGraph.outer_graph` of TensorFlow 2.15 to 2.21. When all branches are built, the graph around them gets an op
    that calls them by their names.
    """
    if not is_branch(graph):
        return False
    conditionals = [op for op in graph.outer_graph.get_operations() if op.type in _CONDITIONALS]
    called = [attribute for op in conditionals for attribute in op.node_def.attr.values()]
    names = [function.name for each in called for function in [each.func, *each.list.func]]
    # TensorFlow adds a suffix to the name of a branch that it changes afterwards.
    return not any(name.startswith(graph.name) for name in names)


_CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Keep every `tf.GradientTape` of this thread from recording ops; what notes variables still notes them.

    `record.stop_recording` of TensorFlow 2.15 to 2.21. The public `tf.GradientTape.stop_recording` is for one tape.
    """
    stopped: contextlib.AbstractContextManager[None] = record.stop_recording()
    return stopped


def is_watched(tensor: tf.Tensor) -> bool:
    """Return whether a `tf.GradientTape` of this thread would compute a gradient with respect to a tensor.

    `record.should_record_backprop` of TensorFlow 2.15 to 2.21. In public, a tape tells its variables only.
    """
    return bool(record.should_record_backprop([tensor]))


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Run the functions that this thread calls as they were traced, without TensorFlow's optimization of their graphs.

    `context.function_call_options` of TensorFlow 2.15 to 2.21. What `tf.config.optimizer` sets, other threads get too.
    """
    of_thread = context.context()
    options = of_thread.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    of_thread.function_call_options = context.FunctionCallOptions(options.executor_type, config)
    try:
        yield
    finally:
        of_thread.function_call_options = options


def global_random_generator() -> random.Random | None:
    """Return what draws the seeds of eager ops after `tf.random.set_seed`; None if that was not called in eager code.

    `context._rng` of TensorFlow 2.15 to 2.21. In public, a sequence of seeds can be begun, but not saved.
    """
    return getattr(context.context(), "_rng", None)


def variables_used_by(graph: tf.Graph) -> list[tf.Variable]:
    """Return the variables that the graph of a function used until now, also those that are not trainable.

    `FuncGraph._watched_variables` of TensorFlow 2.15 to 2.21. The public `variables` is empty until the trace ends.
    """
    return list(graph._watched_variables)


def new_function_graph(name: str) -> Any:  # noqa: ANN401 - TensorFlow has no types
    """Return an empty graph that captures what code in it uses from outside, and does not own the variables it makes.

    `tf.__internal__.FuncGraph` of TensorFlow 2.15 to 2.21. A public `tf.Graph` captures nothing, a `tf.function` owns.
    """
    return tf.__internal__.FuncGraph(name)


def op_definition(op_type: str) -> Any:  # noqa: ANN401 - a protocol buffer
    """Return the definition of a type of ops, an `OpDef`; None if TensorFlow has no such type.

    `op_def_registry` of TensorFlow 2.15 to 2.21. The public `tf.Operation.op_def` needs an op.
    """
    return op_def_registry.get(op_type)


def slice_information(variable: tf.Variable) -> Any:  # noqa: ANN401 - TensorFlow has no types
    """Return as which part of a larger variable a `Saver` saves a variable, a `tf.Variable.SaveSliceInfo`, or None.

    `Variable._get_save_slice_info` of TensorFlow 2.15 to 2.21. The class is public, but no variable tells its object.
    """
    return variable._get_save_slice_info()


def set_slice_information(variable: tf.Variable, information: tf.Variable.SaveSliceInfo) -> None:
    """Let every `Saver` save a variable as part of a larger one, under the key of that.

    `Variable._set_save_slice_info` of TensorFlow 2.15 to 2.21. In public, a key is given to one `Saver` alone.
    """
    variable._set_save_slice_info(information)


def key_of_distributed(variable: tf.distribute.DistributedValues) -> str:
    """Return a `Saver`'s key of a variable of a strategy: `_common_name` of TensorFlow 2.15 to 2.21."""
    return str(variable._common_name)


def set_key_of_distributed(variable: tf.distribute.DistributedValues, key: str) -> None:
    """Set what `key_of_distributed` returns; see `set_slice_information`."""
    variable._common_name = key


def make_slots(optimizer: tf.compat.v1.train.Optimizer, variables: Sequence[tf.Variable]) -> None:
    """Let an optimizer of TF1 make its variables, such as momenta.

    `Optimizer._create_slots` of TensorFlow 2.15 to 2.21. In public, only `apply_gradients` makes them.
    """
    optimizer._create_slots(variables)
