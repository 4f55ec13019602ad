"""Checks unscaled gradients before the user clips or changes them."""

from tfmp.core.gradients.origins import derivation_of
from tfmp.core.overflow.gradient_check import Scaling
from tfmp.core.overflow.local_check import LocalCheck
from tfmp.core.step.facts import Facts
from tfmp.core.tracing import without_autograph
from tfmp.types import Gradients


@without_autograph
def check_early(grads: Gradients, facts: Facts, *, already_checked: bool = False) -> LocalCheck:
    """Return what is known of gradients, to be passed to the step as `known`.

    Args:
        grads: This replica's gradients, unscaled.
        facts: What the step must know of them.
        already_checked: True if these are the mean of micro-batches that the detector has checked one by one. Only the
            finiteness of the mean is checked then.
    """
    derivation, num_summed = derivation_of(grads), facts.distribution.num_summed
    if derivation is not None and derivation.is_unscaling and num_summed == 1 and facts.may_check_scaled:
        # In a graph the unscaled gradients may then not be computed at all.
        scaling, read = Scaling.CHECK_SCALED, derivation.scaled
    else:
        scaling, read = Scaling.UNSCALED, grads
    check = facts.check(scaling, num_summed, already_checked=already_checked)
    return check.of(read)._replace(checked=grads)
