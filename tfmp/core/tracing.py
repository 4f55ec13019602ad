"""How code is traced: without AutoGraph, in a thread without a graph, and what depends on a boolean tensor."""

import concurrent.futures
import contextlib
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import tensorflow as tf

from tfmp.core.tensorflow_internals import within_xla
from tfmp.types import ChangeVariables, Done, Gradient, Held

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def without_autograph(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Return the function such that AutoGraph converts neither it nor the functions that it calls.

    AutoGraph would convert the source of every function that a traced step calls, which takes most of the time of the
    trace. This package uses `tf.cond` instead of `if` on tensors.
    """
    unconverted: Callable[Parameters, Returned] = tf.autograph.experimental.do_not_convert(function)
    return unconverted


def outside_of_functions(make: Callable[[], Returned]) -> Returned:
    """Make variables eagerly, also while a `tf.function` is traced.

    The graph of a `tf.function` that is traced makes all variables, even under `tf.init_scope`: TensorFlow then traces
    twice, or in a later trace raises an error. So they are made in a new thread, in the scope of the strategy here.
    `make` must not depend on what TensorFlow and Keras keep for each thread, such as a name scope.
    """
    with tf.init_scope():
        is_traced = tf.executing_eagerly() and tf.compat.v1.get_default_graph().building_function
    if not is_traced:
        return make()
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None

    def in_scope() -> Returned:
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            return make()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(in_scope).result()


def conditional_update(
    flag: tf.Tensor, held: Held, if_true: ChangeVariables, if_false: ChangeVariables | None = None
) -> Done:
    """Call one of two functions that change variables with what one replica holds, depending on a boolean tensor."""
    if within_xla_for_cpu():
        false_called = [] if if_false is None else [_call_once_or_never(tf.logical_not(flag), held, if_false)]
        return tf.group(_call_once_or_never(flag, held, if_true), *false_called)

    def call(function: ChangeVariables | None, value: bool) -> tf.Tensor:
        with tf.control_dependencies([] if function is None else [function(held)]):
            return tf.constant(value)

    return tf.group(tf.cond(flag, lambda: call(if_true, True), lambda: call(if_false, False)))


def _call_once_or_never(flag: tf.Tensor, held: Held, function: ChangeVariables) -> Done:
    """Call a function in a loop that runs once or not at all: within XLA for CPUs, a conditional copies variables."""

    def run(times: tf.Tensor) -> tf.Tensor:
        # `times` is always 1 here, but XLA does not know this, because the loop changes it. Without this factor XLA
        # would move arithmetic on the gradients out of the loop, and store its results in memory.
        factor = tf.cast(times, tf.float32)

        def multiplied(part: Gradient) -> Gradient:
            if isinstance(part, tf.IndexedSlices):
                return tf.IndexedSlices(multiplied(part.values), part.indices, part.dense_shape)
            return None if part is None else part * tf.cast(factor, part.dtype)

        with tf.control_dependencies([function(tf.nest.map_structure(multiplied, held))]):
            return times - 1

    return tf.group(tf.while_loop(lambda times: times > 0, run, [tf.cast(flag, tf.int32)]))


def computed_if(needed: tf.Tensor, compute: Callable[[], tf.Tensor], otherwise: tf.Tensor) -> tf.Tensor:
    """Return `compute()` if `needed` is True. Otherwise return `otherwise`, without computing anything."""
    if within_xla_for_cpu():
        computed, _ = tf.while_loop(
            lambda _, again: again, lambda *_: (compute(), tf.constant(False)), [otherwise, needed]
        )
        return computed
    # Not with the default name, `cond`: TensorFlow numbers the scopes of that name, and these numbers are part of
    # checkpoint keys in scripts that used tf.contrib.
    return tf.cond(needed, compute, lambda: otherwise, name="look_again")


def within_xla_for_cpu() -> bool:
    """Return whether the running code is traced for XLA, and XLA will compile it for a CPU.

    Then a loop of at most one iteration stands for a conditional: for CPUs, XLA copies what a conditional captures
    or changes. For GPUs it copies nothing, and the host would wait for the condition of a loop.
    """
    return within_xla() and not has_accelerator()


def has_apple_gpu() -> bool:
    """Return whether the default device is an Apple GPU, for which XLA compiles nothing."""
    return sys.platform == "darwin" and bool(tf.config.list_physical_devices("GPU"))


def has_accelerator() -> bool:
    """Return whether there is a device that is not a CPU; where a program will run is not known while it is traced."""
    return any(device.device_type != "CPU" for device in tf.config.list_logical_devices())
