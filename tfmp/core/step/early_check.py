"""Checks unscaled gradients before the user clips or changes them."""

from tfmp.core.gradients.derived_gradients import derivation_of
from tfmp.core.overflow.gradient_check import Scaling
from tfmp.core.overflow.results import LocalResult
from tfmp.core.step.facts import Facts
from tfmp.core.tracing import without_autograph
from tfmp.types import Gradients


@without_autograph
def check_early(grads: Gradients, facts: Facts, *, of_micro_batches: bool = False) -> LocalResult:
    """Check this replica's unscaled gradients; `of_micro_batches` is as in `EarlierCheck`."""
    derivation, num_summed = derivation_of(grads), facts.distribution.num_summed
    if derivation is not None and derivation.is_unscaling and num_summed == 1 and facts.may_check_scaled:
        # In a graph the unscaled gradients may then not be computed at all.
        scaling, read = Scaling.CHECK_SCALED, derivation.scaled
    else:
        scaling, read = Scaling.UNSCALED, grads
    return facts.gradient_check(scaling, num_summed, of_micro_batches=of_micro_batches).of(read)
