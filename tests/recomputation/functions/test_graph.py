"""Recomputation in graphs of TF1, by the public function."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tensorflow as tf
from graph_ops import needed_for, read_for

import tfmp

tf1 = tf.compat.v1
pytestmark = pytest.mark.graph

_X = np.random.default_rng(1).normal(size=[3, 4]).astype(np.float32)

Block = Callable[[tf.Tensor], tf.Tensor]


def _dense(x: tf.Tensor, use_resource: bool | None = None) -> tf.Tensor:
    with tf1.variable_scope(None, default_name="dense"):
        kernel = tf1.get_variable(
            "kernel", [4, 4], initializer=tf1.glorot_uniform_initializer(seed=1), use_resource=use_resource
        )
        bias = tf1.get_variable("bias", [4], initializer=tf1.ones_initializer(), use_resource=use_resource)
    return tf.tanh(x @ kernel + bias)


def _numbers(
    build: Callable[[Callable[[Block], Block], tf.Tensor], list[tf.Tensor]], wrap: Callable[[Block], Block]
) -> list[np.ndarray]:
    """Build a graph with what `wrap` makes of its blocks, and compute the tensors that `build` returns."""
    with tf.Graph().as_default(), tf1.Session() as session:
        fetched = [tf.convert_to_tensor(each) for each in build(wrap, tf.constant(_X))]
        session.run(tf1.global_variables_initializer())
        return session.run(fetched)


def _assert_same(build: Callable[[Callable[[Block], Block], tf.Tensor], list[tf.Tensor]], rtol: float = 1e-6) -> None:
    plain, again = _numbers(build, lambda block: block), _numbers(build, tfmp.recompute)
    assert len(plain) == len(again) > 1
    for each, other in zip(plain, again, strict=True):
        np.testing.assert_allclose(other, each, rtol, atol=rtol / 10)


@pytest.mark.parametrize("use_resource", [False, True])
def test_gradients_of_arguments_and_variables_are_those_of_the_plain_function(use_resource: bool) -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        block = wrap(lambda x: _dense(x, use_resource))
        y = block(block(x))
        assert [v.op.name for v in tf1.trainable_variables()] == [
            "dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"
        ]  # fmt: skip
        grads = tf.gradients(tf.reduce_sum(y**2), [x, *tf1.trainable_variables()])
        assert len(tf1.trainable_variables()) == 4
        return [y, *grads]

    _assert_same(build)


@pytest.mark.parametrize("use_resource", [False, True])
def test_variables_that_exist_and_captured_tensors_get_gradients(use_resource: bool) -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        w = tf1.get_variable("w", initializer=tf.ones([4]), use_resource=use_resource)
        fixed = tf1.get_variable("fixed", initializer=2.0, trainable=False, use_resource=use_resource)
        table = tf1.get_variable("table", initializer=tf.ones([5, 4]), use_resource=use_resource)
        captured = tf.exp(x)
        y = wrap(lambda x: x * w * fixed * captured + tf.gather(table, [1, 1, 3]))(x)
        grads = tf.gradients(y**2, [x, w, fixed, captured, table])
        assert isinstance(grads[-1], tf.IndexedSlices)
        return [y, *grads]

    _assert_same(build)


def test_several_results_and_other_arguments_pass_through(session: tf1.Session) -> None:
    def block(x: tf.Tensor, ids: tf.Tensor, flag: bool, *, name: str | None = None) -> dict[str, object]:
        assert flag is True
        return {"x": (x * 2, None, name), "ids": ids + 1, "slices": tf.sparse.from_dense(x)}

    x, ids = tf.constant(_X), tf.constant([1, 2])
    results = tfmp.recompute(block)(x, ids, True, name="a")
    assert results["x"][1:] == (None, "a")
    assert isinstance(results["slices"], tf.SparseTensor)
    grads = tf.gradients([results["x"][0], results["slices"].values], [x, ids])
    assert grads[1] is None
    assert session.run([results["ids"], grads[0]])[1].tolist() == np.full([3, 4], 3.0).tolist()
    assert session.run(results["ids"]).tolist() == [2, 3]


def test_argument_without_influence_has_no_gradient(session: tf1.Session) -> None:
    x, unused = tf.constant(_X), tf.constant(1.0)
    y = tfmp.recompute(lambda x, unused: x * 2)(x, unused)
    assert tf.gradients(y, [x, unused])[1] is None


def test_sparse_gradients_of_results_are_taken() -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        return [x, *tf.gradients(tf.gather(wrap(_dense)(x), [0, 0, 2]), [x, *tf1.trainable_variables()])]

    _assert_same(build)


def test_second_derivatives_are_those_of_the_plain_function() -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        y = wrap(_dense)(x)
        (grad,) = tf.gradients(y, x)
        return [y, *tf.gradients(grad**2, [x, *tf1.trainable_variables()[:1]])]

    _assert_same(build)


def test_recomputed_functions_call_recomputed_functions() -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        inner = wrap(_dense)
        y = wrap(lambda x: inner(_dense(inner(x))))(x)
        return [y, *tf.gradients(y, [x, *tf1.trainable_variables()])]

    _assert_same(build)


def test_conditionals_and_loops_inside_are_recomputed() -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        w = tf1.get_variable("w", initializer=tf.ones([4]))

        def block(x: tf.Tensor) -> tf.Tensor:
            x = tf.cond(x[0, 0] > 0, lambda: x * w, lambda: tf.exp(x) * w)
            return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(x * w)), (0, x))[1]

        y = wrap(block)(x)
        return [y, *tf.gradients(y, [x, w])]

    _assert_same(build)


def test_recomputed_function_works_in_conditionals() -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        w = tf1.get_variable("w", initializer=tf.ones([4]))
        y = tf.cond(x[0, 0] > -9, lambda: wrap(lambda x: tf.exp(x * w))(x), lambda: x)
        return [y, *tf.gradients(y, [x, w])]

    _assert_same(build)


@pytest.fixture
def control_flow_v2() -> Iterator[None]:
    was_enabled = tf1.control_flow_v2_enabled()
    tf1.enable_control_flow_v2()
    yield
    if not was_enabled:
        tf1.disable_control_flow_v2()


@pytest.mark.usefixtures("control_flow_v2")
def test_recomputed_function_works_in_loops() -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        w = tf1.get_variable("w", initializer=tf.ones([4]))
        block = wrap(lambda x: tf.tanh(x * w))
        y = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, block(x)), (0, x))[1]
        return [y, *tf.gradients(y, [x, w])]

    _assert_same(build)


def test_loop_of_tf1_is_refused(session: tf1.Session) -> None:
    was_enabled = tf1.control_flow_v2_enabled()
    tf1.disable_control_flow_v2()
    try:
        with pytest.raises(ValueError, match=r"<lambda> cannot be recomputed in the body of a tf.while_loop of TF1"):
            tf.while_loop(lambda x: x < 3, tfmp.recompute(lambda x: x * 2), [1.0])
    finally:
        if was_enabled:
            tf1.enable_control_flow_v2()


def test_float32_storage_keeps_its_variables() -> None:
    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        def block(x: tf.Tensor) -> tf.Tensor:
            with tf1.variable_scope("half", dtype=tf.float16, custom_getter=tfmp.float32_variable_storage_getter):
                w = tf1.get_variable("w", [4], initializer=tf1.ones_initializer())
            assert w.dtype == tf.float16
            return tf.cast(tf.cast(x, tf.float16) * w, tf.float32)

        y = wrap(block)(x)
        (w,) = tf1.trainable_variables()
        assert w.dtype.base_dtype == tf.float32
        return [y, *tf.gradients(y, [x, w])]

    _assert_same(build)


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


def test_second_run_adds_nothing_to_collections(session: tf1.Session) -> None:
    def block(x: tf.Tensor) -> tf.Tensor:
        w = tf1.get_variable("w", [4], regularizer=tf.nn.l2_loss)
        moving = tf1.get_variable("moving", [], trainable=False)
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, tf1.assign(moving, tf.reduce_mean(x)))
        tf1.losses.add_loss(tf.reduce_sum(x))
        tf1.summary.scalar("mean", tf.reduce_mean(x))
        return x * w

    y = tfmp.recompute(block)(tf.constant(_X))
    keys = ("update_ops", "losses", "regularization_losses", "summaries", "variables", "trainable_variables")
    before = [len(tf1.get_collection(key)) for key in keys]
    assert before == [1, 1, 1, 1, 2, 1]
    tf.gradients(y, tf1.trainable_variables())
    assert [len(tf1.get_collection(key)) for key in keys] == before


def _backward(block: Block) -> tuple[list[tf.Operation], list[tf.Operation]]:
    """Return the ops that a call of a block adds, and those that its gradients add."""
    graph = tf1.get_default_graph()
    x = tf.constant(_X)
    start = len(graph.get_operations())
    y = block(x)
    middle = len(graph.get_operations())
    tf.gradients(y, [x, *tf1.trainable_variables()])
    return graph.get_operations()[start:middle], graph.get_operations()[middle:]


def test_gradients_use_no_activation_of_the_first_run(session: tf1.Session) -> None:
    def computed(block: Block) -> set[str]:
        forward, backward = _backward(block)
        activations = {op.name for op in forward if op.type in {"MatMul", "Add", "AddV2", "Tanh", "BiasAdd"}}
        return activations & {tensor.op.name for op in backward for tensor in op.inputs}

    assert computed(_dense)
    # The zeros that stand for gradients of what no loss uses have the shape of the results.
    assert computed(tfmp.recompute(_dense)) == set()


def test_second_run_waits_for_the_gradients_of_the_results(session: tf1.Session) -> None:
    _, backward = _backward(tfmp.recompute(_dense))
    (product,) = [op for op in backward if op.type == "MatMul" and "grad" not in op.name.split("/")[-1].lower()][:1]
    assert "gradients/grad_ys_0" in {op.name for op in needed_for(product)}


def test_each_gradient_waits_until_the_second_run_has_read_all_variables(session: tf1.Session) -> None:
    """A session would order neither the updates nor the reads."""
    first, second = (tf1.get_variable(name, [], use_resource=True) for name in ("first", "second"))
    y = tfmp.recompute(lambda x: x * first * second)(tf.constant(_X))
    # The gradient of each factor is computed from the other one.
    grads = tf.gradients(y, [first, second])
    assert read_for(grads[0]) == read_for(grads[1])
    assert len(read_for(grads[0])) > 1


def test_function_that_makes_a_variable_each_time_is_refused(session: tf1.Session) -> None:
    x = tf.constant(_X)
    y = tfmp.recompute(lambda x: x * tf1.Variable(2.0))(x)
    with pytest.raises(ValueError, match=r"<lambda> makes variables on its second run"):
        tf.gradients(y, x)


def test_function_that_asks_for_other_variables_is_refused(session: tf1.Session) -> None:
    names = iter("abc")
    x = tf.constant(_X)
    y = tfmp.recompute(lambda x: x * tf1.get_variable(next(names), [4]))(x)
    with pytest.raises(ValueError, match=r"asks for 'b' of shape \(4,\), where it asked for 'a' of shape \(4,\)"):
        tf.gradients(y, x)


def test_dropout_is_refused_by_name(session: tf1.Session) -> None:
    def noisy(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.dropout(x, rate=0.5)

    with pytest.raises(ValueError, match=r"noisy cannot be recomputed: its op 'dropout/.*' \(RandomUniform\) draws"):
        tfmp.recompute(noisy)(tf.constant(_X))


@pytest.mark.parametrize("use_resource", [False, True])
def test_assignment_that_results_wait_for_is_refused(session: tf1.Session, use_resource: bool) -> None:
    count = tf1.get_variable("count", initializer=0.0, use_resource=use_resource)
    with pytest.raises(ValueError, match=r"changes a variable, which would happen twice"):
        tfmp.recompute(lambda x: x * tf1.assign_add(count, 1.0))(tf.constant(_X))


def test_optimizer_trains_the_same_weights() -> None:
    def trained(wrap: Callable[[Block], Block]) -> list[np.ndarray]:
        with tf.Graph().as_default(), tf1.Session() as session:
            y = wrap(_dense)(wrap(_dense)(tf.constant(_X)))
            opt = tfmp.LossScaleOptimizer(tf1.train.AdamOptimizer(0.01), "dynamic")
            train_op = opt.minimize(tf.reduce_mean(y**2))
            session.run(tf1.global_variables_initializer())
            for _ in range(40):
                session.run(train_op)
            return session.run(tf1.trainable_variables())

    for plain, again in zip(trained(lambda block: block), trained(tfmp.recompute), strict=True):
        np.testing.assert_allclose(again, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="tf.compat.v1.layers needs Keras 2.15")
@pytest.mark.filterwarnings("ignore:`tf.layers.:UserWarning")
@pytest.mark.home("tf215")
def test_layers_of_tf1_are_recomputed() -> None:
    def block(x: tf.Tensor) -> tf.Tensor:
        hidden = tf1.layers.dense(x, 4, tf.nn.relu, kernel_initializer=tf1.glorot_uniform_initializer(seed=1))
        return x + tf1.layers.batch_normalization(hidden, training=True)

    def build(wrap: Callable[[Block], Block], x: tf.Tensor) -> list[tf.Tensor]:
        y = wrap(block)(wrap(block)(x))
        weights = tf1.trainable_variables()
        assert [v.op.name for v in weights[4:6]] == ["dense_1/kernel", "dense_1/bias"]
        grads = tf.gradients(tf.reduce_sum(y**2), weights)
        # The mean and the variance of each block.
        assert len(tf1.get_collection("update_ops")) == 4
        return [y, *grads]

    # The variance of a few numbers magnifies what is rounded.
    _assert_same(build, rtol=1e-4)
