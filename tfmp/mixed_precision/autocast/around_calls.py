"""The scope in which gradients, traces of functions and replicas run: what stands around TensorFlow's calls of them."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmp.mixed_precision.autocast import state
from tfmp.mixed_precision.autocast.op_types import cast_float

_Function = Callable[..., Any]


def out_of_scope(function: _Function) -> _Function:
    """Compute gradients as outside of all scopes, in the types of the forward pass."""

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        with state.changed(None):
            return function(*args, **kwargs)

    return replaced


def around_custom_gradients(decorator: _Function) -> _Function:
    """Compute the gradient of a function with `tf.custom_gradient` in the scope in which the function was called."""

    @functools.wraps(decorator)
    def replaced(function: _Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - any results
        scope = state.current()
        if scope is None or scope.is_around_trace:
            return decorator(function, args, kwargs)

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any results
            results, gradient = function(*args, **kwargs)
            return results, _gradient_in_scope(gradient, scope, args)

        return decorator(forward, args, kwargs)

    return replaced


def _gradient_in_scope(gradient: _Function, scope: state.Scope, inputs: Sequence[Any]) -> _Function:
    def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the gradients
        with scope.entered:
            grads = gradient(*args, **kwargs)
            if "variables" in kwargs:
                of_inputs, of_variables = grads
                return _as_types_of(of_inputs, inputs), _as_types_of(of_variables, kwargs["variables"])
            return _as_types_of(grads, inputs)

    # TensorFlow looks whether it takes `variables`.
    replaced.__signature__ = inspect.signature(gradient)  # type: ignore[attr-defined] # `inspect` reads it
    return replaced


def _as_types_of(grads: Any, inputs: Any) -> Any:  # noqa: ANN401 - nested as the inputs are, or flat
    flat, flat_inputs = tf.nest.flatten(grads), tf.nest.flatten(inputs)
    if len(flat) != len(flat_inputs):
        return grads
    cast_grads = [cast_float(grad, getattr(each, "dtype", None)) for grad, each in zip(flat, flat_inputs, strict=True)]
    return tf.nest.pack_sequence_as(grads, cast_grads)


#: What makes functions for one call: `tf.vectorized_map`, data sets, recurrent layers of Keras 2, `tfmp.recompute`.
_LIBRARIES = (
    "tensorflow.python.ops.parallel_for.",
    "tensorflow.python.data.",
    "keras.src.layers.",
    "tf_keras.src.layers.",
    "tfmp.",
)


def around_functions(call: _Function) -> _Function:
    """Remember that the scope was entered outside of the `tf.function` that is called, and perhaps traced."""

    @functools.wraps(call)
    def replaced(function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        scope = state.current()
        # What these make for one call, nobody can call again.
        is_for_once = (getattr(function.python_function, "__module__", None) or "").startswith(_LIBRARIES)
        if scope is None or is_for_once or tf.config.functions_run_eagerly():
            return call(function, *args, **kwargs)
        with state.changed(scope._replace(is_around_trace=True)):
            return call(function, *args, **kwargs)

    return replaced


def around_replicas(call_for_each: _Function) -> _Function:
    """Refuse to call replicas within a scope."""

    @functools.wraps(call_for_each)
    def replaced(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as TensorFlow passes them
        if state.current() is not None and tf.distribute.has_strategy():
            raise RuntimeError(
                "strategy.run is called within tfmp.autocast, and replicas may run in threads of their own, which "
                "the scope does not reach. Enter the scope inside of the function that strategy.run calls."
            )
        return call_for_each(*args, **kwargs)

    return replaced
