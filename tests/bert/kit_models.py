"""A small model for the tests of the kit."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmp import bert

tf1 = tf.compat.v1

START = {
    "bert/kernel": np.float32([[1.0, -2.0], [0.5, 4.0]]),
    "bert/bias": np.float32([0.25, -1.0]),
    "bert/embeddings": np.float32([[1.0], [2.0], [3.0]]),
}


class Model:
    """A model with four weights: a kernel, a bias, a table with a sparse gradient, and a weight without a gradient.

    The gradients of the other weights are the values that are fed. Settings are those of `build`.
    """

    def __init__(self, build: Callable[..., Any] = bert.build_training, **settings: Any) -> None:
        self.grads = {name: tf1.placeholder(tf.float32, np.shape(value)) for name, value in START.items()}
        self.variables = {name: tf1.get_variable(name, initializer=value) for name, value in START.items()}
        tf1.get_variable("bert/unused", initializer=1.0)
        rows = tf.gather(self.variables["bert/embeddings"], [0, 1, 2])
        values = {**self.variables, "bert/embeddings": rows}
        loss = tf.add_n([tf.reduce_sum(values[name] * grad) for name, grad in self.grads.items()])
        self.training = build(loss, **{"init_lr": 0.125, "num_train_steps": 100, **settings})

    def run(self, session: tf1.Session, grads: Sequence[np.ndarray], *names: str) -> list[Any]:
        """Run the training op on gradients, and return the values of the named tensors, fetched in the same run."""
        fed = dict(zip(self.grads.values(), grads, strict=True))
        train_op = getattr(self.training, "train_op", self.training)
        return [value.item() for value in session.run([train_op, *names], fed)[1:]]


def random_grads(count: int, size: float = 1.0, seed: int = 0) -> list[list[np.ndarray]]:
    """Return gradients for a number of runs; they are powers of two or 0, so that their sums are exact."""
    rng = np.random.default_rng(seed)
    choices = size * np.float32([-2.0, -1.0, -0.5, 0.0, 0.25, 1.0, 4.0])
    return [[rng.choice(choices, np.shape(value)) for value in START.values()] for _ in range(count)]


def overflowing(grads: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the gradients with infinities in the second one."""
    return [grads[0], np.full_like(grads[1], np.inf), *grads[2:]]


def reads() -> dict[str, tf.Tensor]:
    """Return tensors that read the variables of the graph, by name."""
    return {variable.op.name: variable.read_value() for variable in tf1.global_variables()}


def state(session: tf1.Session) -> dict[str, Any]:
    """Return the values of the variables of the graph, by name."""
    return session.run(reads())
