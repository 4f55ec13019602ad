"""Calls of recomputed functions: what is kept and computed when, and what is traced."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graph_ops import needed_for, ops_of_a_gradient, read_for
from keras_models import plain

import tfmp

tf1 = tf.compat.v1

_X = np.random.default_rng(1).normal(size=[3, 4]).astype(np.float32)


def test_eager_code_keeps_no_activation() -> None:
    """The first run is that of a trace, so no tensor of eager code exists until the gradients are computed."""

    def made_until_the_gradients(wrap: Callable[..., Any]) -> int:
        activations = []

        def block(x: tf.Tensor) -> tf.Tensor:
            activations.append(tf.exp(x))
            return tf.exp(activations[-1])

        x = tf.ones([3])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = wrap(block)(x)
        made = sum(tf.is_tensor(activation) and hasattr(activation, "numpy") for activation in activations)
        assert tape.gradient(y, x) is not None
        return made

    assert (made_until_the_gradients(plain), made_until_the_gradients(tfmp.recompute)) == (1, 0)


@pytest.mark.parametrize("in_graph", [False, pytest.param(True, marks=pytest.mark.graph)], ids=["function", "graph"])
def test_gradients_use_no_activation_and_their_run_waits_for_those_of_the_results(in_graph: bool) -> None:
    """A graph would otherwise merge both runs into one, or run them together."""

    def block(x: tf.Tensor) -> tf.Tensor:
        return tf.exp(tf.exp(x))

    def used(function: Callable[..., Any]) -> set[str]:
        forward, backward = ops_of_a_gradient(function, tf.TensorSpec([3]), in_graph=in_graph)
        names = {op.name for op in forward if op.type == "Exp"}
        return names & {tensor.op.name for op in backward for tensor in op.inputs}

    assert used(block)
    assert used(tfmp.recompute(block)) == set()
    _, backward = ops_of_a_gradient(tfmp.recompute(block), tf.TensorSpec([3]), in_graph=in_graph)
    again = [op for op in backward if op.type == "Exp"]
    assert len(again) == 2
    assert all("Cos" in {op.type for op in needed_for(each)} for each in again)


def test_second_run_waits_within_xla_where_control_dependencies_do_nothing() -> None:
    block = tfmp.recompute(lambda x: tf.exp(tf.exp(x)))

    @tf.function(jit_compile=True)
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.sin(block(x))
        return tape.gradient(loss, x)

    program = gradient.experimental_get_compiler_ir(tf.zeros([3]))(stage="optimized_hlo")
    # Two in each of the two runs; XLA would merge the runs if it could.
    assert program.count(" exponential(") >= 4


@pytest.mark.parametrize("in_graph", [False, pytest.param(True, marks=pytest.mark.graph)], ids=["function", "graph"])
def test_each_gradient_waits_until_the_second_run_has_read_all_variables(in_graph: bool) -> None:
    """Else an update of `second` might come before it is read for the gradient of `first`."""

    def assert_waiting(*factors: tf.Variable) -> None:
        y = tfmp.recompute(lambda x: x * factors[0] * factors[1])(tf.constant(_X))
        # The gradient of each factor is computed from the other one.
        grads = tf.gradients(y, factors)
        assert read_for(grads[0]) == read_for(grads[1])
        assert len(read_for(grads[0])) > 1

    if in_graph:
        with tf.Graph().as_default():
            assert_waiting(*(tf1.get_variable(name, [], use_resource=True) for name in ("first", "second")))
    else:
        factors = tf.Variable(2.0), tf.Variable(3.0)
        tf.function(lambda: assert_waiting(*factors)).get_concrete_function()


def test_first_run_rounds_as_eager_code_does_and_later_functions_are_optimized() -> None:
    def scaled(x: tf.Tensor) -> tf.Tensor:
        # TensorFlow multiplies the numbers first where it optimizes a graph.
        return x * 0.1 * 3.0 * 0.7

    numbers = tf.constant(np.random.default_rng(7).normal(size=100), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(numbers)
        found = tfmp.recompute(scaled)(numbers)
    assert found.numpy().tolist() == scaled(numbers).numpy().tolist()
    assert tf.function(scaled)(numbers).numpy().tolist() != found.numpy().tolist()


def test_composite_tensors_pass() -> None:
    x = tf.ragged.constant([[1.0, 2.0], [3.0]])
    with tf.GradientTape() as tape:
        tape.watch(x.values)
        y = tfmp.recompute(lambda x: tf.sparse.from_dense((x**2).to_tensor()))(x)
    assert isinstance(y, tf.SparseTensor)
    assert tape.gradient(y.values, x.values).numpy().tolist() == [2, 4, 6]


def test_function_without_floating_results_is_called_once() -> None:
    calls = []
    y = tf.function(tfmp.recompute(lambda x: calls.append(x) or tf.cast(x, tf.int32)))(tf.constant(3.7))
    assert (int(y), len(calls)) == (3, 1)
    assert int(tfmp.recompute(lambda x: tf.cast(x, tf.int32))(tf.constant(3.7))) == 3


@pytest.mark.parametrize("way", [plain, tf.function], ids=["eager", "function"])
def test_block_may_make_its_variables_in_its_first_call(way: Any) -> None:
    class Lazy:
        w: tf.Variable | None = None

        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            if self.w is None:
                self.w = tf.Variable(tf.ones([x.shape[-1]]))
            return x * self.w

    block, x = Lazy(), tf.constant([[1.0, 2.0], [3.0, 4.0]])
    call = way(tfmp.recompute(block))
    with tf.GradientTape() as tape:
        y = call(x)
    assert tape.gradient(y, block.w).numpy().tolist() == [4.0, 6.0]


def test_methods_are_recomputed_and_keep_name_docstring_and_signature() -> None:
    def block(self: Any, x: tf.Tensor, *, flag: bool = True) -> tf.Tensor:
        """Do it."""
        return self.w * x**2

    model = type("Model", (tf.Module,), {"block": tfmp.recompute(block), "w": tf.Variable(3.0)})()
    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        y = model.block(x)
    assert float(tape.gradient(y, model.w)) == 4
    wrapped = type(model).block
    assert (wrapped.__name__, wrapped.__doc__) == ("block", "Do it.")
    assert inspect.signature(wrapped) == inspect.signature(block)
    with pytest.raises(ValueError, match="is recomputed already"):
        tfmp.recompute(model.block)


def test_function_is_traced_once_for_each_kind_of_call_without_a_tape() -> None:
    traced = []

    @tfmp.recompute
    def block(x: tf.Tensor, flag: bool = True) -> tf.Tensor:
        if not tf.executing_eagerly():
            traced.append(x.shape.rank)
        return x * 2

    for rows in (2, 3, 4):
        block(tf.ones([rows, 2]))
    assert traced == [2]
    block(tf.ones([2, 2]), flag=False)
    block(tf.ones([2, 2]), flag=1)
    block(tf.ones([2]))
    assert traced == [2, 2, 2, 1]
