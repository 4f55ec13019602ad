"""Checks unscaled gradients before the user clips or changes them."""

from tfmp.core.overflow.gradient_check import Scaling
from tfmp.core.overflow.results import LocalResult
from tfmp.core.step.facts import Facts
from tfmp.core.tracing import without_autograph
from tfmp.types import Gradients


@without_autograph
def check_early(grads: Gradients, facts: Facts, *, of_micro_batches: bool = False) -> LocalResult:
    """Check this replica's unscaled gradients; `of_micro_batches` is as in `EarlierCheck`."""
    num_summed = facts.distribution.num_summed
    return facts.gradient_check(Scaling.UNSCALED, num_summed, of_micro_batches=of_micro_batches).of(grads)
