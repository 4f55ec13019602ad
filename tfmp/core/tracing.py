"""How code is traced: with AutoGraph or not, for XLA, in a loop, by tapes and debugging tools; what its ops keep."""

import contextlib
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import tensorflow as tf

# Internal modules: TensorFlow (2.15 to 2.21) has no public way to ask what they tell, or to set it for a thread alone.
from tensorflow.python.eager import context, record
from tensorflow.python.framework import op_callbacks, op_def_registry
from tensorflow.python.ops import control_flow_util

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def without_autograph(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Return the function such that AutoGraph converts neither it nor the functions that it calls.

    When a `tf.function` traces a step, AutoGraph converts the source code of every function that the step calls. This
    takes most of the time of the trace. The code of this package does not need it, because it uses `tf.cond` instead of
    `if` on tensors.
    """
    unconverted: Callable[Parameters, Returned] = tf.autograph.experimental.do_not_convert(function)
    return unconverted


def converted_as_here(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Return the function such that AutoGraph converts it if AutoGraph converts the code that runs here.

    A function that is called again later, when nothing is converted any more, is then converted there too.

    Examples:
        >>> converted_as_here(len)([1, 2])
        2
    """
    autograph = tf.__internal__.autograph
    converted: Callable[Parameters, Returned] = autograph.tf_convert(function, autograph.control_status_ctx())
    return converted


def within_xla() -> bool:
    """Return whether the running code is traced for a `tf.function(jit_compile=True)`, directly or nested in one."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def within_loop_of_tf1() -> bool:
    """Return whether ops are being added to a loop that `tf.while_loop` builds by the control flow of TF1.

    Examples:
        >>> within_loop_of_tf1()
        False
    """
    context = tf.compat.v1.get_default_graph()._get_control_flow_context()
    return control_flow_util.GetContainingWhileContext(context) is not None


def place_of_ops() -> tuple[object, object]:
    """Return where ops are being added: a graph, and the branch or loop of TF1's control flow within it.

    A tensor can be used again in the place where it was computed. Within one graph, TensorFlow 1 runs the ops of a
    branch only if the branch is taken. In eager code there is one place. Two pairs are equal if the place is the same.

    Examples:
        >>> place_of_ops() == place_of_ops()
        True
        >>> graph = tf.Graph()
        >>> with graph.as_default():
        ...     place_of_ops() == (graph, None)
        True
    """
    if tf.executing_eagerly():
        return None, None
    graph = tf.compat.v1.get_default_graph()
    return graph, graph._get_control_flow_context()


def ops_are_watched() -> bool:
    """Return whether a debugging tool adds an op of its own after each op that this thread builds.

    `tf.debugging.enable_check_numerics` and `tf.debugging.experimental.enable_dump_debug_info` do so. XLA cannot
    compile the ops that they add, so nothing should be compiled while they are enabled.
    """
    return bool(op_callbacks.should_invoke_op_callbacks())


def gradients_may_be_recorded() -> bool:
    """Return whether a `tf.GradientTape` or a forward accumulator records the ops of this thread.

    Examples:
        >>> gradients_may_be_recorded()
        False
        >>> with tf.GradientTape():
        ...     gradients_may_be_recorded()
        True
    """
    return bool(record.could_possibly_record())


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Keep every `tf.GradientTape` of this thread from recording ops; what notes variables still notes them.

    A `tf.GradientTape` can only stop its own recording.

    Examples:
        >>> x = tf.Variable(1.0)
        >>> with tf.GradientTape() as tape:
        ...     with unrecorded():
        ...         y = x + 1
        >>> tape.gradient(y, x) is None
        True
    """
    stopped: contextlib.AbstractContextManager[None] = record.stop_recording()
    return stopped


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Run the functions that this thread calls as they were traced, without TensorFlow's optimization of their graphs.

    Examples:
        >>> def scaled(x):
        ...     return x * 0.1 * 3.0 * 0.7  # which an optimized graph computes as x * 0.21
        >>> x = tf.range(100.0)
        >>> bool(tf.reduce_all(tf.function(scaled)(x) == scaled(x)))
        False
        >>> with unoptimized():
        ...     bool(tf.reduce_all(tf.function(scaled)(x) == scaled(x)))
        True
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


def is_watched(tensor: tf.Tensor) -> bool:
    """Return whether a `tf.GradientTape` of this thread would compute a gradient with respect to a tensor.

    Examples:
        >>> x = tf.constant(1.0)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     is_watched(x + 1), is_watched(tf.constant(2.0))
        (True, False)
    """
    return bool(record.should_record_backprop([tensor]))


def variables_used_by(graph: tf.Graph) -> list[tf.Variable]:
    """Return the variables that the graph of a function used until now, also those that are not trainable.

    TensorFlow's own list is empty until the function is traced to its end.

    Examples:
        >>> v = tf.Variable(1.0, trainable=False, name="v")
        >>> f = tf.function(lambda: (v + 1, print(variables_used_by(tf.compat.v1.get_default_graph())[0].name))[0])
        >>> float(f())
        v:0
        2.0
    """
    return list(graph._watched_variables)


def is_stateful(op_type: str) -> bool:
    """Return whether TensorFlow declares that ops of a type keep state, read it, or have effects beside their results.

    Examples:
        >>> is_stateful("RandomUniform"), is_stateful("StatelessRandomUniformV2")
        (True, False)
    """
    definition = op_def_registry.get(op_type)
    return definition is not None and bool(definition.is_stateful)
