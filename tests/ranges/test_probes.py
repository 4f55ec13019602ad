"""Probes change no value, and are seen where somebody looks."""

import contextlib
import re
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.ranges.probes import probes_of_graph, recorded_probes


def test_probe_of_eager_code_is_the_tensor_itself() -> None:
    for x in (tf.constant([1.0, 2.0]), tf.Variable(1.0)):
        assert tfmp.ranges.probe(x, "x") is x


@pytest.mark.parametrize("jit_compile", [False, True], ids=["function", "xla"])
def test_probe_adds_no_op_to_a_function(jit_compile: bool) -> None:
    @tf.function(jit_compile=jit_compile)
    def double(x: tf.Tensor) -> tf.Tensor:
        return tfmp.ranges.probe(x, "x") * 2.0

    assert float(double(tf.constant(3.0))) == 6
    types = [op.type for op in double.get_concrete_function(tf.constant(3.0)).graph.get_operations()]
    # The one identity op is that of the result.
    assert types.count("Identity") == 1


@pytest.mark.graph
def test_probe_of_a_graph_is_an_identity(session: tf.compat.v1.Session) -> None:
    assert probes_of_graph() == []
    x = tf.constant([1.0, 2.0], tf.float16)
    probes = [tfmp.ranges.probe(x, "same"), tfmp.ranges.probe(x, "same")]
    w = tf.compat.v1.get_variable("w", initializer=[1.0, 2.0])
    probes.append(tfmp.ranges.probe(w, "w"))
    assert [found.name for found in probes_of_graph()] == ["same", "same", "w"]
    assert all(found.tensor is tensor for found, tensor in zip(probes_of_graph(), probes, strict=True))
    assert (probes[0] is not x, probes[0].dtype) == (True, tf.float16)
    session.run(tf.compat.v1.global_variables_initializer())
    assert session.run([probes[0], tf.gradients(probes[2] ** 2, probes[2])[0]])[0].tolist() == [1, 2]
    with tf.Graph().as_default():
        assert probes_of_graph() == []


@pytest.mark.graph
def test_probe_that_could_not_be_fetched_is_not_seen(session: tf.compat.v1.Session) -> None:
    def probed() -> tf.Tensor:
        return tfmp.ranges.probe(tf.constant(1.0) * 2.0, "inner")

    found = [tf.cond(tf.constant(True), probed, probed), tf.function(probed)()]
    found.append(tf.while_loop(lambda index: index < 2.0, lambda index: index + probed(), [0.0]))
    assert session.run(tf.stack([tf.reshape(each, []) for each in found])).tolist() == [2, 2, 2]
    assert probes_of_graph() == []


def test_recorder_collects_the_probes_of_its_thread_until_it_ends() -> None:
    x = tf.constant([1.0, 2.0])
    with contextlib.suppress(RuntimeError), recorded_probes() as outer:
        first = tfmp.ranges.probe(x, "first")
        with recorded_probes() as inner:
            second = tfmp.ranges.probe(x, "second")
        thread = threading.Thread(target=lambda: tfmp.ranges.probe(x, "other"))
        thread.start()
        thread.join()
        third = tfmp.ranges.probe(x, "third")
        raise RuntimeError("in the model")
    assert tfmp.ranges.probe(x, "later") is x
    assert [each.name for each in (*outer, *inner)] == ["first", "third", "second"]
    for found, tensor in zip([*outer, *inner], [first, third, second], strict=True):
        assert found.tensor is tensor
        assert tensor.numpy().tolist() == [1, 2]


def test_gradient_of_a_recorded_probe_is_that_of_all_behind_it() -> None:
    w = tf.Variable(3.0)
    with tf.GradientTape() as tape, recorded_probes() as found:
        loss = tfmp.ranges.probe(w * 2.0, "double") * 5.0 + w
    assert float(tape.gradient(loss, found[0].tensor)) == 5


_NO_TENSOR = "a probe takes a tensor of a floating-point type, got {} for 'x'."


@pytest.mark.graph
@pytest.mark.parametrize(
    ("x", "name", "message"),
    [
        (lambda: tf.constant(1), "x", _NO_TENSOR.format("int32")),
        (lambda: tf.constant(True), "x", _NO_TENSOR.format("bool")),
        (lambda: tf.constant(1j), "x", _NO_TENSOR.format("complex128")),
        (lambda: 1.0, "x", _NO_TENSOR.format("float")),
        (lambda: np.ones([2]), "x", _NO_TENSOR.format("ndarray")),
        (lambda: [tf.constant(1.0)], "x", _NO_TENSOR.format("list")),
        (lambda: None, "x", _NO_TENSOR.format("NoneType")),
        (lambda: tf.constant(1.0), 3, "name must be a string, got 3 of type int"),
    ],
)
def test_what_is_no_floating_point_tensor_or_name_is_refused(x: Any, name: Any, message: str) -> None:
    with tf.Graph().as_default(), pytest.raises(TypeError, match=re.escape(message)):
        tfmp.ranges.probe(x(), name)
