"""`tfmp.recompute`, for functions of raw TensorFlow."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from tfmp.any_keras.which import keras_of
from tfmp.core.tensorflow_internals import converted_as_here
from tfmp.core.tracing import without_autograph
from tfmp.recomputation.functions.call import Call
from tfmp.recomputation.functions.eager import EagerCalls
from tfmp.recomputation.functions.graph import results_in_graph

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

#: The attribute by which a recomputed function knows itself.
_ITSELF = "_recomputed_by_tfmp"


def recompute(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Compute a function again for its gradients, instead of keeping its activations until then.

    Use it where a model does not fit in memory, on each of several blocks in a row. Only what goes into and comes out
    of each block is kept. A step takes about one more forward pass; results and gradients are the same. It works in
    eager code, in a `tf.function`, also within XLA, and in the graphs of TF1: there with `get_variable` too, which
    returns the same variables both times.

    Gradients flow to the floating-point tensors among the arguments, to variables, and to tensors that the function
    captures. Pass what is large as an argument: a captured tensor is kept. In graphs of TF1 and in a `tf.function`,
    TensorFlow may compute what depends on no argument early. Second derivatives are right as well. An argument without
    influence has the gradient None.

    The second call must compute what the first did. What cannot be so is refused by name: random ops that keep state,
    assignments, queues, Python functions (`tf.py_function`), and all else that TensorFlow declares as stateful; reading
    variables and tables, `tf.print` and assertions are allowed. You must see to it that Python code does the same both
    times, and that the variables keep their values between the call and its gradients.

    In eager code the function must be one that `tf.function` can trace. While a tape records, each call is traced anew,
    to see its ops and what it captures this time, and the first computation is that of the trace. This takes longer
    than the same ops in eager code: put the step into a `tf.function` where that matters. While no tape records, one
    trace for each kind of call (types and ranks of the arguments, and Python values) only checks its ops.

    Args:
        function: A function of any arguments. They, and the results, may be nested structures, also with composite
            tensors such as `tf.SparseTensor`.

    Returns:
        The function with the same signature.

    Raises:
        TypeError: If it is not callable, or is a layer of Keras, which `tfmp.Recompute` wraps.
        ValueError: If it is recomputed already; when it is called, if it cannot be computed a second time.

    Examples:
        >>> import tfmp
        >>> w = tf.Variable([[2.0]])
        >>> @tfmp.recompute
        ... def block(x, *, activation=tf.nn.relu):
        ...     return activation(x @ w)
        >>> x = tf.constant([[3.0]])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = block(block(x), activation=tf.tanh)
        >>> [grad.shape.as_list() for grad in tape.gradient(y, [x, w])]
        [[1, 1], [1, 1]]

        Masks of dropout are the same both times if their seed is an argument:

        >>> @tfmp.recompute
        ... def noisy(x, seed):
        ...     return tf.nn.experimental.stateless_dropout(x, 0.5, seed)
        >>> noisy(x, tf.constant([1, 2])).shape.as_list()
        [1, 1]

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); `tf.recompute_grad`.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {function!r}: pass the function itself, not its result.")
    if keras_of(function, "layers.Layer") is not None:
        raise TypeError(
            f"function must be a function, got the Keras layer {getattr(function, 'name', None)!r}: write "
            "tfmp.Recompute(layer), which returns a layer."
        )
    if _is_recomputed(function):
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(f"{name} is recomputed already: a wrapper around a wrapper would compute it three times.")
    eager_calls = EagerCalls()

    @functools.wraps(function)
    def recomputing(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        return _results(function, converted_as_here(function), eager_calls, args, kwargs)

    vars(recomputing)[_ITSELF] = recomputing
    return recomputing


def _is_recomputed(function: object) -> bool:
    # A decorator that uses functools.wraps copies the attribute to a function that is another one.
    plain = getattr(function, "__func__", function)
    return getattr(plain, _ITSELF, None) is plain


@without_autograph
def _results(
    function: Callable[..., object],
    converted: Callable[..., object],
    eager_calls: EagerCalls,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Any:  # noqa: ANN401 - what the function returns
    if tf.executing_eagerly():
        return eager_calls.results(Call(function, args, kwargs))
    return results_in_graph(Call(converted, args, kwargs))
