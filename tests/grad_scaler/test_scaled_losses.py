"""The warnings about gradients whose loss was not scaled, and the cases that must not cause one."""

import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from tfmp.grad_scaler.scaled_losses import ScaledLosses

pytestmark = pytest.mark.essential

_NEVER = (
    "gradients are divided by the loss scale, but scale() was not called before: differentiate what scale() returns, "
    "not the loss itself."
)
_OTHER = (
    "gradients are divided by the loss scale, but they are not the gradients of what scale() returned: differentiate "
    "that, not the loss itself."
)


def _here() -> str:
    """Return the line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"test_scaled_losses.py:{frame.f_back.f_lineno}"


class _Training:
    """A scaler with an optimizer, a weight and an accumulator; `line` is the line that a warning must name."""

    def __init__(self, is_fixed: bool = False, **settings: Any) -> None:
        self.scaler = tfmp.GradScaler(manager=tfmp.FixedLossScaleManager(8) if is_fixed else None, **settings)
        self.optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        self.weight = tf.Variable([1.0, 2.0])
        self.accumulator = tfmp.GradientAccumulator([self.weight], 1)
        self.line = ""

    def loss(self, data: Any = 3.0) -> tf.Tensor:
        return tf.reduce_sum(self.weight * self.weight) * data

    def step(self, grads: Any, unscales: bool = True) -> None:
        if unscales:
            grads = self.scaler.unscale(self.optimizer, grads)
        self.scaler.step(self.optimizer, zip(grads, [self.weight], strict=True))
        self.scaler.update()


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "tfmp"]


def _eagerly(function: Callable[..., None]) -> Callable[..., None]:
    return function


def _in_function(function: Callable[..., None]) -> Callable[..., None]:
    # With AutoGraph the lines would be those of the converted code.
    return tf.function(function, autograph=False)


@pytest.mark.parametrize("mode", [_eagerly, _in_function], ids=["eager", "function"])
@pytest.mark.parametrize("unscales", [True, False])
def test_loss_that_was_never_scaled_gives_one_warning_with_the_line(
    mode: Callable[..., Any], unscales: bool, caplog: pytest.LogCaptureFixture
) -> None:
    training = _Training()

    @mode
    def iterate(data: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = training.loss(data)
        grads, training.line = tape.gradient(loss, [training.weight]), _here()
        if tf.executing_eagerly():
            # In eager code only the line that calls the scaler is known.
            training.line = "test_scaled_losses.py:" + str(_line_of_unscale if unscales else _line_of_step)
        training.step(grads, unscales)

    for _ in range(3):
        iterate(tf.constant(3.0))
    assert _messages(caplog) == [f"{training.line}: {_NEVER}"]


_line_of_unscale = next(
    number
    for number, line in enumerate(inspect.getsource(_Training).splitlines(), inspect.getsourcelines(_Training)[1])
    if "scaler.unscale" in line
)
_line_of_step = _line_of_unscale + 1


@pytest.mark.graph
def test_warning_in_a_tf1_graph_names_the_line_of_the_gradients(caplog: pytest.LogCaptureFixture) -> None:
    for scales, message in ((False, _NEVER), (True, _OTHER)):
        caplog.clear()
        with tf.Graph().as_default():
            scaler, weight = tfmp.GradScaler(), tf.compat.v1.get_variable("w", initializer=[1.0, 2.0])
            loss = tf.reduce_sum(weight * weight)
            if scales:
                scaler.scale(loss)
            grads, line = tf.gradients(loss, [weight]), _here()
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
            for _ in range(2):
                scaler.step(optimizer, zip(grads, [weight], strict=True))
                scaler.update()
        assert _messages(caplog) == [f"{line}: {message}"]


@pytest.mark.parametrize("jit_compile", [None, True])
@pytest.mark.parametrize("is_fixed", [False, True], ids=["exponential", "fixed"])
@pytest.mark.parametrize("clips", [True, False])
def test_differentiating_the_unscaled_loss_next_to_a_scaled_one_gives_a_warning(
    clips: bool, is_fixed: bool, jit_compile: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    training = _Training(is_fixed)

    @tf.function(jit_compile=jit_compile, autograph=False)
    def iterate(data: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = training.loss(data)
            training.scaler.scale(loss)
        grads, training.line = tape.gradient(loss, [training.weight]), _here()
        if clips:
            grads = tfmp.clip_by_norm(grads, 1e6)
        training.step(grads)

    for _ in range(2):
        iterate(tf.constant(3.0))
    assert _messages(caplog) == [f"{training.line}: {_OTHER}"]


def _scaled(training: _Training, data: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        scaled = training.scaler.scale(training.loss(data))
    training.step(tape.gradient(scaled, [training.weight]))


def _scaled_in_half_precision(training: _Training, data: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        scaled = training.scaler.scale(tf.cast(training.loss(data), tf.float16))
    training.step(tape.gradient(scaled, [training.weight]))


def _sum_of_scaled_losses(training: _Training, data: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        parts = training.scaler.scale([training.loss(data), training.loss(2.0)])
        scaled = tf.add_n(parts)
    training.step(tape.gradient(scaled, [training.weight]), unscales=False)


def _penalty(training: _Training, data: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            loss = training.loss(data)
        (grad,) = inner.gradient(loss, [training.weight])
        scaled = training.scaler.scale(loss + tf.reduce_sum(grad * grad))
    training.step(tape.gradient(scaled, [training.weight]))


def _by_hand(training: _Training, data: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        scaled = training.loss(data) * training.scaler.loss_scale
    training.step(tape.gradient(scaled, [training.weight]))


def _by_hand_beside_another(training: _Training, data: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        loss = training.loss(data)
        training.scaler.scale(loss)
        scaled = loss * training.scaler.loss_scale
    training.step(tape.gradient(scaled, [training.weight]))


def _scaled_gradient_of_the_output(training: _Training, data: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        output = training.weight * data
    of_output = training.scaler.scale(tf.ones_like(output))
    training.step([tape.gradient(output, training.weight, output_gradients=of_output)])


def _differentiated_in_another_function(training: _Training, data: tf.Tensor) -> None:
    @tf.function
    def gradients() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            scaled = training.scaler.scale(training.loss(data))
        return tape.gradient(scaled, [training.weight])

    training.step(gradients())


def _scaled_in_another_function(training: _Training, data: tf.Tensor) -> None:
    training.scaler.scale(tf.constant(1.0))
    scaled_loss = tf.function(lambda: training.scaler.scale(training.loss(data)))
    with tf.GradientTape() as tape:
        scaled = scaled_loss()
    training.step(tape.gradient(scaled, [training.weight]))


def _scaled_in_a_conditional(training: _Training, data: tf.Tensor) -> None:
    training.scaler.scale(tf.constant(1.0))
    with tf.GradientTape() as tape:
        scaled = tf.cond(
            data > 0, lambda: training.scaler.scale(training.loss(data)), lambda: training.scaler.scale(data)
        )
    training.step(tape.gradient(scaled, [training.weight]))


def _scaled_in_a_loop(training: _Training, data: tf.Tensor) -> None:
    training.scaler.scale(tf.constant(1.0))
    with tf.GradientTape() as tape:
        _, scaled = tf.while_loop(
            lambda count, _: count < 2,
            lambda count, total: (count + 1, total + training.scaler.scale(training.loss(data))),
            [tf.constant(0), tf.constant(0.0)],
        )
    training.step(tape.gradient(scaled, [training.weight]))


def _stepped_in_a_conditional(training: _Training, data: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        scaled = training.scaler.scale(training.loss(data))
    grads = tape.gradient(scaled, [training.weight])
    tf.cond(data > 0, lambda: training.step(grads) or 1, lambda: 0)


def _accumulated(training: _Training, data: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        loss = training.loss(data)
    training.accumulator.add(tape.gradient(loss, [training.weight]))
    training.step(training.scaler.unscale(training.optimizer, training.accumulator), unscales=False)


@pytest.mark.parametrize("mode", [_eagerly, tf.function], ids=["eager", "function"])
@pytest.mark.parametrize("is_fixed", [False, True], ids=["exponential", "fixed"])
@pytest.mark.parametrize(
    "iterate",
    [
        _scaled,
        _scaled_in_half_precision,
        _sum_of_scaled_losses,
        _penalty,
        _by_hand,
        _by_hand_beside_another,
        _scaled_gradient_of_the_output,
        _differentiated_in_another_function,
        _scaled_in_another_function,
        _scaled_in_a_conditional,
        _scaled_in_a_loop,
        _stepped_in_a_conditional,
        _accumulated,
    ],
)
def test_scaled_loss_gives_no_warning(
    iterate: Callable[..., None], is_fixed: bool, mode: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    training = _Training(is_fixed)
    mode(iterate)(training, tf.constant(3.0))
    assert _messages(caplog) == []
    assert int(training.scaler.attempted_steps) == 1


def test_gradients_passed_to_a_function_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    training = _Training()
    step = tf.function(lambda grad: training.step([grad * 1.0]))
    # The function is traced before any loss is scaled.
    step = step.get_concrete_function(tf.TensorSpec([2]))
    with tf.GradientTape() as tape:
        scaled = training.scaler.scale(training.loss())
    step(tape.gradient(scaled, training.weight))
    assert _messages(caplog) == []


@pytest.mark.parametrize("mode", [_eagerly, tf.function], ids=["eager", "function"])
def test_disabled_scaler_gives_no_warning(mode: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    training = _Training(enabled=False)

    def iterate() -> None:
        with tf.GradientTape() as tape:
            loss = training.loss()
        training.step(tape.gradient(loss, [training.weight]))

    mode(iterate)()
    assert _messages(caplog) == []


def test_scaled_losses_on_replicas_give_no_warning(
    two_replicas: tf.distribute.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    with two_replicas.scope():
        training = _Training()

    @tf.function
    def iterate() -> None:
        def take_step() -> None:
            with tf.GradientTape() as tape:
                scaled = training.scaler.scale(training.loss())
            grads = training.scaler.unscale(training.optimizer, tape.gradient(scaled, [training.weight]))
            training.scaler.step(training.optimizer, zip(grads, [training.weight], strict=True))

        two_replicas.run(take_step)
        training.scaler.update()

    iterate()
    assert _messages(caplog) == []


def _through_tensor_array(value: tf.Tensor) -> tf.Tensor:
    handle, flow = tf.raw_ops.TensorArrayV3(size=1, dtype=tf.float32)
    flow = tf.raw_ops.TensorArrayWriteV3(handle=handle, index=0, value=value, flow_in=flow)
    return tf.raw_ops.TensorArrayReadV3(handle=handle, index=0, flow_in=flow, dtype=tf.float32)


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


#: What makes gradients, and whether there is a warning if no loss was scaled, and if another was.
_MAKERS: dict[str, tuple[Callable[[], Any], bool, bool]] = {
    "constant": (lambda: tf.constant(1.0), True, False),
    "zeros of a tape": (_unconnected, True, False),
    "placeholder": (lambda: tf.compat.v1.placeholder(tf.float32, []) * 2.0, False, False),
    "variable": (lambda: tf.compat.v1.get_variable("w", [], use_resource=True) * 2.0, False, False),
    "reference variable": (lambda: tf.compat.v1.get_variable("w", [], use_resource=False) * 2.0, False, False),
    "Python": (lambda: tf.numpy_function(lambda: np.float32(1), [], tf.float32), False, False),
    "eager Python": (lambda: tf.py_function(lambda: 1.0, [], tf.float32), False, False),
    "function": (tf.function(lambda: tf.constant(1.0)), True, False),
    "stack": (_popped, False, False),
    "gradient": (_gradient, True, True),
    "gradient with a stack": (lambda: _gradient(lambda grad: grad * _popped()), True, False),
    "rows of a gradient": (lambda: tf.IndexedSlices(_gradient(), tf.constant([0]), tf.constant([9])), True, True),
    "clipped gradient": (lambda: _gradient(lambda grad: tfmp.clip_by_norm([grad], 1.0)[0]), True, True),
    "gradient changed in Python": (
        lambda: _gradient(lambda grad: tf.numpy_function(np.negative, [grad], tf.float32)),
        True,
        False,
    ),
    "gradient in a tensor array": (lambda: _gradient(_through_tensor_array), True, False),
    "gradient in a function": (lambda: _gradient(tf.function(tf.negative)), True, False),
    "ones of the user": (lambda: tf.ones(tf.compat.v1.placeholder(tf.int32, [1])), False, False),
}


@pytest.mark.graph
@pytest.mark.parametrize("scales", [False, True], ids=["never scaled", "another scaled"])
@pytest.mark.parametrize("maker", _MAKERS)
def test_warning_is_given_only_for_what_the_graph_shows(
    maker: str, scales: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make, warns_if_never, warns_if_another = _MAKERS[maker]
    losses = ScaledLosses()
    with tf.Graph().as_default():
        if scales:
            losses.note(tf.constant(1.0) * tf.constant(8.0))
        grads = [None, make()]
        for _ in range(2):
            losses.warn_if_not_scaled(grads)
    expected = [_OTHER] * warns_if_another if scales else [_NEVER] * warns_if_never
    assert [message.split(": ", 1)[1] for message in _messages(caplog)] == expected


@pytest.mark.graph
def test_scale_that_was_read_or_is_in_another_graph_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    read, elsewhere = ScaledLosses(), ScaledLosses()
    with tf.Graph().as_default():
        read.note(tf.constant(1.0) * tf.constant(8.0))
        read.note_read()
        read.warn_if_not_scaled([_gradient()])
        elsewhere.note(tf.constant(1.0) * tf.constant(8.0))
    with tf.Graph().as_default():
        elsewhere.warn_if_not_scaled([_gradient()])
    assert _messages(caplog) == []


def test_scaled_loss_does_not_keep_its_graph_alive() -> None:
    losses = ScaledLosses()
    with tf.Graph().as_default() as graph:
        losses.note(tf.constant(1.0) * tf.constant(8.0))
    kept = weakref.ref(graph)
    del graph
    gc.collect()
    assert kept() is None


def test_loss_is_scaled_under_the_debugger_of_a_graph() -> None:
    scaler = tfmp.GradScaler(8)
    tf.debugging.enable_check_numerics()
    try:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            scaled = scaler.scale(tf.constant(2.0))
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run(scaled) == 16
    finally:
        tf.debugging.disable_check_numerics()
