"""The contenders in graph mode: TensorFlow 1's optimizers, bare and in several wrappers."""

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import cells
from benchmarks.harness.cells import Cell
from benchmarks.harness.contest import Contender

tf1 = tf.compat.v1

_GradsAndVars: TypeAlias = Iterable[tuple[tf.Tensor, tf.Variable]]
_Optimizer: TypeAlias = "tf1.train.Optimizer | ContribsFormula"

#: The kinds of variables. "reference" variables are measured with control flow v1, "resource" variables with v2.
MODES = ("reference", "resource")

#: Functions that make the inner optimizers, by the names in cells. TensorFlow 1 has no AdamW.
OPTIMIZERS: dict[str, Callable[[], tf1.train.Optimizer]] = {
    "SGD": lambda: tf1.train.GradientDescentOptimizer(1e-3),
    "Adam": lambda: tf1.train.AdamOptimizer(1e-3),
}

_INCR_EVERY_N_STEPS = 2000
_DECR_RATIO = 0.5


@contextlib.contextmanager
def kind_of_variables(mode: str) -> Iterator[None]:
    """Inside a `with`, let TensorFlow make variables of the given kind.

    Args:
        mode: One of `MODES`.

    Examples:
        >>> with kind_of_variables("reference"), tf.Graph().as_default():
        ...     tf1.Variable(1.0).dtype
        tf.float32_ref
    """
    before = (tf1.resource_variables_enabled(), tf1.control_flow_v2_enabled())
    _enable(mode == "resource", mode == "resource")
    try:
        yield
    finally:
        _enable(*before)


def _enable(resource_variables: bool, control_flow_v2: bool) -> None:
    (tf1.enable_resource_variables if resource_variables else tf1.disable_resource_variables)()
    (tf1.enable_control_flow_v2 if control_flow_v2 else tf1.disable_control_flow_v2)()


class ContribsFormula:
    """Loss scaling with the same ops as the optimizer and the manager of `tf.contrib.mixed_precision`.

    That package does not exist after TensorFlow 1, so this class was written anew. A step multiplies the gradients by
    the inverse of the scale, checks each gradient, updates the variables in a conditional, and updates the two counters
    in nested conditionals.

    Args:
        opt: The inner optimizer.
    """

    def __init__(self, opt: tf1.train.Optimizer) -> None:
        self._opt = opt
        self._scale = tf1.Variable(cells.SCALE, trainable=False, dtype=tf.float32)
        self._good = tf1.Variable(0, trainable=False)
        self._bad = tf1.Variable(0, trainable=False)

    def compute_gradients(self, loss: tf.Tensor, var_list: list[tf.Variable]) -> _GradsAndVars:
        """Return unscaled gradients with their variables; they are computed from the scaled loss."""
        inverse = 1 / self._scale
        return [(grad * inverse, var) for grad, var in self._opt.compute_gradients(loss * self._scale, var_list)]

    def apply_gradients(self, grads_and_vars: _GradsAndVars) -> tf.Operation:
        """Apply the gradients if they are finite, and update the scale."""
        pairs = list(grads_and_vars)
        finite = tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(grad)) for grad, _ in pairs]))
        applied = tf.cond(finite, lambda: self._opt.apply_gradients(pairs), tf.no_op)
        return tf.group(applied, tf.cond(finite, self._count_good, self._shrink))

    def _count_good(self) -> tf.Operation:
        full = tf.greater_equal(self._good + 1, _INCR_EVERY_N_STEPS)
        return tf.cond(full, self._grow, lambda: tf.group(self._good.assign_add(1)))

    def _grow(self) -> tf.Operation:
        grown = self._scale * 2.0
        grown = tf.cond(tf.math.is_finite(grown), lambda: grown, lambda: tf.identity(self._scale))
        return tf.group(self._scale.assign(grown), self._good.assign(0), self._bad.assign(0))

    def _shrink(self) -> tf.Operation:
        # As in tf.contrib, bad steps are counted up to decr_every_n_nan_or_inf first; here that is 1.
        def shrink() -> tf.Operation:
            shrunk = tf.maximum(1.0, self._scale * _DECR_RATIO)
            return tf.group(self._scale.assign(shrunk), self._good.assign(0), self._bad.assign(0))

        def count_bad() -> tf.Operation:
            return tf.group(self._bad.assign_add(1), self._good.assign(0))

        return tf.cond(tf.greater_equal(self._bad + 1, 1), shrink, count_bad)


@contextlib.contextmanager
def contenders(cell: Cell, names: Container[str] | None = None) -> Iterator[list[Contender]]:
    """Make the contenders of a cell, in a session that lasts for a `with`.

    "copy" and "read" are yardsticks: they copy all gradients, and read all gradients. For the other contenders the
    gradients are stored in variables, and the backward pass multiplies them by the loss scale. The bare optimizer's
    loss is not scaled. Its gradients are finite even in cells where the other contenders skip the step, because it
    cannot skip a step.

    Args:
        cell: The kind of step.
        names: The contenders to make; by default all that can take part.
    """
    with kind_of_variables(cell.mode), tf.Graph().as_default(), tf1.Session() as session:
        arrays = cells.gradients(cell)
        *true_grads, overflowed = _stored([*arrays, cells.overflowed(arrays[-1])], session)
        grads = [*true_grads[:-1], overflowed] if cell.outcome == "skipped" else true_grads
        yardsticks = [] if names is not None else _yardsticks(grads, session)
        made = [*yardsticks, *_optimizers(cell, names, grads, true_grads, session)]
        session.run(tf1.global_variables_initializer())
        yield made


def _yardsticks(grads: list[tf.Variable], session: tf1.Session) -> Iterator[Contender]:
    copies = tf.group(*(tf.raw_ops.DeepCopy(x=grad) for grad in grads))
    yield Contender("copy", session.make_callable(copies))
    yield Contender("read", session.make_callable(tf.add_n([tf.nn.l2_loss(grad) for grad in grads])))


def _optimizers(
    cell: Cell,
    names: Container[str] | None,
    grads: list[tf.Variable],
    true_grads: list[tf.Variable],
    session: tf1.Session,
) -> Iterator[Contender]:
    for name, wrap in _WRAPPERS.items():
        if names is not None and name not in names:
            continue
        weights = [tf1.Variable(tf.zeros(shape)) for shape in cells.SHAPES[cell.shapes]]
        loss = _loss(weights, true_grads if name == "bare" else grads)
        opt = wrap(OPTIMIZERS[cell.optimizer]())
        train_op = _train_op(opt, loss, weights, clipped=cell.clipping == "clipped")
        yield Contender(name, session.make_callable(train_op), functools.partial(session.run, weights))


def _tfmp(opt: tf1.train.Optimizer) -> tfmp.LossScaleOptimizer:
    manager = tfmp.ExponentialUpdateLossScaleManager(
        cells.SCALE, _INCR_EVERY_N_STEPS, decr_every_n_nan_or_inf=1, decr_ratio=_DECR_RATIO
    )
    return tfmp.LossScaleOptimizer(opt, manager)


def _tf_core(opt: tf1.train.Optimizer) -> tf1.train.Optimizer:
    loss_scale = tf1.mixed_precision.DynamicLossScale(cells.SCALE, _INCR_EVERY_N_STEPS)
    return tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(opt, loss_scale)


_WRAPPERS: dict[str, Callable[[tf1.train.Optimizer], _Optimizer]] = {
    "bare": lambda opt: opt,
    "contrib's formula": ContribsFormula,
    "TF core": _tf_core,
    "tfmp": _tfmp,
}


def _stored(arrays: list[np.ndarray], session: tf1.Session) -> list[tf.Variable]:
    """Return variables with the given values. Constants would be too large for a graph."""
    # The variables are in no collection, so that `global_variables_initializer` does not run their initializers.
    stored = [tf1.Variable(tf.zeros(array.shape, array.dtype), trainable=False, collections=[]) for array in arrays]
    fed = [tf1.placeholder(array.dtype, array.shape) for array in arrays]
    # In one run: each run that follows a change of the graph makes the session prepare the graph again.
    assigned = tf.group(*(variable.assign(value) for variable, value in zip(stored, fed, strict=True)))
    session.run(assigned, dict(zip(fed, arrays, strict=True)))
    return stored


def _loss(weights: list[tf.Variable], grads: list[tf.Variable]) -> tf.Tensor:
    """Return a loss with the given gradients, cast to float32, as if the model cast its weights to the gradients' type.

    Args:
        weights: The variables of the loss.
        grads: The gradient for each variable.
    """

    @tf.custom_gradient
    def loss(*weights: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
        del weights

        def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
            return [tf.cast(grad * tf.cast(upstream, grad.dtype.base_dtype), tf.float32) for grad in grads]

        return tf.zeros([]), gradient

    # Multiplied by a variable: TensorFlow would remove a multiplication by a constant 1 where the loss is not scaled.
    return loss(*weights) * tf1.Variable(1.0, trainable=False)


def _train_op(opt: _Optimizer, loss: tf.Tensor, weights: list[tf.Variable], clipped: bool) -> tf.Operation:
    grads_and_vars = opt.compute_gradients(loss, weights)
    if not clipped:
        return opt.apply_gradients(grads_and_vars)
    grads, _ = tf.clip_by_global_norm([grad for grad, _ in grads_and_vars], cells.CLIP_NORM)
    return opt.apply_gradients(zip(grads, weights, strict=True))
