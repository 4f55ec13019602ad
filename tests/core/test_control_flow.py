import pytest
import tensorflow as tf
from gradient_forms import MODES

from tfmp.core import tracing
from tfmp.core.control_flow import conditional_update
from tfmp.types import Gradients

_MODES = MODES | {"xla for accelerators": MODES["xla"]}


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("has_other", [False, True])
def test_one_of_two_functions_is_called_or_one_or_none(
    mode: str, has_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode.endswith("accelerators"):
        monkeypatch.setattr(tracing, "has_accelerator", lambda: True)
    weight, other = tf.Variable([1.0, 2.0]), tf.Variable(0.0)

    def if_true(grads: Gradients) -> tf.Operation:
        assert grads[1] is None
        return tf.group(weight.assign_add(grads[0]))

    def if_false(grads: Gradients) -> tf.Operation:
        return tf.group(other.assign_add(grads[0][1]))

    def step(flag: tf.Tensor, grad: tf.Tensor) -> None:
        conditional_update(flag, [grad, None], if_true, if_false if has_other else None)

    step = _MODES[mode](step)
    seen = []
    for flag in (False, True, False):
        step(tf.constant(flag), tf.constant([0.5, 0.25]))
        seen.append((weight.numpy().tolist(), float(other)))
    added = 0.25 if has_other else 0
    assert seen == [([1, 2], added), ([1.5, 2.25], added), ([1.5, 2.25], 2 * added)]


@pytest.mark.parametrize(("accelerated", "loops", "conditionals"), [(False, 2, 0), (True, 0, 1)])
def test_xla_gets_loops_for_cpus_and_a_conditional_for_accelerators(
    accelerated: bool, loops: int, conditionals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "has_accelerator", lambda: accelerated)
    weight = tf.Variable(0.0)

    @tf.function(jit_compile=True)
    def step(flag: tf.Tensor) -> None:
        conditional_update(flag, [], lambda _: weight.assign_add(1.0), lambda _: weight.assign_sub(1.0))

    kinds = [
        op.type.removeprefix("Stateless") for op in step.get_concrete_function(tf.constant(True)).graph.get_operations()
    ]
    assert (kinds.count("While"), kinds.count("If")) == (loops, conditionals)


@pytest.mark.graph
def test_op_of_a_graph_calls_one_function_at_each_run(session: tf.compat.v1.Session) -> None:
    flag, total = tf.compat.v1.placeholder(tf.bool, []), tf.compat.v1.get_variable("total", initializer=0.0)
    one, other = (
        conditional_update(flag, [tf.constant(2.0)], lambda grads: total.assign_add(grads[0]), otherwise)
        for otherwise in (None, lambda grads: total.assign_sub(10 * grads[0]))
    )
    session.run(tf.compat.v1.global_variables_initializer())
    seen = []
    for op, fed in [(one, True), (one, False), (other, True), (other, False)]:
        session.run(op, {flag: fed})
        seen.append(float(session.run(total)))
    assert seen == [2, 2, 4, -16]


def test_sparse_gradient_reaches_the_function_as_one_where_xla_compiles() -> None:
    table = tf.Variable(tf.zeros([3, 1]))

    @tf.function(jit_compile=True)
    def step(flag: tf.Tensor, rows: tf.Tensor) -> None:
        slices = tf.IndexedSlices(rows, tf.constant([2, 2]), tf.constant([3, 1]))
        conditional_update(flag, [slices], lambda grads: table.scatter_add(grads[0]))

    for flag in (True, False):
        step(tf.constant(flag), tf.constant([[1.0], [2.0]]))
        assert table.numpy().tolist() == [[0], [0], [3]]
