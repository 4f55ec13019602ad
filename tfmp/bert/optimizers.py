"""The Adam optimizer with which BERT is trained."""

import re
from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.gradients import arithmetic
from tfmp.types import GradsAndVars

tf1 = tf.compat.v1


class AdamWeightDecayOptimizer(tf.compat.v1.train.Optimizer):
    """Adam without bias correction and with decoupled weight decay, as BERT was trained.

    For each variable `w` with gradient `g`:

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g * g
        w -= learning_rate * (m / (sqrt(v) + epsilon) + weight_decay_rate * w)

    The moments `m` and `v` are the variables `<w>/adam_m` and `<w>/adam_v`, at least in float32. A half-precision
    variable also has a float32 copy, `<w>/shadow`. Each step updates the copy, and then casts it to the variable's type
    and assigns the result to the variable. Save and restore both. If an element of the variable differs from its
    rounded copy, because the variable was assigned or restored alone, the next step continues from the variable for
    this element.

    A sparse gradient is converted to a dense one, so the moments of all rows change, also of rows that the batch does
    not contain.

    After all variables are updated, `apply_gradients` adds one to the global step that is passed to it. A script must
    not assign `global_step + 1` in addition.

    Args:
        learning_rate: A number of at least 0, a floating-point scalar tensor or, in eager code, a variable. In a graph
            its value can be fetched as `learning_rate:0`.
        weight_decay_rate: The fraction of a weight that decays in one step if the learning rate is 1; at least 0.
        beta_1: The fraction of the first moment that each step keeps; at least 0, below 1.
        beta_2: The fraction of the second moment that each step keeps; at least 0, below 1.
        epsilon: Added to the square root of the second moment, in the unit of the gradients; above 0.
        exclude_from_weight_decay: Regular expressions. A variable does not decay if one of them matches anywhere in its
            name.
        name: The name of the optimizer.

    Attributes:
        learning_rate: The learning rate of the constructor, as a tensor in a graph. All other settings but `name` are
            attributes too.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range.

    Examples:
        >>> w = tf.Variable([1.0, -2.0])
        >>> optimizer = AdamWeightDecayOptimizer(0.125, weight_decay_rate=0.5)
        >>> optimizer.apply_gradients([(tf.zeros(2), w)])
        >>> w.numpy().tolist()
        [0.9375, -1.875]

    Source: google-research/bert; "Decoupled Weight Decay Regularization" (https://arxiv.org/abs/1711.05101).
    """

    #: Tells `tfmp.LossScaleOptimizer` to pass the gradients of half-precision variables in float32.
    takes_float32_gradients = True

    def __init__(
        self,
        learning_rate: float | tf.Tensor,
        weight_decay_rate: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Iterable[str] | None = None,
        name: str = "AdamWeightDecayOptimizer",
    ) -> None:
        super().__init__(use_locking=False, name=name)
        # In eager code the learning rate may be a variable, which each step must read anew; a tensor would be constant.
        rate = _checked_rate(learning_rate)
        self.learning_rate = rate if tf.executing_eagerly() else tf.identity(rate, name="learning_rate")
        self.weight_decay_rate = settings.at_least_0("weight_decay_rate", weight_decay_rate)
        self.beta_1 = settings.below_1("beta_1", beta_1)
        self.beta_2 = settings.below_1("beta_2", beta_2)
        settings.positive("epsilon", epsilon)
        self.epsilon = epsilon
        excluded = exclude_from_weight_decay
        if excluded is not None:
            # A list, because an iterator could be read for the first variable only.
            excluded = lists.names("exclude_from_weight_decay", excluded, "regular expressions")
        self.exclude_from_weight_decay = excluded

    def decays(self, variable: tf.Variable) -> bool:
        """Return True if weight decay applies to a variable.

        Args:
            variable: The variable, whose name decides.

        Examples:
            >>> optimizer = AdamWeightDecayOptimizer(0.1, 0.01, exclude_from_weight_decay=["LayerNorm", "bias"])
            >>> optimizer.decays(tf.Variable(1.0, name="kernel")), optimizer.decays(tf.Variable(1.0, name="bias"))
            (True, False)
        """
        name = variable.name.partition(":")[0]
        return self.weight_decay_rate > 0 and not any(
            re.search(pattern, name) for pattern in self.exclude_from_weight_decay or ()
        )

    def apply_gradients(
        self,
        grads_and_vars: GradsAndVars,
        global_step: tf.Variable | None = None,
        name: str | None = None,
        manual_fp16: bool = False,
    ) -> tf.Operation:
        """Apply the gradients, then add one to the global step.

        Args:
            grads_and_vars: Pairs of a gradient and its variable, of the same shape. A variable whose gradient is None
                is not updated.
            global_step: The number of steps applied so far, an integer variable; None to count no steps.
            name: A name for the returned op.
            manual_fp16: Accepted for compatibility with the published optimizers, and without effect: the type of a
                variable decides whether it needs a float32 copy.

        Returns:
            The op that applies the gradients; None in eager mode.

        Raises:
            TypeError: `grads_and_vars` does not consist of such pairs.
            ValueError: All gradients are None.

        Examples:
            >>> w, global_step = tf.Variable([1.0, -2.0]), tf.Variable(0, dtype=tf.int64)
            >>> optimizer = AdamWeightDecayOptimizer(0.125, weight_decay_rate=0.5)
            >>> optimizer.apply_gradients([(tf.zeros(2), w)], global_step, manual_fp16=True)
            >>> w.numpy().tolist(), int(global_step)
            ([0.9375, -1.875], 1)
        """
        settings.flag("manual_fp16", manual_fp16)
        pairs = lists.pairs(grads_and_vars)
        own = lists.of_tensors(grad for grad, _ in pairs)
        given = [(grad, variable) for grad, (_, variable) in zip(own, pairs, strict=True)]
        return super().apply_gradients(given, global_step=global_step, name=name)

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        for variable in var_list:
            dtype = _wide(variable)
            for slot in ("adam_m", "adam_v"):
                self._get_or_make_slot_with_initializer(
                    variable, tf1.zeros_initializer(), variable.shape, dtype, slot, slot
                )
            if dtype != variable.dtype.base_dtype:
                self._get_or_make_slot(variable, tf.cast(_initial_value(variable), dtype), "shadow", "shadow")

    def _apply_dense(self, grad: tf.Tensor, var: tf.Variable) -> tf.Operation:
        first, second, shadow = (self.get_slot(var, slot) for slot in ("adam_m", "adam_v", "shadow"))
        weights = var if shadow is None else _kept(shadow, var)
        grad = tf.cast(grad, _wide(var))
        new_first = self.beta_1 * first + (1 - self.beta_1) * grad
        new_second = self.beta_2 * second + (1 - self.beta_2) * tf.square(grad)
        update = self._direction(new_first, new_second)
        if self.decays(var):
            update += self.weight_decay_rate * weights
        step = tf.cast(self.learning_rate, update.dtype) * self._scaled(update, weights)
        moments = [first.assign(new_first, read_value=False), second.assign(new_second, read_value=False)]
        if shadow is None:
            return tf.group(*moments, var.assign_sub(step, read_value=False))
        new_weights = weights - step
        rounded = tf.cast(new_weights, var.dtype.base_dtype)
        return tf.group(*moments, shadow.assign(new_weights, read_value=False), var.assign(rounded, read_value=False))

    def _direction(self, first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        return first / (tf.sqrt(second) + self.epsilon)

    def _scaled(self, update: tf.Tensor, weights: tf.Variable | tf.Tensor) -> tf.Tensor:
        del weights
        return update

    def _apply_sparse(self, grad: tf.IndexedSlices, var: tf.Variable) -> tf.Operation:
        return self._apply_dense(arithmetic.densify(grad), var)

    def _resource_apply_dense(self, grad: tf.Tensor, handle: tf.Variable) -> tf.Operation:
        return self._apply_dense(grad, handle)

    def _resource_apply_sparse(self, grad: tf.Tensor, handle: tf.Variable, indices: tf.Tensor) -> tf.Operation:
        return self._apply_sparse(tf.IndexedSlices(grad, indices, handle.shape), handle)


def _checked_rate(value: float | tf.Tensor | tf.Variable) -> float | tf.Tensor | tf.Variable:
    """Return the learning rate after checks. The value of a tensor is not known yet, so only its type is checked."""
    if not tf.is_tensor(value):
        return settings.at_least_0("learning_rate", value)
    tensor: tf.Tensor = value
    if not tensor.dtype.is_floating:
        raise TypeError(f"learning_rate must be of a floating-point type, got {tensor.dtype.base_dtype.name}.")
    if not tensor.shape.is_compatible_with([]):
        raise ValueError(f"learning_rate must be a scalar, got the shape {tensor.shape}.")
    return tensor


def _wide(variable: tf.Variable) -> tf.DType:
    dtype = variable.dtype.base_dtype
    return tf.float32 if dtype.size < 4 else dtype


def _kept(shadow: tf.Variable, variable: tf.Variable) -> tf.Tensor:
    """Return the float32 weights: the copy, except for elements of the variable that were assigned from outside."""
    return tf.where(
        tf.equal(tf.cast(shadow, variable.dtype.base_dtype), variable), shadow, tf.cast(variable, shadow.dtype)
    )


def _initial_value(variable: tf.Variable) -> tf.Tensor:
    """Return the value of a variable, or its initial value if it is not initialized yet."""
    if tf.executing_eagerly():
        return variable.read_value()
    initialized = tf1.is_variable_initialized(variable)
    return tf.cond(initialized, variable.read_value, lambda: variable.initial_value, name="initialized")
