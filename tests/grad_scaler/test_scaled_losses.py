"""The warnings about gradients whose loss was not scaled, and the cases that must not cause one."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from scaler_loops import IN_BOTH_WAYS, WAYS, sgd

import tfmp
from tfmp.core.messages import script_line

_NEVER = (
    "gradients are divided by the loss scale, but scale() was not called before: differentiate what scale() returns, "
    "not the loss itself."
)


class _Training:
    """A scaler with an optimizer and a weight; `line` is the line that a warning must name."""

    def __init__(self, **settings: Any) -> None:
        self.scaler = tfmp.GradScaler(**settings)
        self.optimizer, self.weight, self.line = sgd(), tf.Variable([1.0, 2.0]), ""
        self.accumulator = tfmp.GradientAccumulator([self.weight], 1)

    def loss(self, data: Any = 3.0) -> tf.Tensor:
        return tf.reduce_sum(self.weight * self.weight) * data

    def grads(self, data: Any = 3.0) -> list[tf.Tensor]:
        """Return the gradients of the scaled loss."""
        with tf.GradientTape() as tape:
            scaled = self.scaler.scale(self.loss(data))
        return list(tape.gradient(scaled, [self.weight]))

    def step(self, grads: Any, unscales: bool = True) -> None:
        if unscales:
            grads, line = self.scaler.unscale(self.optimizer, grads), script_line()
        _, last_line = self.scaler.step(self.optimizer, zip(grads, [self.weight], strict=True)), script_line()
        self.scaler.update()
        if tf.executing_eagerly():
            # In eager code only the line that calls the scaler is known.
            self.line = line if unscales else last_line


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "tfmp"]


@pytest.mark.graph
def test_warning_in_a_tf1_graph_names_the_line_of_the_gradients(
    session: tf.compat.v1.Session, caplog: pytest.LogCaptureFixture
) -> None:
    scaler, weight = tfmp.GradScaler(), tf.compat.v1.get_variable("w", initializer=[1.0, 2.0])
    loss = tf.reduce_sum(weight * weight)
    grads, line = tf.gradients(loss, [weight]), script_line()
    for _ in range(2):
        scaler.step(sgd(), zip(grads, [weight], strict=True))
    assert _messages(caplog) == [f"{line}: {_NEVER}"]


@pytest.mark.parametrize("way", ["eager", "function", "xla"])
@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_gradients_of_an_unscaled_loss_give_one_warning_with_the_line(
    clips: bool, unscales: bool, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = _Training()

    @tf.autograph.experimental.do_not_convert  # the lines would be those of the converted code
    def iterate(data: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = training.loss(data)
        grads, training.line = tape.gradient(loss, [training.weight]), script_line()
        training.step(tfmp.clip_by_norm(grads, 1e6) if clips else grads, unscales)

    run = WAYS[way](iterate)
    for _ in range(3):
        run(tf.constant(3.0))
    assert _messages(caplog) == [f"{training.line}: {_NEVER}"]


def _of_scaled(make: Callable[[_Training, tf.Tensor], tf.Tensor], unscales: bool = True) -> Callable[..., None]:
    """Step with the gradients of a loss that was scaled in some way."""

    def iterate(training: _Training, data: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            scaled = make(training, data)
        training.step(tape.gradient(scaled, [training.weight]), unscales)

    return iterate


def _differentiated_in_another_function(training: _Training, data: tf.Tensor) -> None:
    @tf.function
    def gradients() -> list[tf.Tensor]:
        return training.grads(data)

    training.step(gradients())


def _accumulated(training: _Training, data: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        loss = training.loss(data)
    training.accumulator.add(tape.gradient(loss, [training.weight]))
    training.step(training.scaler.unscale(training.optimizer, training.accumulator), unscales=False)


_SCALED: dict[str, Callable[[_Training, tf.Tensor], None]] = {
    "scaled": _of_scaled(lambda t, data: t.scaler.scale(t.loss(data))),
    "a sum": _of_scaled(lambda t, data: tf.add_n(t.scaler.scale([t.loss(data), t.loss(2.0)])), unscales=False),
    "by hand": _of_scaled(lambda t, data: t.loss(data) * t.scaler.loss_scale),
    "in a conditional": _of_scaled(
        lambda t, data: tf.cond(data > 0, lambda: t.scaler.scale(t.loss(data)), lambda: t.scaler.scale(data))
    ),
    "differentiated in another function": _differentiated_in_another_function,
    "accumulated": _accumulated,
}


@IN_BOTH_WAYS
@pytest.mark.parametrize("name", _SCALED)
def test_scaled_loss_gives_no_warning(name: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    training = _Training()
    WAYS[way](lambda data: _SCALED[name](training, data))(tf.constant(3.0))
    assert _messages(caplog) == []
    assert int(training.scaler.attempted_steps) == 1


@IN_BOTH_WAYS
def test_disabled_scaler_gives_no_warning(way: str, caplog: pytest.LogCaptureFixture) -> None:
    training = _Training(enabled=False)
    WAYS[way](lambda data: _of_scaled(lambda t, data: t.loss(data))(training, data))(tf.constant(3.0))
    assert _messages(caplog) == []


def _popped() -> tf.Tensor:
    return tf.raw_ops.StackPopV2(handle=tf.raw_ops.StackV2(max_size=1, elem_type=tf.float32), elem_type=tf.float32)


def _gradient(through: Callable[[tf.Tensor], tf.Tensor] = tf.identity) -> tf.Tensor:
    """Differentiate a loss of the size of a placeholder, and pass the gradient through a function."""
    weight = tf.compat.v1.placeholder(tf.float32, [None])
    return through(tf.gradients(weight * weight, weight)[0])


def _unconnected() -> tf.Tensor:
    weight = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(weight)
    return tape.gradient(tf.constant(2.0), weight, unconnected_gradients="zero")


#: What makes gradients, and whether there is a warning.
_MAKERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "constant": (lambda: tf.constant(1.0), True),
    "zeros of a tape": (_unconnected, True),
    "placeholder": (lambda: tf.compat.v1.placeholder(tf.float32, []) * 2.0, False),
    "variable": (lambda: tf.compat.v1.get_variable("w", [], use_resource=True) * 2.0, False),
    "reference variable": (lambda: tf.compat.v1.get_variable("w", [], use_resource=False) * 2.0, False),
    "Python": (lambda: tf.numpy_function(lambda: np.float32(1), [], tf.float32), False),
    "eager Python": (lambda: tf.py_function(lambda: 1.0, [], tf.float32), False),
    "function": (tf.function(lambda: tf.constant(1.0)), True),
    "stack": (_popped, False),
    "gradient": (_gradient, True),
    "gradient with a stack": (lambda: _gradient(lambda grad: grad * _popped()), True),
    "rows of a gradient": (lambda: tf.IndexedSlices(_gradient(), tf.constant([0]), tf.constant([9])), True),
    "clipped gradient": (lambda: _gradient(lambda grad: tfmp.clip_by_norm([grad], 1.0)[0]), True),
    "gradient changed in Python": (
        lambda: _gradient(lambda grad: tf.numpy_function(np.negative, [grad], tf.float32)),
        True,
    ),
    "gradient in a function": (lambda: _gradient(tf.function(tf.negative)), True),
    "ones of the user": (lambda: tf.ones(tf.compat.v1.placeholder(tf.int32, [1])), False),
}


@pytest.mark.graph
@pytest.mark.parametrize("maker", _MAKERS)
def test_warning_is_given_if_the_graph_shows_that_no_loss_was_scaled(
    maker: str, session: tf.compat.v1.Session, caplog: pytest.LogCaptureFixture
) -> None:
    make, warns = _MAKERS[maker]
    scaler, grads = tfmp.GradScaler(8), [None, make()]
    for _ in range(2):
        scaler.unscale(sgd(), grads)
    assert [message.split(": ", 1)[1] for message in _messages(caplog)] == [_NEVER] * warns


@pytest.mark.graph
def test_scale_that_was_read_or_is_in_another_graph_gives_no_warning_and_keeps_no_graph_alive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scaler, read = (tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(8)) for _ in range(2))
    with tf.Graph().as_default() as graph:
        scaler.scale(tf.constant(1.0))
        assert read.loss_scale.shape == []
        read.unscale(sgd(), [_gradient()])
    with tf.Graph().as_default():
        scaler.unscale(sgd(), [_gradient()])
    assert _messages(caplog) == []
    kept = weakref.ref(graph)
    del read
    del graph
    gc.collect()
    assert kept() is None


@pytest.mark.graph
def test_loss_is_scaled_under_the_debugger_of_a_graph(session: tf.compat.v1.Session) -> None:
    scaler = tfmp.GradScaler(8)
    tf.debugging.enable_check_numerics()
    try:
        scaled = scaler.scale(tf.constant(2.0))
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(scaled) == 16
    finally:
        tf.debugging.disable_check_numerics()
