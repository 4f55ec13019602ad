"""What the hosts train: variables, and a loss whose gradients are the values that a step is fed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

#: The values that one replica is fed in one step, by name.
Fed: TypeAlias = Mapping[str, Any]

#: The number of elements of a large variable, by the name of its structure.
LARGE = {"million": 10**6, "10 million": 10**7}


class Structure(NamedTuple):
    """Variables, and a loss that is linear in them.

    Attributes:
        initial: The first values of the variables, by name.
        fed: The types and shapes of the values that a step is fed, by name.
        loss: A function from the variables and the fed values to a scalar loss.
        options: The options of the optimizer, with Keras' names.
        sparse: For each variable with a sparse gradient, the names of the fed rows and of their indices.
    """

    initial: Mapping[str, np.ndarray]
    fed: Mapping[str, tf.TensorSpec]
    loss: Callable[[Mapping[str, Any], Mapping[str, tf.Tensor]], tf.Tensor]
    options: Mapping[str, Any]
    sparse: Mapping[str, tuple[str, str]] = {}

    def gradients(self, fed: Fed) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """Return the gradients of the variables that the loss depends on: values, and the indices of their rows."""
        dense = {name: (fed[name], None) for name in self.initial if name in fed}
        return dense | {name: (fed[rows], fed[indices]) for name, (rows, indices) in self.sparse.items()}


def _loss_of_all_forms(variables: Mapping[str, Any], fed: Mapping[str, tf.Tensor]) -> tf.Tensor:
    rows = tf.gather(variables["table"], fed["indices"])
    # The reversal changes nothing in the loss. As in any model, it puts an operation that is no product between scaling
    # and unscaling: otherwise TensorFlow's graph optimizer may cancel the scale.
    kernel, factors = (tf.reverse(each["kernel"], [0]) for each in (variables, fed))
    return tf.reduce_sum(kernel * factors) + tf.reduce_sum(rows * fed["rows"])


def _loss_of_float16(variables: Mapping[str, Any], fed: Mapping[str, tf.Tensor]) -> tf.Tensor:
    half = tf.cast(variables["half"], tf.float32)
    return tf.reduce_sum(half * fed["half"]) + tf.reduce_sum(variables["bias"])


def _loss_of_empty(variables: Mapping[str, Any], fed: Mapping[str, tf.Tensor]) -> tf.Tensor:
    return tf.reduce_sum(variables["empty"] * fed["empty"]) + tf.reduce_sum(variables["bias"] * fed["bias"])


def _loss_of_large(variables: Mapping[str, Any], fed: Mapping[str, tf.Tensor]) -> tf.Tensor:
    ones = tf.ones(variables["large"].shape)
    factors = tf.tensor_scatter_nd_update(ones, fed["position"][:, tf.newaxis], fed["value"])
    return tf.reduce_sum(variables["large"] * factors)


STRUCTURES = {
    "all forms": Structure(
        {
            "kernel": np.float32([1, 2, 0]),
            "table": np.float32([[1, 2], [3, 4], [5, 6], [7, 8]]),
            "unused": np.float32([9]),
        },
        {"kernel": tf.TensorSpec([3]), "rows": tf.TensorSpec([None, 2]), "indices": tf.TensorSpec([None], tf.int32)},
        _loss_of_all_forms,
        {"momentum": 0.5, "use_ema": True, "ema_momentum": 0.5},
        {"table": ("rows", "indices")},
    ),
    "float16": Structure(
        {"half": np.float16([1, 0]), "bias": np.float32([1])}, {"half": tf.TensorSpec([2])}, _loss_of_float16, {}
    ),
    "empty": Structure(
        {"empty": np.zeros([0, 3], np.float32), "bias": np.float32([1])},
        {"empty": tf.TensorSpec([]), "bias": tf.TensorSpec([1])},
        _loss_of_empty,
        # No average of the weights: Keras 3.15 fails to average an empty variable, with or without a wrapper.
        {"momentum": 0.5},
    ),
    **{
        name: Structure(
            {"large": np.ones([size], np.float32)},
            {"position": tf.TensorSpec([1], tf.int32), "value": tf.TensorSpec([1])},
            _loss_of_large,
            {},
        )
        for name, size in LARGE.items()
    },
}
