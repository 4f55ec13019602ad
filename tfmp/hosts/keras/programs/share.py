"""The share of one optimizer of Keras in a program that unscales gradients and applies them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfmp.core.gradients import arithmetic
from tfmp.hosts.keras.compiler import UpdateCompiler
from tfmp.hosts.keras.programs.alike import can_share_programs
from tfmp.hosts.keras.programs.alike_updates import Updates, has_alike, update_alike
from tfmp.hosts.keras.programs.clipping import clipped_by
from tfmp.hosts.keras.views import view_of
from tfmp.hosts.keras.which import is_optimizer_of_keras3
from tfmp.types import Gradients

# The optimizers of Keras 2 and Keras 3 have no common base class, and Keras' variables neither.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any

#: The attributes of a model's variable that change what an optimizer does with it.
_SETTINGS = ("trainable", "constraint", "overwrite_with_gradient")


class Share(NamedTuple):
    """What one optimizer does in a program, which takes gradients, the loss scale and norms as arguments."""

    compiler: UpdateCompiler
    #: One for each gradient.
    variables: Sequence[_Variable]
    #: Keyword arguments for the `apply_gradients` of an optimizer of Keras 2.
    options: Mapping[str, Any]
    #: The method of the optimizer that is called: "apply_gradients", or "apply" of Keras 3.
    method: str
    #: 1 if the program clips by the global norm in the optimizer's place, otherwise 0.
    num_norms: int

    def run(self, grads: Gradients, loss_scale: tf.Tensor, norms: Sequence[tf.Tensor]) -> None:
        """Unscale, clip and apply the gradients."""
        self._run(self.compiler.optimizer, self._updates(grads), [loss_scale, *norms])

    @property
    def can_be_split(self) -> bool:
        """True if `run_by_programs` can take the place of `run`, unless a gradient is None."""
        optimizer = self.compiler.optimizer
        clips_together = optimizer.global_clipnorm is not None and not self.num_norms
        is_plain = not clips_together and self.compiler.is_by_keras_alone(self.variables)
        return is_plain and can_share_programs(optimizer, self.variables)

    def has_alike(self, grads: Gradients) -> bool:
        """Return whether `run_by_programs` would call a program more than once."""
        return has_alike(self.compiler.optimizer, self._updates(grads))

    def run_by_programs(self, grads: Gradients, loss_scale: tf.Tensor, norms: Sequence[tf.Tensor]) -> None:
        """Do the same as `run` by compiled programs, each of which updates all variables that are alike."""
        update_alike(self._run, self.compiler.optimizer, self._updates(grads), [loss_scale, *norms])

    def _updates(self, grads: Gradients) -> Updates:
        return Updates(self.variables, grads)

    def _run(self, optimizer: _Optimizer, updates: Updates, tensors: Sequence[tf.Tensor]) -> None:
        loss_scale, *norms = tensors
        true_grads = arithmetic.unscale(updates.grads, loss_scale)
        self._clip_and_apply(optimizer, true_grads, updates.variables, norms)

    def _clip_and_apply(
        self, optimizer: _Optimizer, grads: Gradients, variables: Sequence[_Variable], norms: Sequence[tf.Tensor]
    ) -> None:
        if not norms:
            self._apply(optimizer, grads, variables)
            return
        (norm,) = norms
        with view_of(optimizer, global_clipnorm=None, clipvalue=None) as view:
            self._apply(view, clipped_by(norm, grads, optimizer), variables)

    def _apply(self, optimizer: _Optimizer, grads: Gradients, variables: Sequence[_Variable]) -> None:
        pairs = list(zip(grads, variables, strict=True))
        if self.method == "apply":
            _in_one_replica(lambda: optimizer.apply(list(grads), variables))
        elif is_optimizer_of_keras3(optimizer):
            _in_one_replica(lambda: optimizer.apply_gradients(pairs))
        else:
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=True, **self.options)

    def settings(self) -> object:
        """Return all that the program depends on, apart from the values of variables."""
        of_variables = [
            [variable, *(getattr(variable, name, None) for name in _SETTINGS)] for variable in self.variables
        ]
        compiler = self.compiler
        return [compiler.optimizer, compiler.code_version, of_variables, self.num_norms, self.options, self.method]


def _in_one_replica(apply: Callable[[], None]) -> None:
    """Call a function that applies gradients, such that Keras 3 does not sum them over replicas if there is only one.

    The sum would change nothing, but TensorFlow (2.15 to 2.21) would keep its graph, and the values of all variables
    that the graph uses, until the process ends.
    """
    context = None if tf.distribute.has_strategy() else tf.distribute.get_replica_context()
    if context is None:
        apply()
    else:
        context.merge_call(lambda _: apply())
