"""Takes a step on one of two workers, where each worker has a gradient that the other lacks, and prints the errors.

PYTHONPATH=. TF_CONFIG=... python tests/optimizers/uneven_training.py keras tf_keras/legacy v1
"""

import importlib
import sys
from typing import Any

import tensorflow as tf

import tfmp


def _optimizer_and_variables(host: str) -> tuple[tfmp.LossScaleOptimizer, list[Any]]:
    names = ("first", "second")
    if host == "v1":
        inner = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        return tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(8)), [tf.Variable(1.0, name=n) for n in names]
    package, _, kind = host.partition("/")
    keras = importlib.import_module(package)
    if kind == "legacy":
        inner = keras.optimizers.legacy.SGD(0.5)
        return tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(8)), [tf.Variable(1.0, name=n) for n in names]
    opt = tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), tfmp.FixedLossScaleManager(8))
    variables = [getattr(keras, "Variable", tf.Variable)(1.0, name=name) for name in names]
    opt.build(variables)
    return opt, variables


def _take_step(strategy: tf.distribute.Strategy, host: str) -> None:
    rank = strategy.cluster_resolver.task_id
    with strategy.scope():
        opt, variables = _optimizer_and_variables(host)

    def step() -> None:
        grads = [tf.constant(16.0) if index == rank else None for index in range(2)]
        opt.apply_gradients(zip(grads, variables, strict=True))

    try:
        tf.function(lambda: strategy.run(step), autograph=False)()
    except tf.errors.InvalidArgumentError as error:
        print(f"REFUSED {host}:", error.message, flush=True)  # noqa: T201 - a command line prints


def main() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for host in sys.argv[1:]:
        _take_step(strategy, host)


if __name__ == "__main__":
    main()
