"""Probes change no value, and are seen where somebody looks."""

import re
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.ranges.probes import Probe, probes_of_graph, recorded_probes


def test_probe_of_eager_code_is_the_tensor_itself() -> None:
    x, v = tf.constant([1.0, 2.0]), tf.Variable(1.0)
    assert tfmp.ranges.probe(x, "x") is x
    assert tfmp.ranges.probe(v, "v") is v


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
    first, second = tfmp.ranges.probe(x, "same"), tfmp.ranges.probe(x, "same")
    assert [found.name for found in probes_of_graph()] == ["same", "same"]
    assert [found.tensor is tensor for found, tensor in zip(probes_of_graph(), [first, second], strict=True)] == [
        True,
        True,
    ]
    assert first is not x
    assert first.dtype == tf.float16
    assert session.run(first).tolist() == [1, 2]
    with tf.Graph().as_default():
        assert probes_of_graph() == []


@pytest.mark.graph
def test_variable_of_a_graph_can_be_probed(session: tf.compat.v1.Session) -> None:
    w = tf.compat.v1.get_variable("w", initializer=[1.0, 2.0])
    probed = tfmp.ranges.probe(w, "w")
    session.run(tf.compat.v1.global_variables_initializer())
    assert session.run(tf.gradients(probed * probed, [probed])[0]).tolist() == [2, 4]
    assert [found.name for found in probes_of_graph()] == ["w"]


@pytest.mark.graph
def test_probe_that_could_not_be_fetched_is_not_seen(session: tf.compat.v1.Session) -> None:
    def probed() -> tf.Tensor:
        return tfmp.ranges.probe(tf.constant(1.0) * 2.0, "inner")

    found = [tf.cond(tf.constant(True), probed, probed), tf.function(probed)()]
    found.append(tf.while_loop(lambda index: index < 2.0, lambda index: index + probed(), [0.0]))
    assert session.run(tf.stack([tf.reshape(each, []) for each in found])).tolist() == [2, 2, 2]
    assert probes_of_graph() == []


def test_recorder_collects_the_probes_of_its_thread() -> None:
    x = tf.constant([1.0, 2.0])

    def of_another_thread() -> None:
        tfmp.ranges.probe(x, "other")

    with recorded_probes() as outer:
        first = tfmp.ranges.probe(x, "first")
        with recorded_probes() as inner:
            second = tfmp.ranges.probe(x, "second")
        thread = threading.Thread(target=of_another_thread)
        thread.start()
        thread.join()
        third = tfmp.ranges.probe(x, "third")
    assert tfmp.ranges.probe(x, "later") is x
    assert [each.name for each in outer] == ["first", "third"]
    assert [each.name for each in inner] == ["second"]
    for found, tensor in zip([*outer, *inner], [first, third, second], strict=True):
        assert isinstance(found, Probe)
        assert found.tensor is tensor
        assert tensor.numpy().tolist() == [1, 2]


def test_recorder_ends_with_an_error() -> None:
    x = tf.constant(1.0)
    with pytest.raises(RuntimeError, match="in the model"), recorded_probes():
        raise RuntimeError("in the model")
    assert tfmp.ranges.probe(x, "x") is x


def test_gradient_of_a_recorded_probe_is_that_of_all_behind_it() -> None:
    w = tf.Variable(3.0)
    with tf.GradientTape() as tape, recorded_probes() as found:
        loss = tfmp.ranges.probe(w * 2.0, "double") * 5.0 + w
    assert float(tape.gradient(loss, found[0].tensor)) == 5


@pytest.mark.graph
@pytest.mark.parametrize(
    ("x", "got"),
    [
        (lambda: tf.constant(1), "int32"),
        (lambda: tf.constant(True), "bool"),
        (lambda: tf.constant(1j), "complex128"),
        (lambda: 1.0, "float"),
        (lambda: np.ones([2]), "ndarray"),
        (lambda: [tf.constant(1.0)], "list"),
        (lambda: None, "NoneType"),
    ],
)
def test_what_is_no_floating_point_tensor_is_refused(x: Any, got: str) -> None:
    message = f"a probe takes a tensor of a floating-point type, got {got} for 'x'."
    with tf.Graph().as_default(), pytest.raises(TypeError, match=re.escape(message)):
        tfmp.ranges.probe(x(), "x")


@pytest.mark.graph
def test_name_that_is_no_string_is_refused() -> None:
    with tf.Graph().as_default(), pytest.raises(TypeError, match="name must be a string, got 3 of type int"):
        tfmp.ranges.probe(tf.constant(1.0), 3)
