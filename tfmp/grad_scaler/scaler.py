"""GradScaler: loss scaling in hand-written loops, with the verbs of torch.amp."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.adapters import AdaptersTogether, OptimizerAdapter
from tfmp.core.control_flow import conditional_update
from tfmp.core.distribute import Distribution, current_distribution
from tfmp.core.managers import Specification, get_loss_scale_manager
from tfmp.core.overflow.detectors import OverflowDetector, validated_detector
from tfmp.core.overflow.local_check import LocalCheck
from tfmp.core.step.result import StepResult
from tfmp.core.step.scaler import LossScaler, Step
from tfmp.core.step.status import StepProperties
from tfmp.core.tracing import without_autograph
from tfmp.grad_scaler.arguments import validate_kwargs, validate_optimizer, validated_pairs, validated_steps
from tfmp.grad_scaler.call_order import CallOrder, on_replica
from tfmp.grad_scaler.optimizer_step import OptimizerStep, adapter_of, known_together
from tfmp.grad_scaler.pending_update import PendingUpdate
from tfmp.grad_scaler.scaled_losses import ScaledLosses
from tfmp.types import Gradient, Gradients, GradsAndVars

#: The arguments of torch.amp.GradScaler, and its defaults.
_RULE_OF_TORCH = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class GradScaler(StepProperties, tf.Module):
    """Scales losses, unscales gradients, and steps with those that are finite: loss scaling for hand-written loops.

    An iteration, with any number of losses and optimizers, of Keras (any version) or of TF1:

        scale(loss)                             loss * loss_scale, to be differentiated
        unscale(optimizer, grads)               optional: gradients in true magnitude, to clip or look at
        step(optimizer, grads_and_vars)         applies them if they are finite on every replica
        update()                                once, after all optimizers: moves the loss scale

    It works eagerly, in a `tf.function`, compiled by XLA, and in graphs of TF1, where `update` returns the op that runs
    the whole iteration. Under `tf.distribute` all but `update` are called on the replicas, and `update` there or
    outside. `update` is called eagerly where an optimizer steps eagerly; steps in a `tf.function` are seen by either.

    Gradients that are unscaled though their loss was not scaled are warned of, once, as far as that can be known.

    Args:
        init_scale: The scale to start from.
        growth_factor: What the scale is multiplied by after `growth_interval` iterations in a row without overflow.
        backoff_factor: What it is multiplied by after an iteration with an overflow. It does not go below 1.
        growth_interval: Iterations without overflow after which the scale grows.
        enabled: With False everything is passed through: losses and gradients as they are, steps without a check, calls
            in any order. One loop then serves training with and without scaling.
        manager: What decides the scale, instead of the four settings: a `tfmp.LossScaleManager`, a number for a fixed
            scale, or what else `tfmp.get_loss_scale_manager` takes.
        is_distributed: Whether Horovod's processes train together: they agree on each step, and gradients are averaged
            over them. Leave it out with `hvd.DistributedGradientTape`, which averages. The replicas of a
            `tf.distribute` strategy are found with either value.
        overflow_detector: What counts as overflow; a `tfmp.NonFiniteDetector` unless given.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range; or a manager is given and settings for another.

    Example:
        >>> import tfmp
        >>> w = tf.Variable([1.0, 2.0])
        >>> optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        >>> scaler = tfmp.GradScaler(init_scale=1024)
        >>> for factor in (1.0, float("inf")):
        ...     with tf.GradientTape() as tape:
        ...         loss = scaler.scale(tf.reduce_sum(w) * factor)
        ...     _ = scaler.step(optimizer, zip(tape.gradient(loss, [w]), [w]))
        ...     scaler.update()
        ...     print(w.numpy(), float(scaler.loss_scale))
        [0.5 1.5] 1024.0
        [0.5 1.5] 512.0

    Source: torch.amp.GradScaler.
    """

    _public_name = "GradScaler"

    def __init__(
        self,
        init_scale: float = _RULE_OF_TORCH["init_scale"],
        growth_factor: float = _RULE_OF_TORCH["growth_factor"],
        backoff_factor: float = _RULE_OF_TORCH["backoff_factor"],
        growth_interval: int = int(_RULE_OF_TORCH["growth_interval"]),
        enabled: bool = True,
        *,
        manager: Specification = None,
        is_distributed: bool = False,
        overflow_detector: OverflowDetector | None = None,
    ) -> None:
        super().__init__()
        rule = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        if manager is not None and rule != _RULE_OF_TORCH:
            raise ValueError("manager decides the scale by settings of its own: leave out init_scale and the like.")
        self._enabled = settings.flag("enabled", enabled)
        manager = get_loss_scale_manager(rule if manager is None else manager)
        #: Decides the loss scale; a checkpoint of the scaler has its state under this name.
        self.manager = manager
        self._loss_scale_manager = manager
        self._is_distributed = settings.flag("is_distributed", is_distributed)
        self._scaler = LossScaler(manager, validated_detector(overflow_detector), self._is_distributed)
        # Tracked, so that a function that takes steps can be exported.
        self._overflow_counts = self._scaler.overflow_counts
        self._losses = ScaledLosses()
        self._pending = PendingUpdate()
        self._calls = CallOrder(is_strict=self._enabled)

    @property
    def enabled(self) -> bool:
        """Whether losses are scaled and steps are checked."""
        return self._enabled

    def is_enabled(self) -> bool:
        """Return `enabled`, as in torch.amp."""
        return self._enabled

    def get_scale(self) -> tf.Tensor:
        """Return `loss_scale`, as in torch.amp; there it is a Python number."""
        return self.loss_scale

    @property
    def loss_scale(self) -> tf.Tensor:
        """The loss scale, a float32 scalar; 1 where scaling is not enabled."""
        self._losses.note_read()
        return self._scale_to_divide_by()

    def prepare(self, optimizer: Any, variables: Iterable[Any]) -> None:  # noqa: ANN401 - of any host
        """Make an optimizer's variables, such as its momenta, before a `tf.function` is traced.

        For an optimizer that does not step when the function is first traced, as a generator may sit out the first
        iterations: a `tf.function` makes an optimizer's variables in its first trace only. In any other case `step`
        sees to it.

        Args:
            optimizer: The optimizer.
            variables: What `step` will be called with, those without a gradient too.

        Raises:
            TypeError: It is no optimizer; or these are no variables.
            ValueError: It scales losses or averages gradients itself; or the function is traced already.

        Example:
            >>> generator, critic = tf.Variable(1.0), tf.Variable(1.0)
            >>> optimizers = [tf.compat.v1.train.MomentumOptimizer(0.5, 0.9) for _ in range(2)]
            >>> scaler = GradScaler(init_scale=8)
            >>> @tf.function
            ... def train_step(with_generator):
            ...     scaler.step(optimizers[0], [(tf.constant(8.0), critic)])
            ...     if with_generator:
            ...         scaler.step(optimizers[1], [(tf.constant(8.0), generator)])
            ...     scaler.update()
            >>> scaler.prepare(optimizers[1], [generator])
            >>> train_step(False)
            >>> train_step(True)
            >>> float(generator)
            0.5
        """
        validate_optimizer(optimizer)
        _make_variables(adapter_of(optimizer, lists.variables("variables", variables), {}))

    @without_autograph
    def scale(self, losses: Any) -> Any:  # noqa: ANN401 - of any structure
        """Multiply losses by the loss scale.

        Args:
            losses: A loss, of a floating-point type, or a nest of such (lists, dicts); a generator counts as a list.

        Returns:
            The same nest of scaled losses, in float32 or float64.

        Raises:
            TypeError: A loss is not of a floating-point type.

        Example:
            >>> scaled = GradScaler(init_scale=8).scale({"generator": 1.0, "critic": 2.0})
            >>> float(scaled["generator"]), float(scaled["critic"])
            (8.0, 16.0)
        """
        if not self._enabled:
            return losses

        def scale(loss: tf.Tensor) -> tf.Tensor:
            scaled = self._scaler.scale(loss)
            self._losses.note(scaled)
            return scaled

        return tf.nest.map_structure(scale, list(losses) if isinstance(losses, Iterator) else losses)

    @without_autograph
    def unscale(
        self,
        optimizer: Any,  # noqa: ANN401 - of any host
        grads: Iterable[Gradient] | GradientAccumulator,
    ) -> list[Gradient]:
        """Divide gradients by the loss scale, for whoever clips them or looks at them before `step`.

        Whether they are finite is taken down here: no clipping afterwards hides an overflow.

        Args:
            optimizer: The optimizer whose gradients they are.
            grads: The gradients of a scaled loss; None stays None. Or an accumulator, whose mean is returned, and which
                is emptied.

        Returns:
            The gradients in true magnitude, in float32 or float64; of an accumulator in the types of its variables.
            With Horovod and `is_distributed=True` they are the mean over the processes.

        Raises:
            TypeError: The gradients are no list of gradients.
            RuntimeError: It was called for this optimizer since the last update; or `step` was.
            ValueError: Every gradient is None.

        Example:
            >>> w = tf.Variable([3.0, 4.0])
            >>> optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
            >>> scaler = GradScaler(init_scale=8)
            >>> grads = scaler.unscale(optimizer, [tf.constant([24.0, 32.0])])
            >>> clipped, norm = tf.clip_by_global_norm(grads, 2.5)
            >>> scaler.step(optimizer, zip(clipped, [w]))
            >>> float(norm), w.numpy().tolist()
            (5.0, [1.5, 2.0])
        """
        given = grads if isinstance(grads, GradientAccumulator) else lists.gradients(grads)
        self._calls.refuse_second_unscale(optimizer)
        if isinstance(given, GradientAccumulator):
            true_grads, known = self._mean_of_window(given)
        else:
            true_grads, known = self._true_grads(given)
        self._calls.note_unscale(optimizer, known)
        return true_grads

    def _true_grads(self, grads: Gradients) -> tuple[list[Gradient], LocalCheck]:
        """Return gradients of a scaled loss in true magnitude, and what is found of them."""
        lists.refuse_all_none(grads)
        if not self._enabled:
            return self._averaged(grads), LocalCheck(tf.constant(True))
        self._losses.warn_if_not_scaled(grads)
        true_grads = self._scaler.unscale(self._averaged(grads))
        return true_grads, self._scaler.check(true_grads, self._scaler.distribution())

    def _mean_of_window(self, accumulator: GradientAccumulator) -> tuple[list[Gradient], LocalCheck]:
        """Return the mean of a window, and what is found of it; empty the window."""
        distribution = self._scaler.distribution()
        grads, window = self._scaler.drain(accumulator, distribution)
        lists.refuse_all_none(grads)
        mean = self._averaged(grads, are_scaled=False)
        if not self._enabled:
            return mean, window
        check = self._scaler.check(mean, distribution, already_checked=True)
        return mean, window._replace(usable=tf.logical_and(window.usable, check.usable), checked=mean)

    @without_autograph
    def step(self, optimizer: Any, grads_and_vars: GradsAndVars, **kwargs: Any) -> tf.Operation:  # noqa: ANN401
        """Apply gradients by an optimizer if they are finite on every replica.

        Args:
            optimizer: An optimizer of Keras or TF1, with `apply_gradients`; or a `ScaledGradientsOptimizer`.
            grads_and_vars: Pairs of a gradient and its variable: gradients of a scaled loss, or what `unscale` made of
                them. None is left out.
            **kwargs: Passed to the optimizer's `apply_gradients`, such as `global_step`.

        Returns:
            The op that does it; None in eager mode.

        Raises:
            TypeError: The optimizer has no `apply_gradients`.
            ValueError: There are no gradients; or the optimizer scales losses, or averages gradients, itself.
            RuntimeError: It was called for this optimizer since the last update.
            NotImplementedError: It is called in a conditional, or a `tf.function`, in a graph of TF1.
        """
        return self.step_all([(optimizer, grads_and_vars)], **kwargs)

    @without_autograph
    def step_all(self, steps: Iterable[tuple[Any, GradsAndVars]], **kwargs: Any) -> tf.Operation:  # noqa: ANN401
        """Apply the gradients of several optimizers if all are finite: all step, or none.

        Several calls of `step` are the other rule: there each optimizer that can steps.

        Args:
            steps: Pairs of an optimizer and what `step` takes for it.
            **kwargs: Passed to every optimizer's `apply_gradients`; `global_step` would be counted by each.

        Returns:
            The op that does it; None in eager mode.

        Raises:
            TypeError: As `step`.
            ValueError: As `step`; or there is no optimizer; or one is given twice.
            RuntimeError: As `step`.

        Example:
            >>> v, w = tf.Variable(1.0), tf.Variable(1.0)
            >>> optimizers = [tf.compat.v1.train.GradientDescentOptimizer(0.5) for _ in range(2)]
            >>> scaler = GradScaler(init_scale=8)
            >>> grads = [tf.constant(8.0), tf.constant(float("inf"))]
            >>> scaler.step_all(zip(optimizers, [[(grads[0], v)], [(grads[1], w)]]))
            >>> float(v), float(w)
            (1.0, 1.0)
        """
        self._calls.refuse_conditional()
        pairs = [(optimizer, validated_pairs(optimizer, given)) for optimizer, given in validated_steps(steps)]
        optimizers = [optimizer for optimizer, _ in pairs]
        taken = [
            self._step_of(adapter_of(optimizer, [variable for _, variable in own], kwargs), [grad for grad, _ in own])
            for optimizer, own in pairs
        ]
        if len(set(map(id, optimizers))) < len(optimizers):
            raise ValueError("an optimizer is given twice: pass each optimizer once, with all of its grads_and_vars.")
        validate_kwargs(optimizers, kwargs)
        for step in taken:
            _make_variables(step.adapter)
        # An accumulator decides on its window also where scaling is not enabled.
        checks = self._enabled or any(step.is_of_window for step in taken)
        op = self._run(taken) if checks else tf.group(*(step.apply_unchecked() for step in taken))
        for optimizer in optimizers:
            self._calls.note_step(optimizer, op)
        return op

    @without_autograph
    def update(self, new_scale: float | tf.Tensor | None = None) -> tf.Operation:
        """Move the loss scale, by what all steps since the last update have shown.

        An iteration counts as applied if all its steps were.

        Args:
            new_scale: Set the scale to this number, or float32 scalar, and do not move it otherwise.

        Returns:
            The op that does it; None in eager mode. In a graph of TF1 it runs the steps that were built before it.

        Raises:
            RuntimeError: No optimizer has stepped since the last update. In a `tf.function` that is an error when it
                runs.
            TypeError: The new scale is no number.
            ValueError: The new scale is not finite, or not within the manager's bounds. A tensor in a graph is an error
                when the op runs.
            NotImplementedError: The manager's scale cannot be set.

        Example:
            >>> scaler = GradScaler(init_scale=1024)
            >>> scaler.update(new_scale=256)
            >>> float(scaler.loss_scale)
            256.0
        """
        steps = list(self._calls.ops())
        if not self._enabled:
            self._calls.end()
            return tf.group(*steps)
        checks = []
        if new_scale is None and not self._calls.stepped:
            checks = self._refuse_if_none_stepped()

        def move() -> tf.Operation:
            with tf.control_dependencies([*steps, *checks]):
                result = self._pending.result(self.manager.needs_max_abs)
                moved = self._scaler.advance(result) if new_scale is None else self._set(new_scale, result)
            with tf.control_dependencies([] if moved is None else [moved]):
                return self._pending.clear()

        moved = self._once(move)
        self._calls.end()
        return moved

    def abandon(self) -> tf.Operation:
        """Forget the iteration, which an exception has ended: what was called in it, and what its steps have shown.

        After any exception while steps are taken, in a `tf.function` and in `session.run` too: what they have shown is
        on the device, and would count in the next update.

        The scale stays, and nothing is counted. What was applied stays applied.

        Returns:
            The op that does it; None in eager mode.

        Example:
            >>> w, optimizer = tf.Variable(1.0), tf.compat.v1.train.GradientDescentOptimizer(0.5)
            >>> scaler = GradScaler(init_scale=8)
            >>> for batch in [None, 1.0]:
            ...     try:
            ...         grads = scaler.unscale(optimizer, [scaler.scale(1.0)])
            ...         scaler.step(optimizer, [(grads[0] * batch, w)])
            ...         scaler.update()
            ...     except (TypeError, ValueError):
            ...         scaler.abandon()
            >>> float(w), int(scaler.attempted_steps)
            (0.5, 1)
        """
        self._calls.end()
        return self._once(self._pending.clear)

    def state_dict(self) -> dict[str, float]:
        """Return the manager's state as numbers, to be saved after `update`; empty where scaling is not enabled.

        A `tf.train.Checkpoint(scaler=scaler)` holds the same; a graph's Saver holds its variables.

        Returns:
            The numbers, by their names.

        Raises:
            RuntimeError: It is called in a graph, or in a `tf.function`.

        Example:
            >>> GradScaler(init_scale=8).state_dict()
            {'loss_scale': 8.0, 'good_steps': 0, 'bad_steps': 0}
        """
        self._refuse_in_graph("state_dict")
        return self.manager.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Go on from what `state_dict` returned.

        Args:
            state_dict: The numbers, by their names.

        Raises:
            ValueError: It is of another kind of manager, or of a scaler that was not enabled.
            RuntimeError: It is called in a graph, or in a `tf.function`.

        Example:
            >>> scaler = GradScaler()
            >>> scaler.load_state_dict({"loss_scale": 8.0, "good_steps": 1, "bad_steps": 0})
            >>> float(scaler.loss_scale)
            8.0
        """
        self._refuse_in_graph("load_state_dict")
        if self._enabled:
            self.manager.load_state_dict(state_dict)

    def _scale_to_divide_by(self) -> tf.Tensor:
        # Not the property, whose reads are taken for the user's.
        return super().loss_scale if self._enabled else tf.constant(1.0)

    def _settings_to_show(self) -> list[str]:
        shown = {"enabled": (self._enabled, True), "is_distributed": (self._is_distributed, False)}
        return [f"{name}={value!r}" for name, (value, default) in shown.items() if value != default]

    def _averaged(self, grads: Gradients, *, are_scaled: bool = True) -> list[Gradient]:
        """Return the mean of gradients over Horovod's workers, if they train together."""
        if not self._is_distributed:
            return list(grads)
        names = [f"gradient {index}" for index in range(len(grads))]
        return self._scaler.average_over_workers(grads, names, self._scaler.distribution(), are_scaled=are_scaled)

    def _step_of(self, adapter: OptimizerAdapter, grads: Gradients) -> OptimizerStep:
        known = self._calls.found_by_unscale(adapter.optimizer)
        if known is not None:
            return OptimizerStep(adapter, grads, grads, known)
        if self._enabled:
            self._losses.warn_if_not_scaled(grads)
        grads = self._averaged(grads)
        return OptimizerStep(adapter, grads, self._scaler.unscale(grads) if self._enabled else grads, None)

    def _run(self, steps: Sequence[OptimizerStep]) -> tf.Operation:
        """Run the steps of several optimizers together, and keep the result for `update`."""
        distribution = self._scaler.distribution()
        adapters = [step.adapter for step in steps]
        adapter = adapters[0] if len(adapters) == 1 else AdaptersTogether(adapters)
        grads = adapter.typed([grad for step in steps for grad in step.true_grads])
        done, result = self._scaler.run(Step(adapter, grads), distribution, known_together(steps))
        loss_scale = self._scale_to_divide_by()
        scaled = [step.apply_scaled(loss_scale, result.applied) for step in steps]
        before = [op for op in [done, *scaled, *self._calls.ops()] if op is not None]
        return tf.group(*before, *([self._keep(result, before, distribution)] if self._enabled else []))

    def _keep(self, result: StepResult, before: Sequence[tf.Operation], distribution: Distribution) -> tf.Operation:
        def add() -> tf.Operation:
            with tf.control_dependencies(before):
                return self._pending.add(result)

        return distribution.once(add)

    def _set(self, new_scale: float | tf.Tensor, result: StepResult) -> tf.Operation:
        has_set = self.manager.set_loss_scale(new_scale)
        # If the manager refuses the scale, which in a graph is known only when it runs, no step is counted.
        with tf.control_dependencies([] if has_set is None else [has_set]):
            return conditional_update(self._pending.steps > 0, [], lambda _: self.manager.note_step(result.applied))

    def _once(self, function: Callable[[], tf.Operation]) -> tf.Operation:
        return current_distribution(self._is_distributed).once(function) if on_replica() else function()

    def _refuse_if_none_stepped(self) -> list[tf.Operation]:
        """Stop if no step is known on the device; whether one was built here is known already."""
        message = "update was called, and no optimizer has stepped since the last update: call step first."
        if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
            raise RuntimeError("update was built before any step: build the steps first, and update in the same graph.")
        steps = self._pending.steps
        if not tf.executing_eagerly():
            return [tf.debugging.Assert(steps > 0, [message])]
        if not steps > 0:
            raise RuntimeError(message)
        return []

    def _refuse_in_graph(self, verb: str) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{verb} was called in a graph, where nothing has a value yet: call it eagerly, outside of any "
                "tf.function. A graph of TF1 has its state in variables, which tf.compat.v1.train.Saver saves."
            )


def _make_variables(adapter: OptimizerAdapter) -> None:
    """Make an optimizer's variables, or say how to make them where a `tf.function` makes none any more."""
    try:
        adapter.prepare(adapter.variables)
    except ValueError as error:
        # Variables of Keras are refused when they are made; those of TensorFlow 1 when the trace ends, in TensorFlow's
        # own words.
        if tf.executing_eagerly() or "ariables" not in str(error):
            raise
        kind, names = type(adapter.optimizer).__name__, ", ".join(adapter.names)
        raise ValueError(
            f"{kind} has no variables yet for {names}, and a tf.function makes none when it is traced again: call "
            "scaler.prepare(optimizer, variables) before the function is first called."
        ) from error
