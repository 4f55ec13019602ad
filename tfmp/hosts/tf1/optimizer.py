"""The front-end for TF1 optimizers, in graphs, in Estimator, and in eager code with a callable loss."""

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from tfmp.any_keras.internals import initialize_with_session
from tfmp.any_keras.which import loaded_keras2
from tfmp.core import lists, settings
from tfmp.core.accumulation import accumulation_settings
from tfmp.core.adapter import names_of
from tfmp.core.distribute import Distribution, MirroredWorkers
from tfmp.core.distribute.horovod_detection import called_by_horovods
from tfmp.core.gradients import arithmetic
from tfmp.core.managers import Specification, manager_of_wrapper
from tfmp.core.overflow.detectors import OverflowDetector
from tfmp.core.spikes.detector import SpikeDetector
from tfmp.core.tracing import without_autograph
from tfmp.core.watch import UnscaledLossWatch
from tfmp.hosts.base import (
    LossScaleOptimizer,
    of_inner,
    optimizer_of,
    refuse_wrapped,
    validated_aggregation_dtype,
)
from tfmp.hosts.tf1.adapter import TF1Adapter, keep_workers_in_step
from tfmp.types import Gradient, Gradients, GradsAndVars, Loss

_NEVER_SCALED = (
    "these gradients reach apply_gradients, and their loss was never scaled: compute_gradients of "
    "tfmp.LossScaleOptimizer was not called. Write grads_and_vars = opt.compute_gradients(loss, variables) in place of "
    "tf.gradients(loss, variables) or a tape."
)


class LossScaleOptimizerV1(LossScaleOptimizer, tf.compat.v1.train.Optimizer):
    """The `tfmp.LossScaleOptimizer` around a `tf.compat.v1.train.Optimizer`, where the arguments are documented.

    Name this class only to subclass it. It works in graphs, in Estimator, and in eager code with a loss that is a
    function. A `SyncReplicasOptimizer` goes around it, and its workers go on after a skipped step.

    Examples:
        >>> import tfmp
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     w = tf.compat.v1.Variable([1.0, 2.0], use_resource=True)
        ...     manager = tfmp.ExponentialUpdateLossScaleManager(2**32, incr_every_n_steps=1000, decr_ratio=0.5)
        ...     opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), manager)
        ...     grads_and_vars = opt.compute_gradients(tf.reduce_sum(w), [w])
        ...     train_op = opt.apply_gradients(grads_and_vars, tf.compat.v1.train.get_or_create_global_step())
        ...     session.run(tf.compat.v1.global_variables_initializer())
        ...     _ = session.run(train_op)
        ...     session.run(w).tolist(), float(session.run("loss_scale:0"))
        ([0.5, 1.5], 4294967296.0)
    """

    def __init__(
        self,
        opt: tf.compat.v1.train.Optimizer | None = None,
        loss_scale_manager: Specification = "dynamic",
        is_distributed: bool = False,
        *,
        inner_optimizer: tf.compat.v1.train.Optimizer | None = None,
        sparse_as_dense: bool = False,
        overflow_detector: OverflowDetector | None = None,
        aggregation_dtype: str | tf.DType | None = None,
        accumulation_steps: int = 1,
        overflow_drops: str = "window",
        micro_batches_per_epoch: int | None = None,
        skip_spikes: SpikeDetector | None = None,
    ) -> None:
        opt = optimizer_of(opt, inner_optimizer)
        # The constructor of a subclass does not go through `tfmp.LossScaleOptimizer`.
        refuse_wrapped(opt)
        if not isinstance(opt, tf.compat.v1.train.Optimizer):
            raise TypeError(f"opt must be a tf.compat.v1.train.Optimizer, got {opt!r} of type {type(opt).__name__}.")
        if isinstance(opt, tf.compat.v1.train.SyncReplicasOptimizer):
            raise TypeError(
                "opt is a SyncReplicasOptimizer, whose step cannot stand in a conditional: wrap the optimizer inside "
                "it, SyncReplicasOptimizer(tfmp.LossScaleOptimizer(opt, manager), ...)."
            )
        tf.compat.v1.train.Optimizer.__init__(self, use_locking=False, name=type(self).__name__)
        # Scripts read these two attributes, which tf.contrib's LossScaleOptimizer has by the same names.
        self._opt = opt
        self._sparse_as_dense = settings.flag("sparse_as_dense", sparse_as_dense)
        self._watch = UnscaledLossWatch()
        self._aggregation_dtype = validated_aggregation_dtype(aggregation_dtype, is_distributed)
        accumulation = accumulation_settings(accumulation_steps, overflow_drops, micro_batches_per_epoch)
        manager = manager_of_wrapper(loss_scale_manager)
        self._set_up(manager, is_distributed, overflow_detector, accumulation, skip_spikes)

    @property
    def inner_optimizer(self) -> tf.compat.v1.train.Optimizer:
        """The wrapped optimizer."""
        return self._opt

    @property
    def _absent_method_of_keras(self) -> NoReturn:
        """Not available: this method is for Keras' optimizers. Call `minimize`, or the two methods that it calls."""
        raise AttributeError(
            "scale_loss, get_scaled_loss, get_unscaled_gradients and apply are for Keras' optimizers: call minimize, "
            "or compute_gradients and apply_gradients, which scale and unscale by themselves."
        )

    scale_loss = get_scaled_loss = get_unscaled_gradients = apply = _absent_method_of_keras

    @property
    def accumulation(self) -> tf.Module:
        """The sums of unfinished windows in eager code, to be saved by a `tf.train.Checkpoint`."""
        return self._accumulators.saved

    def compute_gradients(
        self,
        loss: Loss,
        var_list: Sequence[tf.Variable] | None = None,
        gate_gradients: int = tf.compat.v1.train.Optimizer.GATE_OP,
        aggregation_method: int | None = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: tf.Tensor | None = None,
    ) -> list[tuple[Gradient, tf.Variable]]:
        """As in `tfmp.LossScaleOptimizer`; the arguments are those of `tf.compat.v1.train.Optimizer`.

        With is_distributed=True the gradients are the mean over Horovod's processes. With `accumulation_steps`, unless
        Horovod's own optimizer averages, `apply_gradients` averages each window instead.

        Raises:
            ValueError: is_distributed=True, and nothing distributes the training; or `aggregation_dtype` was given, and
                Horovod's own optimizer averages the gradients.
        """
        self._watch.may_be_scaled = True
        if var_list is not None and not callable(var_list):
            # Eager TensorFlow accepts neither a single variable nor a nested structure.
            var_list = tf.nest.flatten(list(var_list) if isinstance(var_list, Iterator) else var_list)
        grads_and_vars = self._opt.compute_gradients(
            (lambda: self._scaler.scale(loss())) if callable(loss) else self._scaler.scale(loss),
            var_list=var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=None if grad_loss is None else arithmetic.widen(tf.convert_to_tensor(grad_loss)),
        )
        grads, variables = [grad for grad, _ in grads_and_vars], [variable for _, variable in grads_and_vars]
        names = names_of(variables)
        if self._sparse_as_dense:
            # Before unscaling, as in tf.contrib: rows are summed in the type of scaled gradients, and may overflow.
            grads = [arithmetic.densify(grad) for grad in grads]
        lists.refuse_complex(grads, names)
        if self._is_of_horovod or called_by_horovods(self):
            self._refuse_aggregation_dtype()
        elif not self._averages_when_applying():
            grads = self._scaler.mean_over_workers(grads, names, self._scaler.distribution())
        return list(zip(self._scaler.unscale(grads), variables, strict=True))

    @without_autograph
    def apply_gradients(
        self, grads_and_vars: GradsAndVars, global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation:
        """As in `tfmp.LossScaleOptimizer`.

        Each gradient, or with accumulation the mean of the window, is cast to the type of its variable before it is
        checked, unless the wrapped optimizer has a true attribute `takes_float32_gradients`, as those of `tfmp.bert`.

        Args:
            grads_and_vars: Pairs of an unscaled gradient and its variable, as `compute_gradients` returns them.
            global_step: The step counter. It goes up by exactly one if the step is applied, whether or not the
                wrapped optimizer advances it. It counts windows, not micro-batches.
            name: A name for the wrapped optimizer's op.

        Raises:
            TypeError: Also if `global_step` is not a variable.
            ValueError: Also if there are no pairs; if control flow v2 is enabled with a reference variable; or if a
                variable gets a gradient and had none when the `tf.function` that ends the window was traced.
            NotImplementedError: Also if gradients are accumulated in a graph under a strategy of several workers.
        """
        pairs = lists.pairs(grads_and_vars)
        grads, variables = lists.of_tensors(grad for grad, _ in pairs), [variable for _, variable in pairs]
        _validate(grads, variables, global_step)
        self._watch.warn_if_not_scaled(grads, _NEVER_SCALED)
        # Checkpoints of tf.contrib have variables such as `cond/beta1_power`; a branch of control flow v2 inherits no
        # scope. A user's manager may have a conditional to read the scale, so the name is taken first.
        name_scope = tf.compat.v1.get_default_graph().unique_name("cond", mark_as_used=False) + "/"
        facts = self._scaler.facts()
        is_averaged = not self._averages_when_applying() or self._is_of_horovod or called_by_horovods(self)
        adapter = TF1Adapter(
            self._opt,
            variables,
            {"name": name},
            average=None if is_averaged else self._average_over_workers(variables, facts.distribution),
            leaves_out_none=False,
            global_step=global_step,
            distribution=facts.distribution,
            name_scope=name_scope,
        )
        adapter.prepare([variable for grad, variable in pairs if grad is not None])
        if self._accumulators.is_on:
            _refuse_workers_in_graph(facts.distribution)
        step = self._take_step(adapter, grads, facts)
        step = keep_workers_in_step(step, grads, global_step)
        for keras in loaded_keras2():
            initialize_with_session(keras, self._state_in_graph())
        _record_train_op(step)
        return step

    def _averages_when_applying(self) -> bool:
        """Return whether `apply_gradients` averages; a subclass that accumulates by itself may override this."""
        return self._accumulators.is_on and not tf.distribute.has_strategy()

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "sparse_as_dense": self._sparse_as_dense,
            "aggregation_dtype": self._aggregation_dtype and self._aggregation_dtype.name,
        }

    get_name = of_inner("get_name")
    get_slot = of_inner("get_slot")
    get_slot_names = of_inner("get_slot_names")
    variables = of_inner("variables")

    def _trackable_children(self, *args: object, **kwargs: object) -> NoReturn:
        # A tf.train.Checkpoint would save the slots once for each of the two optimizers, and restore the wrong ones.
        raise NotImplementedError(
            "a tf.train.Checkpoint cannot hold this tfmp.LossScaleOptimizer: give it the wrapped optimizer and the "
            "manager, tf.train.Checkpoint(optimizer=opt, manager=manager), and, with accumulation_steps, "
            "accumulation=this_optimizer.accumulation, and, with skip_spikes, "
            "spike_detector=this_optimizer.spike_detector."
        )


def _validate(grads: Gradients, variables: Sequence[tf.Variable], global_step: tf.Variable | None) -> None:
    if not variables:
        raise ValueError("grads_and_vars is empty: pass what compute_gradients returned.")
    lists.refuse_all_none(grads, names_of(variables))
    lists.refuse_complex(grads, names_of(variables))
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


def _refuse_workers_in_graph(distribution: Distribution) -> None:
    with tf.init_scope():
        in_graph = not tf.executing_eagerly()
    if in_graph and isinstance(distribution, MirroredWorkers):
        raise NotImplementedError(
            "accumulation_steps under MultiWorkerMirroredStrategy in a graph, as Estimator builds: the worker that "
            "saves would wait for ever for the sums of the others. Use Horovod or MirroredStrategy, or "
            "accumulation_steps=1."
        )


def _record_train_op(step: tf.Operation) -> None:
    """Put the op of the whole step into the graph's collection TRAIN_OP."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        collection = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
        # The wrapped optimizer's own op may be in a branch of control flow v2: the saved graph could not be loaded.
        collection[:] = [op for op in [*collection, step] if op.graph is graph]
