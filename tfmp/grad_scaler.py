"""GradScaler: loss scaling in hand-written loops, with the verbs of torch.amp."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.accumulation import GradientAccumulator
from tfmp.core.autograph import without_autograph
from tfmp.core.conditionals import call_either
from tfmp.core.distribute import current_distribution
from tfmp.core.findings import Findings
from tfmp.core.iteration import Calls, on_replica
from tfmp.core.managers import LossScaleManager, get_loss_scale_manager, validated_manager
from tfmp.core.optimizer_steps import (
    OptimizerStep,
    make_variables,
    names_of,
    seen_together,
    validate_kwargs,
    validate_optimizer,
    validated_pairs,
    validated_steps,
)
from tfmp.core.overflow import OverflowDetector, validated_detector
from tfmp.core.scaled_losses import ScaledLosses
from tfmp.core.scaler import LossScaler
from tfmp.core.step_properties import StepProperties
from tfmp.core.verdicts import Seen, Verdict
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
        manager: A `tfmp.LossScaleManager` that decides the scale, instead of the four settings.
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
        manager: LossScaleManager | None = None,
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
        #: What decides the scale; a checkpoint has its state.
        self.manager = get_loss_scale_manager(rule) if manager is None else validated_manager(manager, "manager")
        self._loss_scale_manager = self.manager
        self._is_distributed = settings.flag("is_distributed", is_distributed)
        self._scaler = LossScaler(self.manager, validated_detector(overflow_detector), self._is_distributed)
        # Tracked, so that a function that takes steps can be exported.
        self._overflow_counts = self._scaler.overflow_counts
        self._losses = ScaledLosses()
        self._findings = Findings()
        self._calls = Calls(is_strict=self._enabled)

    @property
    def enabled(self) -> bool:
        """Whether losses are scaled and steps are checked."""
        return self._enabled

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
        make_variables(optimizer, lists.variables("variables", variables))

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
        grads, window = self._scaler.take(given) if isinstance(given, GradientAccumulator) else (given, None)
        if all(grad is None for grad in grads):
            raise ValueError("every gradient is None: the loss depends on none of the variables.")
        if window is None and self._enabled:
            self._losses.warn_if_not_scaled(grads)
        true_grads = self._shared(grads, scaled=window is None)
        if window is None and self._enabled:
            true_grads = self._scaler.unscale(true_grads)
        is_window = window is not None
        seen = self._scaler.look_at(true_grads, judged=is_window) if self._enabled else Seen(tf.constant(True))
        if window is not None:
            seen = window._replace(usable=tf.logical_and(window.usable, seen.usable))
        self._calls.note_unscale(optimizer, seen)
        return true_grads

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
        taken = [self._step_of(optimizer, pairs, kwargs) for optimizer, pairs in validated_steps(steps)]
        if len({id(step.optimizer) for step in taken}) < len(taken):
            raise ValueError("an optimizer is given twice: pass each optimizer once, with all of its grads_and_vars.")
        validate_kwargs(taken)
        for each in taken:
            make_variables(each.optimizer, each.variables)
        # The decision on a window is the accumulator's.
        checks = self._enabled or any(step.is_of_window for step in taken)
        op = self._attempt(taken) if checks else tf.group(*(step.apply_unchecked() for step in taken))
        for step in taken:
            self._calls.note_step(step.optimizer, op)
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
                verdict = self._findings.verdict(self.manager.needs_max_abs)
                moved = self._scaler.update(verdict) if new_scale is None else self._set(new_scale, verdict)
            with tf.control_dependencies([] if moved is None else [moved]):
                return self._findings.clear()

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
        return self._once(self._findings.clear)

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

    def _shared(self, grads: Gradients, *, scaled: bool) -> list[Gradient]:
        if not self._is_distributed:
            return list(grads)
        return self._scaler.share(grads, [f"gradient {index}" for index in range(len(grads))], scaled=scaled)

    def _step_of(self, optimizer: Any, grads_and_vars: GradsAndVars, kwargs: dict[str, Any]) -> OptimizerStep:  # noqa: ANN401
        pairs = validated_pairs(optimizer, grads_and_vars)
        given = [grad for grad, _ in pairs]
        seen = self._calls.seen_by_unscale(optimizer)
        true_grads = given
        if seen is None:
            if self._enabled:
                self._losses.warn_if_not_scaled(given)
            given = self._shared(given, scaled=True)
            true_grads = self._scaler.unscale(given) if self._enabled else given
        return OptimizerStep(optimizer, given, true_grads, [variable for _, variable in pairs], seen, kwargs)

    def _attempt(self, steps: Sequence[OptimizerStep]) -> tf.Operation:
        distribution = current_distribution(self._is_distributed)
        names = names_of([variable for step in steps for variable in step.variables])

        def apply_fn(grads: Gradients) -> tf.Operation:
            rest = iter(grads)
            return tf.group(*(step.apply(list(itertools.islice(rest, len(step.variables)))) for step in steps))

        grads = [grad for step in steps for grad in step.typed_grads()]
        applied, verdict = self._scaler.attempt(grads, names, apply_fn, seen=seen_together(steps))
        loss_scale = self._scale_to_divide_by()
        own = [step.apply_scaled(loss_scale, verdict.applied) for step in steps]
        before = [op for op in [applied, *own, *self._calls.ops()] if op is not None]

        def note() -> tf.Operation:
            with tf.control_dependencies(before):
                return self._findings.note(verdict)

        return tf.group(*before, *([distribution.once(note)] if self._enabled else []))

    def _set(self, new_scale: float | tf.Tensor, verdict: Verdict) -> tf.Operation:
        has_set = self.manager.set_loss_scale(new_scale)
        # Nothing is counted if the scale is refused when it is known.
        with tf.control_dependencies([] if has_set is None else [has_set]):
            return call_either(self._findings.steps > 0, [], lambda _: self.manager.note_step(verdict.applied))

    def _once(self, function: Callable[[], tf.Operation]) -> tf.Operation:
        return current_distribution(self._is_distributed).once(function) if on_replica() else function()

    def _refuse_if_none_stepped(self) -> list[tf.Operation]:
        """Stop if no step is known on the device; whether one was built here is known already."""
        message = "update was called, and no optimizer has stepped since the last update: call step first."
        if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
            raise RuntimeError("update was built before any step: build the steps first, and update in the same graph.")
        steps = self._findings.steps
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
