"""The front-end for TF1-style optimizers: graph mode, Estimator, and eager code with a callable loss."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import tensorflow as tf

from tfmp.core import lists, script_lines, settings
from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.accumulation.settings import accumulation_settings
from tfmp.core.adapters import StepCounter, TF1Adapter, takes_float32_gradients
from tfmp.core.distribute import Distribution, MirroredWorkers
from tfmp.core.distribute.horovod_detection import (
    called_by_horovods,
    is_horovods,
    refuse_unsupported_horovods,
)
from tfmp.core.gradients import arithmetic
from tfmp.core.managers import Specification, manager_of_wrapper
from tfmp.core.overflow.detectors import OverflowDetector, validated_detector
from tfmp.core.step.scaler import LossScaler, Step
from tfmp.core.tracing import without_autograph
from tfmp.optimizers.base import (
    LossScaleOptimizer,
    refuse_wrapped,
    settings_to_show,
    validated_aggregation_dtype,
)
from tfmp.optimizers.v1_accumulation import Accumulators
from tfmp.types import Gradient, Gradients, Loss

_logger = logging.getLogger("tfmp")

_GradsAndVars: TypeAlias = Iterable[tuple[Gradient, tf.Variable]]


class LossScaleOptimizerV1(LossScaleOptimizer, tf.compat.v1.train.Optimizer):
    """The `tfmp.LossScaleOptimizer` around a `tf.compat.v1.train.Optimizer`.

    `tfmp.LossScaleOptimizer(opt, manager)` makes one; see there for the arguments. Name this class only to subclass
    it.

    Example:
        >>> import tfmp
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     w = tf.compat.v1.Variable([1.0, 2.0], use_resource=True)
        ...     manager = tfmp.ExponentialUpdateLossScaleManager(2**32, incr_every_n_steps=1000, decr_ratio=0.5)
        ...     opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), manager)
        ...     grads_and_vars = opt.compute_gradients(tf.reduce_sum(w), [w])
        ...     grads, _ = tfmp.clip_by_global_norm([grad for grad, _ in grads_and_vars], 10.0)
        ...     train_op = opt.apply_gradients(zip(grads, [w]), tf.compat.v1.train.get_or_create_global_step())
        ...     session.run(tf.compat.v1.global_variables_initializer())
        ...     _ = session.run(train_op)
        ...     session.run(w).tolist(), float(session.run("loss_scale:0"))
        ([0.5, 1.5], 4294967296.0)
    """

    def __init__(
        self,
        opt: tf.compat.v1.train.Optimizer,
        loss_scale_manager: Specification = "dynamic",
        is_distributed: bool = False,
        *,
        sparse_as_dense: bool = False,
        overflow_detector: OverflowDetector | None = None,
        aggregation_dtype: str | tf.DType | None = None,
        accumulation_steps: int = 1,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
    ) -> None:
        # Here too: a subclass is not made through the front door.
        refuse_wrapped(opt)
        if not isinstance(opt, tf.compat.v1.train.Optimizer):
            raise TypeError(f"opt must be a tf.compat.v1.train.Optimizer, got {opt!r} of type {type(opt).__name__}.")
        if isinstance(opt, tf.compat.v1.train.SyncReplicasOptimizer):
            raise TypeError(
                "opt is a SyncReplicasOptimizer, whose step cannot stand in a conditional: wrap the optimizer inside "
                "it, SyncReplicasOptimizer(tfmp.LossScaleOptimizer(opt, manager), ...)."
            )
        tf.compat.v1.train.Optimizer.__init__(self, use_locking=False, name=type(self).__name__)
        # Scripts read these two names of the original.
        self._opt = opt
        self._loss_scale_manager = manager_of_wrapper(loss_scale_manager)
        self._sparse_as_dense = sparse_as_dense
        self._is_distributed = settings.flag("is_distributed", is_distributed)
        # Whether it is known that gradients come from `compute_gradients`, or the user was told that they do not.
        self._origin_known = False
        refuse_unsupported_horovods(opt)
        self._aggregation_dtype = validated_aggregation_dtype(aggregation_dtype, is_distributed, is_horovods(opt))
        detector = validated_detector(overflow_detector)
        self._scaler = LossScaler(self._loss_scale_manager, detector, is_distributed, self._aggregation_dtype)
        accumulation = accumulation_settings(accumulation_steps, overflow_drops, micro_batches_per_epoch)
        self._accumulation_settings = accumulation
        self._accumulators = Accumulators(accumulation, detector, keeps_float32=takes_float32_gradients(opt))

    @property
    def _of_keras(self) -> NoReturn:
        raise AttributeError(
            "scale_loss, get_scaled_loss, get_unscaled_gradients and apply are for Keras' optimizers: call minimize, "
            "or compute_gradients and apply_gradients, which scale and unscale by themselves."
        )

    scale_loss = get_scaled_loss = get_unscaled_gradients = apply = _of_keras

    @property
    def accumulation(self) -> Accumulators:
        """What eager code has accumulated, to be saved and restored; without variables if each call takes a step.

        A graph's Saver needs no more than the graph's variables.

        Example:
            >>> import tfmp
            >>> w, inner, manager = tf.Variable(1.0), tf.compat.v1.train.AdamOptimizer(), tfmp.FixedLossScaleManager(8)
            >>> opt = tfmp.LossScaleOptimizer(inner, manager, accumulation_steps=4)
            >>> checkpoint = tf.train.Checkpoint(
            ...     w=w, optimizer=inner, manager=manager, accumulation=opt.accumulation)
        """
        return self._accumulators

    def compute_gradients(
        self,
        loss: Loss,
        var_list: Sequence[tf.Variable] | None = None,
        gate_gradients: int = tf.compat.v1.train.Optimizer.GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: tf.Tensor | None = None,
    ) -> list[tuple[Gradient, tf.Variable]]:
        """Compute the gradients of the loss, in true magnitude, so that they can be clipped.

        With is_distributed=True under Horovod they are the mean over its processes; but where micro-batches are
        accumulated, which are averaged when their window ends.

        The loss is scaled, differentiated by the wrapped optimizer, and the gradients unscaled in float32, whatever
        the variable's type. What overflowed is infinite or NaN. Clip by `tfmp.clip_by_value`, `clip_by_norm` or
        `clip_by_global_norm`, which keep that visible; `tf.clip_by_value` makes infinity an ordinary number, and the
        step is then applied.

        Args:
            loss: The loss, a floating-point tensor; or a function that returns it, as eager execution needs.
            var_list: The variables; by default all trainable ones. A nest of them is taken too, and a single one.
            gate_gradients: As in `tf.compat.v1.train.Optimizer`.
            aggregation_method: As there.
            colocate_gradients_with_ops: As there.
            grad_loss: The gradient of the loss, of its shape.

        Returns:
            Pairs of gradient and variable. The gradient is None where the loss does not depend on the variable, and
            an `IndexedSlices` where it is sparse.

        Raises:
            TypeError: The loss is not of a floating-point type.
            ValueError: is_distributed=True and nothing distributes; or `aggregation_dtype` was given, and an optimizer
                of Horovod sends the gradients.
            NotImplementedError: The active `tf.distribute` strategy is not supported.
            RuntimeError: A strategy is active, and the call is not made on its replicas.
        """
        self._origin_known = True
        grads_and_vars = self._opt.compute_gradients(
            (lambda: self._scaler.scale(loss())) if callable(loss) else self._scaler.scale(loss),
            var_list=_flat(var_list),
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=None if grad_loss is None else arithmetic.widen(tf.convert_to_tensor(grad_loss)),
        )
        grads = [grad for grad, _ in grads_and_vars]
        if self._sparse_as_dense:
            # Before unscaling, as tf.contrib did: rows named twice may overflow in their sum.
            grads = [arithmetic.densify(grad) for grad in grads]
        variables = [variable for _, variable in grads_and_vars]
        if is_horovods(self._opt) or called_by_horovods(self):
            # That optimizer averages gradients itself, inside this one or around it.
            validated_aggregation_dtype(self._aggregation_dtype, self._is_distributed, horovod_averages=True)
        elif not self._averages_windows():
            names, distribution = [variable.name for variable in variables], self._scaler.distribution()
            grads = self._scaler.average_over_workers(grads, names, distribution)
        return list(zip(self._scaler.unscale(grads), variables, strict=True))

    @without_autograph
    def apply_gradients(
        self, grads_and_vars: _GradsAndVars, global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation:
        """Apply the gradients if they are finite on every replica, and move the loss scale.

        With `accumulation_steps` they are those of a micro-batch, and are added up; the call that ends the window
        takes the step.

        Args:
            grads_and_vars: Pairs of unscaled gradient and variable, as `compute_gradients` returns them. Gradients
                are cast to the variable's type before they are checked, of a window their mean is; but for an
                optimizer with a true attribute `takes_float32_gradients`, as those of `tfmp.bert`. None is left out.
            global_step: The step counter. It goes up by exactly one if the step is applied, whether or not the
                wrapped optimizer sees to that, and stays if it is skipped. So it counts windows.
            name: A name for the wrapped optimizer's op.

        Returns:
            The op of the whole step; None in eager mode.

        Raises:
            TypeError: These are no such pairs, or `global_step` is no variable.
            ValueError: There is no gradient at all; or is_distributed=True and nothing distributes; or a reference
                variable meets control flow v2, which cannot update it conditionally; or a gradient is of a variable
                that had none when another function, which ends the window, was traced.
            NotImplementedError: The active `tf.distribute` strategy is not supported; or is one of several workers, and
                accumulates in a graph.
        """
        pairs = lists.pairs(grads_and_vars)
        variables = [variable for _, variable in pairs]
        grads = [grad for grad, _ in pairs]
        _validate(grads, variables, global_step)
        self._warn_if_never_scaled(grads)
        distribution = self._scaler.distribution()
        adapter = TF1Adapter(
            self._opt,
            variables,
            {"name": name},
            counter=None if global_step is None else StepCounter(global_step, distribution),
            name_scope=_scope_of_conditional(),
        )
        adapter.prepare([variable for grad, variable in pairs if grad is not None])
        averages = self._averages_windows() and not (is_horovods(self._opt) or called_by_horovods(self))
        if self._accumulators.is_on:
            accumulator = self._accumulator(variables, distribution)
            step = self._scaler.accumulate(Step(adapter, grads, averages=averages), distribution, accumulator)
        else:
            step = self._scaler.step(Step(adapter, adapter.typed(grads), averages=averages), distribution)
        _note_train_op(step)
        return step

    def _accumulator(self, variables: Sequence[tf.Variable], distribution: Distribution) -> GradientAccumulator:
        with tf.init_scope():
            in_graph = not tf.executing_eagerly()
        if in_graph and isinstance(distribution, MirroredWorkers):
            raise NotImplementedError(
                "accumulation_steps under MultiWorkerMirroredStrategy in a graph, as Estimator builds: the worker that "
                "saves would wait for ever for the sums of the others. Use Horovod or MirroredStrategy, or "
                "accumulation_steps=1."
            )
        return self._accumulators.of(variables)

    def _averages_windows(self) -> bool:
        """Tell whether Horovod's workers average the mean of each window, and not the gradients of every micro-batch.

        Under a strategy the wrapped optimizer sums them, when they are applied.
        """
        return self._accumulators.is_on and not tf.distribute.has_strategy()

    def _warn_if_never_scaled(self, grads: Gradients) -> None:
        """Warn, once, of gradients that no `compute_gradients` of a wrapper gave: their loss was not scaled."""
        if self._origin_known:
            return
        self._origin_known = True
        op = script_lines.gradient_op(grads)
        if op is not None and script_lines.made_by_tfmp(op):
            # Of another wrapper, whose variables two optimizers share out.
            return
        line = script_lines.line_of_gradients(grads) if op is None else script_lines.line_of_op(op)
        _logger.warning(
            "%s: these gradients reach apply_gradients, and their loss was never scaled: compute_gradients of "
            "tfmp.LossScaleOptimizer was not called. Write grads_and_vars = opt.compute_gradients(loss, variables) in "
            "place of tf.gradients(loss, variables) or a tape.",
            line,
        )

    def _settings_to_show(self) -> list[str]:
        shown = {
            "is_distributed": self._is_distributed,
            "sparse_as_dense": self._sparse_as_dense,
            "aggregation_dtype": self._aggregation_dtype and self._aggregation_dtype.name,
            **self._accumulation_settings._asdict(),
        }
        return settings_to_show(self._opt, shown)

    def get_name(self) -> str:
        """Return the name of the wrapped optimizer."""
        return self._opt.get_name()

    def get_slot(self, var: tf.Variable, name: str) -> tf.Variable | None:
        """Return a slot of the wrapped optimizer.

        Args:
            var: The variable that the slot belongs to.
            name: The slot's name.
        """
        return self._opt.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the wrapped optimizer's slots."""
        return self._opt.get_slot_names()

    def variables(self) -> list[tf.Variable]:
        """Return the variables of the wrapped optimizer."""
        return self._opt.variables()

    def _trackable_children(self, *args: object, **kwargs: object) -> NoReturn:
        # Private, and called by tf.train.Checkpoint alone. The slots would be saved twice, once for each optimizer,
        # and restored to the wrong one.
        raise NotImplementedError(
            "a tf.train.Checkpoint cannot hold this tfmp.LossScaleOptimizer: give it the wrapped optimizer and the "
            "manager, tf.train.Checkpoint(optimizer=opt, manager=manager), and, with accumulation_steps, "
            "accumulation=this_optimizer.accumulation."
        )


def _flat(var_list: Any) -> Any:  # noqa: ANN401 - whatever TensorFlow takes
    """Return variables as a list. TensorFlow takes a nest of them, or a single one, in graphs; this also eagerly."""
    if var_list is None or callable(var_list):
        return var_list
    return tf.nest.flatten(list(var_list) if isinstance(var_list, Iterator) else var_list)


def _validate(grads: Gradients, variables: Sequence[tf.Variable], global_step: tf.Variable | None) -> None:
    if not variables:
        raise ValueError("grads_and_vars is empty: pass what compute_gradients returned.")
    lists.refuse_all_none(grads, [variable.name for variable in variables])
    if global_step is not None and not hasattr(global_step, "assign_add"):
        raise TypeError(
            f"global_step must be a variable, got {global_step!r}: pass tf.compat.v1.train.get_or_create_global_step()."
        )
    if tf.executing_eagerly() or not tf.compat.v1.control_flow_v2_enabled():
        return
    for variable in [*variables, *([] if global_step is None else [global_step])]:
        if variable.dtype != variable.dtype.base_dtype:
            raise ValueError(
                f"{variable.name} is a reference variable, which control flow v2 cannot update conditionally: call "
                "tf.compat.v1.disable_v2_behavior() at the top of the script, or make resource variables."
            )


def _scope_of_conditional() -> str:
    """Return the name scope of the conditional that the step will stand in, as tf.contrib named it: `cond`.

    What the wrapped optimizer makes stands below it (`cond/beta1_power`). It must be opened by its name: branches of
    control flow v2 are graphs of their own, which do not know the scope.
    """
    return tf.compat.v1.get_default_graph().unique_name("cond", mark_as_used=False) + "/"


def _note_train_op(step: tf.Operation) -> None:
    """Let the graph's TRAIN_OP be the whole step."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        collection = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
        # The wrapped optimizer noted its op. A branch of control flow v2 is a graph of its own, and a saved graph that
        # names an op of another graph cannot be loaded.
        collection[:] = [op for op in [*collection, step] if op.graph is graph]
