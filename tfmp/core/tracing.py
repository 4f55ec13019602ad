"""How code is traced: without AutoGraph, in a thread without a graph, and for which device."""

import concurrent.futures
import contextlib
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import tensorflow as tf

from tfmp.core.tensorflow_internals import within_xla

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

    While TensorFlow traces a `tf.function`, the function's graph makes all variables, even under `tf.init_scope`. If
    variables are made in the first trace, TensorFlow traces the function twice; in a later trace they are an error.
    The variables are therefore made in a new thread, in the scope of the strategy here. `make` must not depend on what
    TensorFlow and Keras keep for each thread, such as a name scope.
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


def within_xla_for_cpu() -> bool:
    """Return whether the running code is traced for XLA, and XLA will compile it for a CPU."""
    return within_xla() and not has_accelerator()


def has_apple_gpu() -> bool:
    """Return whether the default device is an Apple GPU, for which XLA compiles nothing."""
    return sys.platform == "darwin" and bool(tf.config.list_physical_devices("GPU"))


def has_accelerator() -> bool:
    """Return whether there is a device that is not a CPU.

    Where a program will run is not known while it is traced, but it can only be a device that is there.
    """
    return any(device.device_type != "CPU" for device in tf.config.list_logical_devices())
