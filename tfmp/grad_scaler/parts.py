"""The parts of a step: the optimizers that users pass, with their adapters and gradients."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from tfmp.any_keras.which import is_optimizer_of_keras3, keras_of
from tfmp.core import lists, settings
from tfmp.core.adapter import OptimizerAdapter, is_overwritten, names_of
from tfmp.core.distribute.horovod_detection import is_horovods
from tfmp.core.overflow.detectors import KINDS
from tfmp.core.overflow.found import Checked, Found
from tfmp.hosts.keras.adapters import Keras3Adapter, KerasAdapter, LegacyAdapter
from tfmp.hosts.keras.program import ProgramsByOptimizer
from tfmp.hosts.tf1.adapter import TF1Adapter
from tfmp.types import Done, Gradient, Gradients, GradsAndVars


@runtime_checkable
class ScaledGradientsOptimizer(Protocol):
    """A protocol for optimizers that unscale gradients and skip steps themselves, for example in one fused kernel.

    Any object with this method qualifies. `GradScaler` calls it at every step, on every replica, and checks the
    gradients before.

    Examples:
        >>> class Fused:
        ...     def apply_scaled_gradients(self, grads_and_vars, loss_scale, finite):
        ...         for grad, variable in grads_and_vars:
        ...             variable.assign_sub(tf.where(finite, grad / loss_scale, 0.0))
        >>> isinstance(Fused(), ScaledGradientsOptimizer)
        True

    Source: the contract of torch.amp for custom optimizers (`_step_supports_amp_scaling`).

    Provisional: a minor version may change it.
    """

    def apply_scaled_gradients(
        self, grads_and_vars: GradsAndVars, loss_scale: tf.Tensor, finite: tf.Tensor
    ) -> tf.Operation:
        """Divide gradients by the loss scale and apply them if they are finite; otherwise change nothing.

        Args:
            grads_and_vars: Pairs of a gradient and its variable; no gradient is None.
            loss_scale: The number by which to divide the gradients, a float32 scalar; 1 if `GradScaler.unscale` has
                unscaled them already, or if scaling is not enabled.
            finite: A boolean scalar, True if the gradients are finite on every replica, and the step is not skipped as
                a spike. If it is False, no variable may change.

        Returns:
            The op that does this; None in eager mode.
        """


def validated_steps(
    steps: Iterable[tuple[Any, GradsAndVars]], kwargs: Mapping[str, Any], *, refuses_complex: bool
) -> list[tuple[Any, list[tuple[Gradient, Any]]]]:
    """Return optimizers, each with its pairs of gradients and variables, or raise an error before any has stepped."""
    what, advice = "pairs of an optimizer and its grads_and_vars", "pass [(optimizer, zip(grads, variables)), ...]"
    listed = lists.items("steps", steps, what, advice)
    if not listed:
        raise ValueError(f"there is no optimizer to step: pass {what}.")
    for pair in listed:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"steps must be {what}, and it holds {pair!r} of type {type(pair).__name__}: {advice}.")
    validated = [(validated_optimizer(optimizer), lists.pairs(grads_and_vars)) for optimizer, grads_and_vars in listed]
    if len({id(optimizer) for optimizer, _ in validated}) < len(validated):
        raise ValueError("an optimizer is given twice: pass each optimizer once, with all of its grads_and_vars.")
    given = ", ".join(kwargs)
    for optimizer, pairs in validated:
        if not pairs:
            raise ValueError("there are no gradients to step with: pass pairs of a gradient and its variable.")
        lists.refuse_all_none(grad for grad, _ in pairs)
        if any(is_overwritten(variable) for _, variable in pairs):
            raise NotImplementedError(
                'the "gradient" of a variable is its next value (float8 scales), which tfmp.GradScaler would unscale: '
                "train it with tfmp.LossScaleOptimizer."
            )
        if refuses_complex:
            lists.refuse_complex([grad for grad, _ in pairs], names_of(variable for _, variable in pairs))
        kind = type(optimizer).__name__
        if kwargs and isinstance(optimizer, ScaledGradientsOptimizer):
            raise TypeError(f"{kind}.apply_scaled_gradients takes no {given}: leave it out.")
        if kwargs and len(validated) > 1 and not isinstance(optimizer, tf.compat.v1.train.Optimizer):
            raise TypeError(
                f"{given} would be passed to each optimizer, and {kind} is not TF1's: leave it out, or step each "
                "optimizer by itself."
            )
    return validated


def validated_optimizer(optimizer: Any) -> Any:  # noqa: ANN401 - of any host
    """Return what the user passed as the optimizer, or raise an error if `GradScaler` cannot step with it."""
    settings.refuse_class("optimizer", optimizer)
    kind = type(optimizer).__name__
    if not isinstance(optimizer, ScaledGradientsOptimizer) and not hasattr(optimizer, "apply_gradients"):
        raise TypeError(
            f"optimizer must be an optimizer of Keras or TF1, with apply_gradients, got {optimizer!r} of type {kind}."
        )
    if "LossScaleOptimizer" in kind:
        raise ValueError(f"the optimizer is a {kind}, which scales the loss itself: step with the optimizer inside it.")
    if isinstance(optimizer, tf.compat.v1.train.SyncReplicasOptimizer):
        raise TypeError(
            "the optimizer is a SyncReplicasOptimizer, whose step cannot stand in a conditional: write "
            "SyncReplicasOptimizer(tfmp.LossScaleOptimizer(opt, manager), ...), without a tfmp.GradScaler."
        )
    if is_horovods(optimizer):
        raise ValueError(
            "the optimizer is one of Horovod's, which averages gradients itself: step with the optimizer inside it, "
            "and pass is_distributed=True to tfmp.GradScaler."
        )
    with tf.init_scope():
        in_graph = not tf.executing_eagerly()
    # Legacy optimizers, which can step in a TF1 graph, have no `build`.
    if in_graph and hasattr(optimizer, "build") and hasattr(optimizer, "iterations"):
        raise NotImplementedError(
            f"the optimizer is Keras' {kind}, which has no op that a session could run: in a TF1 graph pass a "
            "tf.compat.v1.train.Optimizer, or train eagerly or in a tf.function."
        )
    return optimizer


def adapter_of(
    optimizer: Any,  # noqa: ANN401 - of any host
    variables: Sequence[Any],
    kwargs: Mapping[str, Any],
    programs: ProgramsByOptimizer,
) -> OptimizerAdapter:
    """Return the adapter for an optimizer's type."""
    is_of_keras = keras_of(optimizer, "optimizers.Optimizer") is not None
    if isinstance(optimizer, ScaledGradientsOptimizer):
        return ScaledGradientsAdapter(optimizer, variables)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return TF1Adapter(optimizer, variables, kwargs)
    if keras_of(optimizer, "optimizers.legacy.Optimizer") is not None:
        return LegacyAdapter(optimizer, variables, kwargs)
    if not kwargs and is_of_keras and programs.of(optimizer).runs_keras_alone([optimizer]):
        # A user's class may do more in `apply_gradients` than Keras' own classes do.
        kind = Keras3Adapter if is_optimizer_of_keras3(optimizer) else KerasAdapter
        return kind(optimizer, variables, programs=programs.of(optimizer))
    return OptimizerAdapter(optimizer, variables, kwargs)


def prepare(adapter: OptimizerAdapter) -> None:
    """Make an optimizer's own variables, if they can be made now."""
    try:
        adapter.prepare(adapter.variables)
    except ValueError as error:
        # The errors that Keras and TensorFlow raise when variables are made contain this word.
        if tf.executing_eagerly() or "ariables" not in str(error):
            raise
        raise ValueError(
            f"{type(adapter.optimizer).__name__} has no variables yet for {', '.join(adapter.names)}, and a "
            "tf.function makes none when it is traced again: call scaler.prepare(optimizer, variables) before the "
            "function is first called."
        ) from error


class ScaledGradientsAdapter(OptimizerAdapter):
    """The adapter for a `ScaledGradientsOptimizer`, which is called at every step, outside of the conditional."""

    def apply(self, grads: Gradients) -> Done:
        """Do nothing: `apply_scaled` calls the optimizer."""
        del grads
        return tf.no_op()

    def apply_scaled(self, grads: Gradients, loss_scale: tf.Tensor, finite: tf.Tensor) -> tf.Operation:
        """Let the optimizer apply the gradients that were passed to the step, or skip them."""
        return self.optimizer.apply_scaled_gradients(self._pairs(grads), loss_scale, finite)


class AdaptersTogether(OptimizerAdapter):
    """Treats the optimizers of several adapters as one optimizer, whose gradients are those of all in one list."""

    def __init__(self, adapters: Sequence[OptimizerAdapter]) -> None:
        super().__init__(None, [variable for adapter in adapters for variable in adapter.variables])
        self.dtypes = [dtype for adapter in adapters for dtype in adapter.dtypes]
        self._adapters = adapters

    @property
    def optimizers(self) -> Sequence[Any]:
        """The optimizers of all adapters."""
        return [adapter.optimizer for adapter in self._adapters]

    def apply(self, grads: Gradients) -> Done:
        """Let each optimizer apply its own part of the gradients."""
        rest = iter(grads)
        parts = [list(itertools.islice(rest, len(adapter.variables))) for adapter in self._adapters]
        return tf.group(*map(apply_unscaled, self._adapters, parts))


def apply_unscaled(adapter: OptimizerAdapter, grads: Gradients) -> Done:
    """Apply gradients in true magnitude: by the optimizer's program, or by the optimizer itself if it has none."""
    program = adapter.program(grads)
    return adapter.apply(grads) if program is None else program.run(grads, tf.ones([]), None)


class Part(NamedTuple):
    """The part of one optimizer in a step, with its gradients, averaged over Horovod's processes."""

    adapter: OptimizerAdapter
    grads: Gradients
    #: What was found of groups of the gradients when they were unscaled; empty if they are still scaled.
    checks: Sequence[Checked]
    #: The gradients before the step unscaled them, for a `ScaledGradientsOptimizer`; None if the user unscaled some.
    scaled: Gradients | None = None


def joined(parts: Sequence[Part]) -> Checked:
    """Join what is known of the gradients of all parts, which are unscaled, each with one window at most."""
    checks = [check for part in parts for check in part.checks]
    each = [check.found for check in checks]
    found = each[0]
    if len(checks) > 1:
        largest = [found.max_abs for found in each if found.max_abs is not None]
        complete = [found.usable if found.complete is None else found.complete for found in each]
        found = Found(
            usable=tf.reduce_all([found.usable for found in each]),
            # If it is unknown for one group, the step computes it from the gradients of all.
            max_abs=tf.reduce_max(largest) if len(largest) == len(checks) else None,
            complete=None if all(found.complete is None for found in each) else tf.reduce_all(complete),
        )
    unclipped = [check.unclipped for check in checks if check.unclipped is not None]
    return Checked(
        found,
        grads=[grad for check in checks for grad in check.grads],
        # Otherwise the detector has not seen all gradients.
        of_window=all(check.of_window for check in checks),
        window_counts=_window_counts(parts) if any(check.window_counts is not None for check in checks) else None,
        unclipped=[grad for group in unclipped for grad in group] if len(unclipped) == len(checks) else None,
    )


def _window_counts(parts: Sequence[Part]) -> tf.Tensor:
    """Return how many values of each gradient overflowed in windows; 0 for gradients of none."""
    counts = []
    for part in parts:
        num_variables = len(part.adapter.variables)
        of_windows = [check.window_counts for check in part.checks if check.window_counts is not None]
        counts.append(of_windows[0] if of_windows else tf.zeros([num_variables, len(KINDS)], tf.int64))
    return tf.concat(counts, axis=0)
