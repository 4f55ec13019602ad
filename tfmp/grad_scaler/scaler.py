"""GradScaler: loss scaling for hand-written training loops, with the methods of torch.amp."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.accumulation import GradientAccumulator
from tfmp.core.adapter import OptimizerAdapter
from tfmp.core.distribute import SingleProcess
from tfmp.core.managers import OWN_MANAGERS, Specification, get_loss_scale_manager
from tfmp.core.overflow.detectors import OverflowDetector, validated_detector
from tfmp.core.overflow.found import Checked, Found
from tfmp.core.spikes.detector import SpikeDetector, validated_spike_detector
from tfmp.core.step.scaler import LossScaler
from tfmp.core.step.step import agree, apply_or_skip, drain, step_of
from tfmp.core.tracing import without_autograph
from tfmp.core.watch import UnscaledLossWatch
from tfmp.grad_scaler.calls import Call, Calls
from tfmp.grad_scaler.findings import Findings
from tfmp.grad_scaler.parts import (
    AdaptersTogether,
    Part,
    ScaledGradientsAdapter,
    adapter_of,
    apply_unscaled,
    joined,
    prepare,
    validated_optimizer,
    validated_steps,
)
from tfmp.hosts.keras.program import JitCompile, ProgramsByOptimizer
from tfmp.ranges.gradient_ranges import StepsWithRanges
from tfmp.types import Done, Gradient, Gradients, GradsAndVars

if TYPE_CHECKING:
    from typing_extensions import Self

_NEVER_SCALED = (
    "gradients are divided by the loss scale, but scale() was not called before: differentiate what scale() returns, "
    "not the loss itself."
)
#: The entry for the spike detector in what `state_dict` returns.
_SPIKES = "spike_detector"


class GradScaler(StepsWithRanges, tf.Module):
    """Loss scaling for hand-written training loops, with the methods of torch.amp.GradScaler.

    An iteration may have any number of losses and optimizers: those of any Keras, those of `tf.compat.v1.train`, or any
    object with `apply_gradients`. It calls these methods in this order:

        scale(loss)                        multiplies the loss by the loss scale; differentiate the result
        unscale(optimizer, grads)          optional; returns the unscaled gradients, to clip or inspect them
        step(optimizer, grads_and_vars)    applies the gradients if they are finite on every replica
        update()                           once, after all optimizers; adjusts the loss scale

    This works eagerly, in a `tf.function` with or without `jit_compile`, and in TF1 graphs, where the op that `update`
    returns runs all steps too. Under a `tf.distribute` strategy, call `scale`, `unscale` and `step` inside
    `strategy.run`, and `update` there or outside. If an optimizer steps eagerly, call `update` eagerly.

    One warning is logged if gradients are unscaled whose loss was not scaled. A scaler can be pickled and copied
    between iterations, in eager code. The copy has its settings and state, but no overflow counts.

    Args:
        init_scale: The loss scale at the start.
        growth_factor: Multiplies the scale when it grows; greater than 1.
        backoff_factor: Multiplies the scale after an iteration with an overflow, down to 1; between 0 and 1.
        growth_interval: The number of iterations in a row without an overflow after which the scale grows.
        enabled: If False, nothing is scaled or checked, and the methods may be called in any order.
        manager: Decides the loss scale in place of these four settings: what `tfmp.get_loss_scale_manager` takes.
        is_distributed: Whether Horovod's processes train together: they then agree on each step, and the scaler
            averages the gradients over them. Leave it at False with `hvd.DistributedGradientTape`, which averages
            gradients itself. The replicas of a `tf.distribute` strategy are recognized with either value.
        overflow_detector: Decides which gradients overflowed; by default a `tfmp.NonFiniteDetector`.
        jit_compile: Whether XLA compiles unscaling, clipping and the update of a Keras optimizer into one program:
            "auto", where that saves time; True, always; False, never. The programs of several optimizers in `step_all`
            get gradients that were unscaled outside.
        skip_spikes: A `tfmp.SpikeDetector`, which skips finite steps whose norm is an outlier; by default none are.

    Attributes:
        manager: The loss-scale manager. A `tf.train.Checkpoint` of the scaler saves its state.
        spike_detector: The `tfmp.SpikeDetector`, or None. A checkpoint saves its state too.

    Raises:
        TypeError: A setting is of the wrong type; or an argument is torch's `device`.
        ValueError: A setting is out of range; or both a manager and some of the four settings were passed.

    Examples:
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

    def __new__(cls, *args: Any, **kwargs: Any) -> "Self":  # noqa: ANN401 - the constructor's arguments
        """Refuse torch's arguments, of which Python would only say that they are too many; subclasses may have them."""
        if cls.__init__ is not GradScaler.__init__:
            return super().__new__(cls)
        settings.refuse_arguments_of_torch("tfmp.GradScaler(init_scale)", args[0] if args else None, kwargs)
        if len(args) > 1:
            raise TypeError(
                f"tfmp.GradScaler takes init_scale alone without a name, got {len(args)} arguments: write the others "
                "with their names, tfmp.GradScaler(init_scale, growth_factor=...)."
            )
        return super().__new__(cls)

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        manager: Specification | None = None,
        is_distributed: bool = False,
        overflow_detector: OverflowDetector | None = None,
        jit_compile: JitCompile = "auto",
        skip_spikes: SpikeDetector | None = None,
    ) -> None:
        super().__init__()
        rule = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        if manager is not None and settings.not_default(GradScaler, rule):
            raise ValueError("manager decides the scale by settings of its own: leave out init_scale and the like.")
        self._enabled = settings.flag("enabled", enabled)
        manager = get_loss_scale_manager(rule if manager is None else manager)
        # The names of this attribute and of `spike_detector` are parts of the keys in a checkpoint.
        self.manager = manager
        self._loss_scale_manager = manager
        self._is_distributed = settings.flag("is_distributed", is_distributed)
        self.spike_detector = validated_spike_detector(skip_spikes)
        if self.spike_detector is not None and not self._enabled:
            raise ValueError("skip_spikes with enabled=False: steps are not checked then. Leave one of them out.")
        self._scaler = LossScaler(
            manager, validated_detector(overflow_detector), self._is_distributed, spike_detector=self.spike_detector
        )
        # As attributes of this module these are tracked, so that a function that takes steps can be exported.
        self._overflow_counts = self._scaler.overflow_counts
        self._norms = self._scaler.norms
        self._watch = UnscaledLossWatch()
        self._jit_compile = jit_compile
        self._programs = ProgramsByOptimizer(jit_compile)
        self._findings = Findings(needs_max_abs=manager.needs_max_abs, has_detector=self.spike_detector is not None)
        self._calls = Calls(self._findings, is_strict=self._enabled)

    # Otherwise `inspect.signature` and `help` would show the parameters of `__new__`: (*args, **kwargs).
    __new__.__wrapped__ = __init__  # type: ignore[attr-defined] # as functools.wraps sets it

    @property
    def enabled(self) -> bool:
        """True if losses are scaled and steps are checked."""
        return self._enabled

    def is_enabled(self) -> bool:
        """Return `enabled`, as in torch.amp."""
        return self._enabled

    def get_scale(self) -> tf.Tensor:
        """Return `loss_scale`, as in torch.amp; there it is a Python number."""
        return self.loss_scale

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows, as in torch.amp.

        Raises:
            AttributeError: The manager's rule has no such setting; the same for the next two methods.
        """
        return float(self._setting_of_rule("growth_factor", "incr_ratio"))

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale falls after an overflow, as in torch.amp."""
        return float(self._setting_of_rule("backoff_factor", "decr_ratio"))

    def get_growth_interval(self) -> int:
        """Return the number of iterations in a row without an overflow after which the scale grows, as in torch.amp."""
        return int(self._setting_of_rule("growth_interval", "incr_every_n_steps"))

    def _setting_of_rule(self, name: str, name_in_manager: str) -> Any:  # noqa: ANN401 - a number of some kind
        config = self.manager.get_config() if isinstance(self.manager, OWN_MANAGERS) else {}
        if name_in_manager not in config:
            raise AttributeError(f"a {type(self.manager).__name__} has no {name}: ask the loss-scale manager instead.")
        return config[name_in_manager]

    @property
    def _absent_setter(self) -> NoReturn:
        """Not available: functions that were traced hold the settings. Make a new scaler."""
        raise AttributeError(
            "growth_factor, backoff_factor and growth_interval of a tfmp.GradScaler cannot be set, because a "
            "tf.function that was traced keeps the former values: make a new scaler, "
            "tfmp.GradScaler(scaler.get_scale().numpy(), growth_factor=...), and trace the function again."
        )

    set_growth_factor = set_backoff_factor = set_growth_interval = _absent_setter

    @property
    def loss_scale(self) -> tf.Tensor:
        """The loss scale, a float32 scalar; 1 if scaling is not enabled."""
        self._watch.may_be_scaled = True
        return super().loss_scale if self._enabled else tf.constant(1.0)

    def prepare(self, optimizer: Any, variables: Iterable[Any]) -> None:  # noqa: ANN401 - of any host
        """Make an optimizer's own variables, such as momenta, before a `tf.function` is traced.

        A `tf.function` can make variables only in its first trace. So call this method if an optimizer does not step in
        that trace, as a GAN's generator may not.

        Args:
            optimizer: The optimizer.
            variables: The variables that `step` will be called with, including those without a gradient.

        Raises:
            TypeError: `variables` are not variables; the rest as `step`.
            ValueError: The call is in a later trace of a `tf.function`.

        Examples:
            >>> w, optimizer = tf.Variable(1.0), tf.compat.v1.train.MomentumOptimizer(0.5, 0.9)
            >>> GradScaler().prepare(optimizer, [w])
            >>> float(optimizer.get_slot(w, "momentum"))
            0.0
        """
        listed = lists.variables("variables", variables)
        prepare(adapter_of(validated_optimizer(optimizer), listed, {}, self._programs))

    @without_autograph
    def scale(self, losses: Any) -> Any:  # noqa: ANN401 - of any structure
        """Multiply losses by the loss scale; differentiate the results instead of the losses.

        Args:
            losses: A loss in any floating-point dtype, or a structure of losses (lists, dicts, generators).

        Returns:
            The scaled losses in the same structure, in float32, or in float64 for a loss in float64. If scaling is not
            enabled, the losses unchanged.

        Raises:
            TypeError: A loss does not have a floating-point dtype.

        Examples:
            >>> scaled = GradScaler(init_scale=8).scale({"generator": 1.0, "critic": 2.0})
            >>> float(scaled["generator"]), float(scaled["critic"])
            (8.0, 16.0)
        """
        if not self._enabled:
            return losses
        self._watch.may_be_scaled = True
        return tf.nest.map_structure(self._scaler.scale, list(losses) if isinstance(losses, Iterator) else losses)

    @without_autograph
    def unscale(
        self,
        optimizer: Any,  # noqa: ANN401 - of any host
        grads: Iterable[Gradient] | GradientAccumulator,
    ) -> list[Gradient]:
        """Divide gradients by the loss scale, to clip or inspect them before `step`.

        Pass the result, clipped or not, to `step`, which does not divide it again. The gradients are checked here, so
        clipping hides no overflow. To drop the step, leave out `step`: `update` adjusts the loss scale by this check.

        You may call this method once for each group of an optimizer's gradients. Compute all gradients before the first
        call: `step` unscales those that were made before it, as in torch.amp, and takes later ones for unscaled.

        Args:
            optimizer: The optimizer with which `step` will be called.
            grads: The gradients of a scaled loss; None stays None. Or a `tfmp.GradientAccumulator`: its mean is
                returned, and it is emptied.

        Returns:
            The unscaled gradients, in float32, or in float64 for gradients in float64; the mean of an accumulator in
            the dtypes of its variables. With Horovod and `is_distributed=True` they are averaged over the processes.

        Raises:
            TypeError: `grads` is not a list of gradients, or a gradient is complex; or `optimizer` is a class.
            RuntimeError: Since the last update, `step` was called for this optimizer, or `unscale` with these
                gradients, or with an accumulator.
            ValueError: Every gradient is None.
            NotImplementedError: The call is in a conditional or a `tf.function` inside a TF1 graph.

        Examples:
            >>> w, optimizer = tf.Variable([3.0, 4.0]), tf.compat.v1.train.GradientDescentOptimizer(1.0)
            >>> scaler = GradScaler(init_scale=8)
            >>> grads = scaler.unscale(optimizer, [tf.constant([24.0, 32.0])])
            >>> scaler.step(optimizer, zip(tf.clip_by_global_norm(grads, 2.5)[0], [w]))
            >>> w.numpy().tolist()
            [1.5, 2.0]
        """
        settings.refuse_class("optimizer", optimizer)
        given = [] if isinstance(grads, GradientAccumulator) else lists.gradients(grads)
        call = self._calls.unscale(optimizer, given, of_window=isinstance(grads, GradientAccumulator))
        window, emptied = None, None
        if isinstance(grads, GradientAccumulator):
            # Replicas end a window together, whether or not scaling is enabled.
            given, window, emptied = drain(grads, self._scaler.distribution())
        averaged = self._averaged(given, are_scaled=window is None)
        unscaled, call.checked = self._unscaled(averaged, window)
        call.gradients.add(given if window is None else [], unscaled)
        found = agree(call.checked.found, self._scaler, self._scaler.distribution()) if self._enabled else None
        self._calls.note([call], found, [emptied])
        return unscaled

    def _averaged(self, grads: Gradients, *, are_scaled: bool = True) -> list[Gradient]:
        """Return the gradients averaged over Horovod's processes; warn if they `are_scaled`, and their loss was not."""
        lists.refuse_all_none(grads)
        grads = lists.of_tensors(grads)
        if self._enabled and are_scaled:
            self._watch.warn_if_not_scaled(grads, _NEVER_SCALED)
        # A disabled scaler works anywhere, also under strategies that are not supported.
        distribution = self._scaler.distribution() if self._enabled or self._is_distributed else SingleProcess()
        return distribution.mean(grads, [f"gradient {index}" for index in range(len(grads))], None)

    def _unscaled(self, averaged: list[Gradient], window: Checked | None = None) -> tuple[list[Gradient], Checked]:
        """Return the unscaled gradients and the result of checking them; those of a `window` are unscaled already."""
        checked = Checked(Found(tf.constant(True))) if window is None else window
        if not self._enabled:
            return averaged, checked._replace(unclipped=averaged)
        facts = self._scaler.facts()
        own = self._scaler.unscale(averaged, facts.loss_scale) if window is None else averaged
        found = facts.check(of_window=window is not None).find(own)
        if window is not None:
            found = window.found._replace(usable=tf.logical_and(window.found.usable, found.usable))
        return own, checked._replace(found=found, grads=own, unclipped=own)

    @without_autograph
    def step(self, optimizer: Any, grads_and_vars: GradsAndVars, **kwargs: Any) -> tf.Operation:  # noqa: ANN401
        """Apply gradients by an optimizer if they are finite on every replica; otherwise skip the step.

        Args:
            optimizer: An optimizer with `apply_gradients`, or a `tfmp.grad_scaler.ScaledGradientsOptimizer`.
            grads_and_vars: Pairs of a gradient and its variable: the gradients of a scaled loss, or what `unscale`
                returned, perhaps clipped. A variable whose gradient is None is not changed.
            **kwargs: Passed to the optimizer's `apply_gradients`, such as `global_step`.

        Returns:
            The op that does this; None in eager mode.

        Raises:
            TypeError: The optimizer has no `apply_gradients`; or `grads_and_vars` are not pairs; or a gradient is
                complex.
            ValueError: Every gradient is None; or the optimizer scales losses or averages gradients itself.
            RuntimeError: `step` was called for this optimizer since the last update, or `unscale` outside of the
                `tf.function` that `step` is called in; or it cannot be known which gradients are still scaled.
            NotImplementedError: The call is in a conditional or a `tf.function` inside a TF1 graph; or the optimizer is
                one of Keras, and the call is in a TF1 graph; or a variable holds float8 scales of Keras.
        """
        return self.step_all([(optimizer, grads_and_vars)], **kwargs)

    @without_autograph
    def step_all(self, steps: Iterable[tuple[Any, GradsAndVars]], **kwargs: Any) -> tf.Operation:  # noqa: ANN401
        """Apply the gradients of several optimizers if all of them are finite; otherwise skip the step of each.

        With a call of `step` for each optimizer instead, each steps if its own gradients are finite.

        Args:
            steps: Pairs of an optimizer and its `grads_and_vars`, as for `step`.
            **kwargs: Passed to the `apply_gradients` of every optimizer. Do not pass `global_step`, since each
                optimizer would increment it.

        Returns:
            The op that does this; None in eager mode.

        Raises:
            TypeError: An optimizer does not take the keyword arguments; the rest as `step`.
            ValueError: There is no optimizer, or one is passed twice.

        Examples:
            >>> v, w = tf.Variable(1.0), tf.Variable(1.0)
            >>> optimizers = [tf.compat.v1.train.GradientDescentOptimizer(0.5) for _ in range(2)]
            >>> GradScaler().step_all(zip(optimizers, [[(tf.constant(8.0), v)], [(tf.constant(float("inf")), w)]]))
            >>> float(v), float(w)
            (1.0, 1.0)
        """
        pairs = validated_steps(steps, kwargs, refuses_complex=self._enabled)
        calls = [self._calls.step(optimizer, [grad for grad, _ in own]) for optimizer, own in pairs]
        groups = [group for call in calls for group in call.groups]
        # A disabled scaler checks no gradients, but an accumulator has checked its own, and may drop the window.
        is_checked = self._enabled or any(group.checked.window_counts is not None for group in groups)
        facts = self._scaler.facts() if is_checked else None
        passed = [[grad for grad, _ in own] for _, own in pairs]
        adapters = [
            adapter_of(optimizer, [variable for _, variable in own], kwargs, self._programs) for optimizer, own in pairs
        ]
        for adapter, own in zip(adapters, passed, strict=True):
            adapter.refuse_unknown_variables(own)
        for adapter in adapters:
            prepare(adapter)
        # Gradients stay scaled, unless the user has unscaled some of them.
        parts = [
            self._part(call, adapter, own, unscales=bool(groups))
            for call, adapter, own in zip(calls, adapters, passed, strict=True)
        ]
        grads = [grad for part in parts for grad in part.grads]
        adapter = adapters[0] if len(adapters) == 1 else AdaptersTogether(adapters)
        checked = joined(parts) if groups else None
        loss_scale = one = tf.constant(1.0)
        if facts is not None:
            taken, found = apply_or_skip(step_of(adapter, grads, facts, are_scaled=checked is None, checked=checked))
            done, loss_scale = [taken], facts.loss_scale if self._enabled else one
        else:
            unclipped = grads if checked is None or checked.unclipped is None else checked.unclipped
            stored = self._scaler.norms.store_unchecked(unclipped, self._scaler.distribution)
            done, found = [apply_unscaled(adapter, grads), stored], Found(tf.constant(True))
        # An optimizer that skips steps by itself is called outside of the conditional.
        done += [
            part.adapter.apply_scaled(part.scaled or part.grads, loss_scale if part.scaled else one, found.applied)
            for part in parts
            if isinstance(part.adapter, ScaledGradientsAdapter)
        ]
        return self._calls.note(calls, found if self._enabled else None, done)

    def _part(self, call: Call, adapter: OptimizerAdapter, passed: Gradients, *, unscales: bool) -> Part:
        """Return the part of an optimizer in a step, with averaged gradients; unscaled if the step `unscales` them."""
        grads, checks = lists.of_tensors(passed), [group.checked for group in call.groups]
        rest = [grad if is_scaled else None for grad, is_scaled in zip(grads, call.scaled, strict=True)]
        if all(grad is None for grad in rest):
            return Part(adapter, grads, checks)
        averaged = self._averaged(rest)
        if not unscales:
            return Part(adapter, averaged, [], averaged)
        unscaled, check = self._unscaled(averaged)
        # The norm counts each gradient once.
        others = [None if is_counted else own for own, is_counted in zip(unscaled, call.got, strict=True)]
        given = [own if is_scaled else grad for grad, own, is_scaled in zip(grads, unscaled, call.scaled, strict=True)]
        return Part(adapter, given, [*checks, check._replace(unclipped=others)], None if checks else averaged)

    @without_autograph
    def update(self, new_scale: float | tf.Tensor | None = None) -> tf.Operation:
        """Adjust the loss scale according to what `unscale` and `step` have found since the last update.

        The manager counts the iteration as one step, which was applied if all of its steps were. If you dropped them
        after `unscale`, an overflow still counts as a skipped step; without one, the iteration counts toward the growth
        of the scale, as in torch.amp, but not as a step.

        Args:
            new_scale: Set the loss scale to this number or float32 scalar, instead of adjusting it.

        Returns:
            The op that does this; None in eager mode. In a TF1 graph the op also runs the steps that were built before.

        Raises:
            RuntimeError: Neither `unscale` nor `step` was called since the last update.
            TypeError: The new scale is not a number.
            ValueError: The new scale is not finite or not within the manager's bounds. When a function or a graph runs,
                this error and that of missing calls are an `InvalidArgumentError`.
            NotImplementedError: The scale of this kind of manager cannot be set.

        Examples:
            >>> scaler = GradScaler(init_scale=1024)
            >>> scaler.update(new_scale=256)
            >>> float(scaler.loss_scale)
            256.0
        """
        if new_scale is None:
            return self._calls.end(self._scaler.advance)

        def set_scale(found: Found, is_step: tf.Tensor | None) -> Done:
            has_set = self.manager.set_loss_scale(new_scale)
            # In a graph, the manager may refuse the scale when it runs: then no step is counted.
            with tf.control_dependencies([] if has_set is None else [has_set]):
                return self._scaler.count(found, is_step)

        return self._calls.end(set_scale, sets_scale=True)

    def abandon(self) -> tf.Operation:
        """Give up an iteration that was ended by an exception.

        Call this method if you catch an exception before `update`. Otherwise the calls before the exception count in
        the next iteration, where `unscale` or `step` may then be an error.

        What was found before the exception still adjusts the loss scale, and an overflow counts as a skipped step.
        Steps that were applied are not counted; the variables that they changed stay changed.

        Returns:
            The op that does this; None in eager mode.

        Examples:
            >>> scaler, optimizer = GradScaler(init_scale=8), tf.compat.v1.train.GradientDescentOptimizer(0.5)
            >>> try:
            ...     (grad,) = scaler.unscale(optimizer, [scaler.scale(float("inf"))])
            ...     tf.debugging.assert_all_finite(grad, "the loss diverges")
            ... except tf.errors.InvalidArgumentError:
            ...     scaler.abandon()
            >>> float(scaler.loss_scale), int(scaler.skipped_steps)
            (4.0, 1)
        """
        return self._calls.give_up(self._scaler.advance)

    def state_dict(self) -> dict[str, Any]:
        """Return the manager's state as numbers; empty if scaling is not enabled. Call this after `update`.

        A `tf.train.Checkpoint(scaler=scaler)` saves the same state.

        Raises:
            RuntimeError: The call is in a TF1 graph, where a `tf.compat.v1.train.Saver` saves the state, or in a
                `tf.function`.
        """
        _refuse_in_graph("state_dict")
        of_detector = {} if self.spike_detector is None else {_SPIKES: self.spike_detector.state_dict()}
        return {**self.manager.state_dict(), **of_detector} if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the state to one that `state_dict` returned; do nothing if scaling is not enabled.

        Raises:
            TypeError: A value is not a number.
            ValueError: The dictionary is from another kind of manager or from a scaler that was not enabled, or a value
                is out of range.
            RuntimeError: The call is in a graph or in a `tf.function`.

        Examples:
            >>> scaler = GradScaler()
            >>> scaler.load_state_dict({"loss_scale": 8.0, "good_steps": 1, "bad_steps": 0})
            >>> scaler.state_dict()
            {'loss_scale': 8.0, 'good_steps': 1, 'bad_steps': 0}
        """
        _refuse_in_graph("load_state_dict")
        if not self._enabled:
            return
        if self.spike_detector is None or not isinstance(state_dict, Mapping) or _SPIKES not in state_dict:
            self.manager.load_state_dict(state_dict)
            return
        of_manager = dict(state_dict)
        load_spikes = self.spike_detector.loading(of_manager.pop(_SPIKES))
        self.manager.load_state_dict(of_manager)
        load_spikes()

    def __copy__(self) -> "Self":
        """Return a copy that shares nothing with the scaler, as `copy.deepcopy` does."""
        return copy.deepcopy(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what `pickle` and `copy` make a scaler of.

        Raises:
            RuntimeError: An iteration is not finished; or the call is in a graph or in a `tf.function`.
        """
        _refuse_in_graph("pickle or copy")
        if self._calls.have_begun:
            raise RuntimeError("a tfmp.GradScaler is pickled or copied between iterations: call update() before.")
        others = {
            "enabled": self._enabled,
            "is_distributed": self._is_distributed,
            "overflow_detector": self._scaler.detector,
            "jit_compile": self._jit_compile,
            "skip_spikes": self.spike_detector,
        }
        # A manager holds functions that make its variables in graphs, and these cannot be pickled.
        parts: tuple[Any, ...] = (self.manager,)
        with contextlib.suppress(NotImplementedError):
            parts = (
                type(self.manager),
                self.manager.get_config(),
                self.manager.state_dict(),
                self.manager._step_counts(),
            )
        return _remade, (type(self), parts, others)

    def _settings_to_show(self) -> list[str]:
        shown = {"enabled": self._enabled, "is_distributed": self._is_distributed}
        return [f"{name}={value!r}" for name, value in settings.not_default(GradScaler, shown).items()]


def _refuse_in_graph(verb: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{verb} was called in a graph, where nothing has a value yet: call it eagerly, outside of any "
            "tf.function. In a TF1 graph the state is in variables, which tf.compat.v1.train.Saver saves."
        )


def _remade(kind: type[GradScaler], parts: tuple[Any, ...], others: Mapping[str, Any]) -> GradScaler:
    """Return a scaler of the parts that `GradScaler.__reduce__` returned."""
    manager, *rest = parts
    if rest:
        config, state, counts = rest
        manager = manager.from_config(config)
        manager.load_state_dict(state)
        manager._load_step_counts(counts)
    return kind(manager=manager, **others)
