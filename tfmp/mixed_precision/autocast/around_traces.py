"""Tells where a scope from outside would act unseen, or not at all: in traces, and on replicas."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmp.mixed_precision.autocast import state

_Function = Callable[..., Any]

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
