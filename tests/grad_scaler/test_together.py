"""Several optimizers as one: the places of their variables, and the gradients that each is given."""

from types import ModuleType

import numpy as np
import pytest
import tensorflow as tf
from kerases import for_every_keras, optimizer, values, variable

from tfmp.bert import AdamWeightDecayOptimizer
from tfmp.core.adapters import OptimizerAdapter
from tfmp.grad_scaler.together import AdaptersTogether
from tfmp.hosts.keras.adapters import KerasAdapter
from tfmp.hosts.keras.compiler import UpdateCompiler
from tfmp.hosts.tf1 import TF1Adapter

pytestmark = pytest.mark.essential

tf1 = tf.compat.v1


def test_variables_stand_in_the_order_of_the_adapters() -> None:
    a, b, scale = tf.Variable(1.0, name="a"), tf.Variable(1.0, name="b", dtype=tf.float16), tf.Variable(1.0, name="c")
    scale.overwrite_with_gradient = True
    together = AdaptersTogether(
        [OptimizerAdapter(None, [a]), TF1Adapter(AdamWeightDecayOptimizer(0.5), [b]), OptimizerAdapter(None, [scale])]
    )
    assert together.names == ["a:0", "b:0", "c:0"]
    assert together.dtypes == [tf.float32, None, tf.float32]
    assert together.overwritten == {2}
    grads = [tf.constant(1.0)] * 3
    assert [grad.dtype for grad in together.typed(grads)] == [tf.float32] * 3


@for_every_keras()
def test_each_optimizer_is_given_its_own_gradients(keras: ModuleType) -> None:
    kernel, bias, weight = variable(keras, 1.0), variable(keras, 2.0, "bias"), tf.Variable(3.0)
    opt = optimizer(keras)
    first = OptimizerAdapter(opt, [kernel, bias])
    first.prepare([kernel, bias])
    second = TF1Adapter(tf1.train.GradientDescentOptimizer(1.0), [weight])
    AdaptersTogether([first, second]).apply([None, tf.constant(1.0), tf.constant(0.5)])
    assert values([kernel, bias, weight]) == [1, 1.5, 2.5]
    assert int(opt.iterations) == 1


@pytest.mark.graph
def test_one_op_applies_the_gradients_of_all(session: tf1.Session) -> None:
    weights = [tf1.Variable(1.0), tf1.Variable(2.0)]
    opts = [tf1.train.GradientDescentOptimizer(rate) for rate in (0.5, 1.0)]
    together = AdaptersTogether([TF1Adapter(opt, [weight]) for opt, weight in zip(opts, weights, strict=True)])
    op = together.apply([tf.constant(1.0), tf.constant(1.0)])
    session.run([weight.initializer for weight in weights])
    session.run(op)
    assert session.run(weights) == [0.5, 1]


@for_every_keras()
@pytest.mark.parametrize("jit_compile", [True, False])
def test_compiled_optimizers_run_their_own_programs_beside_others(keras: ModuleType, jit_compile: bool) -> None:
    opt, kernel, weight = optimizer(keras, global_clipnorm=0.5), variable(keras, [1.0, 2.0]), tf.Variable(3.0)
    of_keras = KerasAdapter(opt, [kernel], compiler=UpdateCompiler(opt, jit_compile))
    of_keras.prepare([kernel])
    together = AdaptersTogether([TF1Adapter(tf1.train.GradientDescentOptimizer(1.0), [weight]), of_keras])
    grads, one = [tf.constant(0.5), tf.constant([3.0, 4.0])], tf.ones([])
    assert together.program(grads) is None
    program = together.compiled_program(grads)
    assert (program is not None) is jit_compile
    if program is None:
        together.apply(grads)
    else:
        measures = program.measure(grads, one)
        assert [float(measure[0]) for measure in measures] == [12.5]
        program.apply(grads, one, measures)
    np.testing.assert_allclose(kernel.numpy(), [1 - 0.15, 2 - 0.2], rtol=1e-6)
    assert float(weight) == 2.5
