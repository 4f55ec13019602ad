"""Recomputed functions have the results and gradients of the plain ones, in each way in which TensorFlow runs them."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from gradient_forms import MODES
from keras_models import Wrap, plain
from kit.keras_hosts import of_tensorflow

import tfmp

tf1 = tf.compat.v1


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


_X = _normal(3, 4)


class Sources(NamedTuple):
    """What gradients may flow to, besides the input."""

    w: Any
    table: Any
    fixed: Any
    captured: tf.Tensor


def _sources(make: Callable[..., tf.Variable]) -> Sources:
    table, fixed = make("table", _normal(5, 4)), make("fixed", np.float32(2.0), trainable=False)
    return Sources(make("w", _normal(4, 4)), table, fixed, tf.constant(_normal(4) + 1))


def everything(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    """Uses all that a gradient may flow to, and takes and returns nests, integers, options and None."""

    def block(x: tf.Tensor, ids: tf.Tensor, flag: bool, *, scale: float | None = None) -> dict[str, Any]:
        assert flag is True
        y = tf.tanh(x @ s.w) * s.captured * s.fixed * (scale or 1.0)
        return {"y": y + tf.gather(s.table, ids), "next": ids + 1, "others": (y * 2, None, "name")}

    results = wrap(block)(x, tf.constant([1, 1, 3]), True, scale=0.5)
    assert results["others"][1:] == (None, "name")
    return results["y"] ** 2, results["others"][0], tf.cast(results["next"], tf.float32)


def nested(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    inner = wrap(lambda x: tf.tanh(x @ s.w))
    outer = wrap(lambda x: inner(tf.exp(inner(x))))
    return outer(outer(x))


def one_weight_in_two_calls(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    """In a graph of TF1, the weight got the gradient through the second call's input twice."""
    block = wrap(lambda x: tf.tanh(x @ s.w))
    return block(block(x))


def captured_beside_its_source(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    square = tf.square(s.w)
    return wrap(lambda x: tf.tanh(x @ (s.w + square)))(x)


def captured_in_a_conditional(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    captured = tf.exp(x) @ s.w
    return tf.cond(x[0, 0] > -9, lambda: wrap(lambda x: tf.tanh(x * captured))(x), lambda: x)


def control_flow_inside(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    def block(x: tf.Tensor) -> tf.Tensor:
        x = tf.cond(x[0, 0] > 0, lambda: x @ s.w, lambda: tf.exp(x) @ s.w)
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(x @ s.w)), (0, x), maximum_iterations=3)[
            1
        ]

    return wrap(block)(x)


def in_a_loop(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    block = wrap(lambda x: tf.tanh(x @ s.w))
    return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, block(x)), (0, x), maximum_iterations=3)[1]


def sparse_gradients_of_results(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    return tf.gather(wrap(tf.tanh)(x), [0, 0, 2])


def argument_without_influence(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    return wrap(lambda x, unused: x**3)(x, s.captured)


def result_without_influence(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    return wrap(lambda x: tf.constant(1.0))(x)


def conditional_of_autograph(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    def block(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            x = x**2
        return x

    return wrap(block)(x), wrap(block)(-x)


def penalty_of_the_input(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    def block(x: tf.Tensor) -> tf.Tensor:
        if not (tf.executing_eagerly() or tf.inside_function()):
            return tf.reduce_sum(tf.gradients(tf.tanh(x @ s.w), x)[0] ** 2)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.tanh(x @ s.w))
        return tf.reduce_sum(tape.gradient(y, x) ** 2)

    return wrap(block)(x)


def penalty_of_the_variable(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    def block(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(persistent=True) as tape:
            y = tf.tanh(x @ s.w)
            z = tf.reduce_sum(y**2)
        return tf.reduce_sum(tape.gradient(z, s.w) ** 2) + tf.reduce_sum(tape.gradient(y, s.w))

    return wrap(block)(x)


def forward_mode(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    def block(x: tf.Tensor) -> tf.Tensor:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
            y = tf.tanh(x @ s.w)
        return tf.reduce_sum(y * accumulator.jvp(y))

    return wrap(block)(x)


def _dense(x: tf.Tensor) -> tf.Tensor:
    with tf1.variable_scope(None, default_name="dense"):
        kernel = tf1.get_variable("kernel", [4, 4], initializer=tf1.glorot_uniform_initializer(seed=1))
        bias = tf1.get_variable("bias", [4], initializer=tf1.ones_initializer())
    return tf.tanh(x @ kernel + bias)


def variables_of_its_own_in_two_calls(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    block = wrap(_dense)
    with tf1.variable_scope("net"):
        y = block(block(x))
    names = [f"net/{layer}/{name}" for layer in ("dense", "dense_1") for name in ("kernel", "bias")]
    assert [v.op.name for v in tf1.trainable_variables()[2:]] == names
    return y


def variables_of_nested_functions(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    inner = wrap(_dense)
    return tf.gather(wrap(lambda x: inner(_dense(inner(x))))(x), [0, 0, 2])


def variables_stored_in_float32(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    def block(x: tf.Tensor) -> tf.Tensor:
        with tf1.variable_scope("half", dtype=tf.float16, custom_getter=tfmp.float32_variable_storage_getter):
            w = tf1.get_variable("w", [4], initializer=tf1.ones_initializer())
        assert w.dtype == tf.float16
        return tf.cast(tf.cast(x, tf.float16) * w, tf.float32)

    y = wrap(block)(x)
    assert tf1.trainable_variables()[-1].dtype.base_dtype == tf.float32
    return y


def collections_are_added_to(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    def block(x: tf.Tensor) -> tf.Tensor:
        w = tf1.get_variable("own", initializer=tf.ones([4]), regularizer=tf.nn.l2_loss)
        moving = tf1.get_variable("moving", [], trainable=False)
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, tf1.assign(moving, tf.reduce_mean(x)))
        tf1.losses.add_loss(tf.reduce_sum(x))
        tf1.summary.scalar("mean", tf.reduce_mean(x))
        return x * w

    return wrap(block)(x)


def layers_of_tf1(s: Sources, wrap: Wrap, x: tf.Tensor) -> Any:
    def block(x: tf.Tensor) -> tf.Tensor:
        hidden = tf1.layers.dense(x, 4, tf.nn.relu, kernel_initializer=tf1.glorot_uniform_initializer(seed=1))
        return x + tf1.layers.batch_normalization(hidden, training=True)

    y = wrap(block)(wrap(block)(x))
    assert [v.op.name for v in tf1.trainable_variables()[6:8]] == ["dense_1/kernel", "dense_1/bias"]
    return y


#: TensorFlow has no second derivatives of a custom gradient in a loop or conditional of a graph. The last has no first.
_ONCE_ONLY = (
    *(captured_in_a_conditional, control_flow_inside, in_a_loop, conditional_of_autograph),
    result_without_influence,
)


def _in_tf2(program: Any, wrap: Wrap, compiled: Wrap, within: Wrap = plain) -> list[Any]:
    sources = _sources(lambda name, value, **settings: tf.Variable(value, **settings))

    def results(x: tf.Tensor) -> list[Any]:
        def first_derivatives() -> tuple[list[Any], list[Any]]:
            with tf.GradientTape() as tape:
                tape.watch([x, *sources])
                ys = tf.nest.flatten(within(functools.partial(program, sources, wrap))(x))
            return ys, tape.gradient(ys, [x, *sources])

        if program in _ONCE_ONLY:
            return list(itertools.chain(*first_derivatives()))
        with tf.GradientTape() as outer:
            outer.watch(x)
            ys, grads = first_derivatives()
            norm = tf.reduce_sum(tf.convert_to_tensor(grads[0]) ** 2)
        return [*ys, *grads, outer.gradient(norm, x)]

    return compiled(results)(tf.constant(_X))


@contextlib.contextmanager
def _control_flow_for(program: Any) -> Iterator[None]:
    """In the loops of TF1, gradients have no place for a second run."""
    was_enabled = tf1.control_flow_v2_enabled()
    if program is in_a_loop:
        tf1.enable_control_flow_v2()
    yield
    if not was_enabled:
        tf1.disable_control_flow_v2()


#: What a second run must not add to.
_COLLECTIONS = ("update_ops", "losses", "regularization_losses", "summaries", "variables", "trainable_variables")


def _in_session(program: Any, wrap: Wrap, use_resource: bool) -> list[Any]:
    def make(name: str, value: Any, **settings: Any) -> tf.Variable:
        return tf1.get_variable(name, initializer=value, **settings)

    with tf.Graph().as_default() as graph, tf1.Session() as session, _control_flow_for(program):
        tf1.get_variable_scope().set_use_resource(use_resource)
        sources, x = _sources(make), tf.constant(_X)
        ys = tf.nest.flatten(program(sources, wrap, x))
        sizes = [len(graph.get_collection(key)) for key in _COLLECTIONS]
        # Those that the program has made, too.
        grads = tf.gradients(ys, [x, *sources, *tf1.trainable_variables()[2:]])
        second = [] if program in _ONCE_ONLY else tf.gradients(tf.convert_to_tensor(grads[0]) ** 2, x)
        assert [len(graph.get_collection(key)) for key in _COLLECTIONS] == sizes
        session.run(tf1.global_variables_initializer())
        found = [None if each is None else tf.convert_to_tensor(each) for each in (*ys, *grads, *second)]
        fetched = iter(session.run([each for each in found if each is not None]))
        return [sizes, *(None if each is None else next(fetched) for each in found)]


_TF2: dict[str, Callable[..., list[Any]]] = {
    **{mode: functools.partial(_in_tf2, compiled=compiled) for mode, compiled in MODES.items()},
    # The tape is outside of the function, whose gradients are then computed by a function of their own.
    "outside of function": functools.partial(_in_tf2, compiled=plain, within=tf.function),
}
_TF1: dict[str, Callable[..., list[Any]]] = {
    "graph": functools.partial(_in_session, use_resource=True),
    "graph-references": functools.partial(_in_session, use_resource=False),
}
_IN_EACH_WAY = [
    *(everything, captured_in_a_conditional, sparse_gradients_of_results, argument_without_influence),
    *(penalty_of_the_input, one_weight_in_two_calls, captured_beside_its_source),
]
_WITH_GET_VARIABLE = [
    *(variables_of_its_own_in_two_calls, variables_of_nested_functions, variables_stored_in_float32),
    collections_are_added_to,
]
_CASES = [
    *((program, way) for program in _IN_EACH_WAY for way in (*MODES, *_TF1)),
    (everything, "outside of function"),
    *((control_flow_inside, way) for way in ("eager", "function", *_TF1)),
    *((in_a_loop, way) for way in ("eager", *_TF1)),
    *(
        (program, way)
        for program in (result_without_influence, conditional_of_autograph)
        for way in ("eager", "function")
    ),
    *((program, way) for program in (nested, penalty_of_the_variable, forward_mode) for way in MODES),
    *((program, way) for program in _WITH_GET_VARIABLE for way in _TF1),
    # These layers need Keras 2.15.
    *((layers_of_tf1, way) for way in _TF1 if tf.__version__.startswith("2.15.")),
]


@pytest.mark.filterwarnings("ignore:`tf.layers.:UserWarning")
@pytest.mark.parametrize(
    ("program", "way"),
    [
        pytest.param(program, way, id=f"{program.__name__}-{way}", marks=[pytest.mark.graph] * (way in _TF1))
        for program, way in _CASES
    ],
)
def test_values_and_both_derivatives_are_those_of_the_plain_function(program: Any, way: str) -> None:
    run = (_TF2 | _TF1)[way]
    expected, found = run(program, plain), run(program, tfmp.recompute)
    assert [type(each) for each in found] == [type(each) for each in expected]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is not None:
            arrays = (np.asarray(each if way in _TF1 else tf.convert_to_tensor(each)) for each in (one, other))
            # The first computation rounds as that of eager code does.
            is_exact = way == "eager" and number == 0
            np.testing.assert_allclose(*arrays, rtol=0 if is_exact else 1e-4, atol=0 if is_exact else 1e-5)


@pytest.mark.parametrize("way", [plain, tf.function], ids=["eager", "function"])
def test_replicas_train_the_same_weights(two_replicas: tf.distribute.MirroredStrategy, way: Wrap) -> None:
    def trained(wrap: Wrap) -> np.ndarray:
        with two_replicas.scope():
            w = tf.Variable(_normal(4, 4))
            opt = tf.keras.optimizers.SGD(0.01)
        block = wrap(lambda x: tf.tanh(x @ w))

        def replica_step() -> None:
            offset = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(block(block(_X + offset)) ** 2)
            opt.apply_gradients([(tape.gradient(loss, w), w)])

        step = way(lambda: two_replicas.run(replica_step))
        for _ in range(3):
            step()
        return w.numpy()

    np.testing.assert_allclose(trained(tfmp.recompute), trained(plain), rtol=1e-6)


# What a function captures is found at each call, in eager code too.
@pytest.mark.parametrize("is_nested", [False, True], ids=["itself", "within"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, tf.constant(3.0)),
        (None, tf.Variable(0.5, trainable=False)),
        (tf.Variable(1.0), tf.Variable(2.0)),
        (tf.constant(2.0), tf.constant(3.0)),
    ],
    ids=["first tensor", "first untrained variable", "other variable", "other tensor"],
)
def test_gradient_reaches_what_is_captured_after_the_first_call(before: Any, after: Any, is_nested: bool) -> None:
    captured, x = before, tf.constant([1.0, 2.0])

    def block(x: tf.Tensor) -> tf.Tensor:
        return tf.sin(x) if captured is None else tf.sin(x) * captured

    def gradients(function: Callable[[tf.Tensor], tf.Tensor]) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([x, *(each for each in (before, after) if each is not None)])
            y = function(x)
        found = tape.gradient(y, [x, after, after if before is None else before])
        return [None if each is None else each.numpy().tolist() for each in found]

    inner = tfmp.recompute(block)
    recomputed = tfmp.recompute(lambda x: tf.exp(inner(tf.exp(x)))) if is_nested else inner
    plain = (lambda x: tf.exp(block(tf.exp(x)))) if is_nested else block
    for captured in (before, after, before):  # noqa: B007 - the block uses it
        for found, expected in zip(gradients(recomputed), gradients(plain), strict=True):
            assert found == (None if expected is None else pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize("change", ["is built", "is unfrozen"])
def test_gradient_reaches_a_layer_of_keras_after_it(change: str) -> None:
    layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", trainable=change == "is built")
    used = [] if change == "is built" else [layer]
    recomputed = tfmp.recompute(lambda x: used[0](x) if used else x * 2.0)
    with tf.GradientTape() as tape:
        recomputed(tf.ones([1, 2]))
        used[:] = [layer]
        layer.trainable = True
        y = recomputed(tf.ones([1, 2]))
    assert tape.gradient(y, of_tensorflow(layer.kernel)).numpy().tolist() == [[1.0], [1.0]]


@pytest.mark.graph
def test_custom_getter_of_the_scope_stays(session: tf1.Session) -> None:
    asked = []

    def getter(getter: Callable[..., tf.Variable], name: str, **kwargs: object) -> tf.Variable:
        asked.append(name)
        return getter(name, **kwargs)

    with tf1.variable_scope("net", custom_getter=getter) as scope:
        before = scope.custom_getter
        y = tfmp.recompute(_dense)(tf.constant(_X))
        assert scope.custom_getter is before
    tf.gradients(y, tf1.trainable_variables())
    assert asked == ["net/dense/kernel", "net/dense/bias"]
    assert tf1.get_variable_scope().name == ""
