"""Checks the gradients of one replica: whether they can be applied, how large they are, which values overflowed."""

import enum
import functools
from collections.abc import Collection, Sequence

import tensorflow as tf

from tfmp.core.gradients import arithmetic, counting, finiteness, norms
from tfmp.core.overflow.detectors import KINDS, NonFiniteDetector, OverflowDetector
from tfmp.core.overflow.results import EarlierCheck, LocalResult
from tfmp.core.tensorflow_internals import within_xla
from tfmp.types import Gradients


class Scaling(enum.Enum):
    """Whether the gradients that are given to a check are scaled, and whether they are checked scaled."""

    #: The gradients are not scaled, or have been unscaled.
    UNSCALED = enum.auto()
    #: The gradients are scaled and are checked so. Dividing by a scale of 1 or more makes no value larger, so values
    #: that are finite while scaled are finite when unscaled.
    CHECK_SCALED = enum.auto()
    #: The gradients are scaled and are unscaled for the check.
    UNSCALE_FIRST = enum.auto()


class GradientCheck:
    """The check of one replica's gradients.

    The methods that check take the result of `checked_form`, which unscales the gradients if necessary. A step calls it
    again inside its conditional, where gradients arrive as arguments, only if it is skipped.

    Args:
        detector: Decides which gradients overflowed.
        loss_scale: The float32 scalar that the loss was multiplied by.
        scaling: Whether the gradients are scaled, and whether they are unscaled for the check.
        num_summed: The number of replicas whose gradients the optimizer sums after the check. A finite value that could
            overflow in that sum counts as an overflow, unless the detector ignores sums.
        overwritten: Indices of gradients that are the next values of their variables (Keras' float8 scales). They are
            never scaled, and are checked only for infinities and NaN.
        needs_max_abs: True if the manager needs the largest magnitude of the gradients.

    Examples:
        >>> check = GradientCheck(NonFiniteDetector(), tf.constant(8.0), Scaling.UNSCALE_FIRST)
        >>> grads = check.checked_form([tf.constant([16.0, float("nan")]), None])
        >>> bool(check.all_finite(grads)), check.counts(grads).numpy().tolist()
        (False, [[0, 1, 0], [0, 0, 0]])
        >>> float(check.max_abs(check.checked_form([tf.constant(-16.0)])))
        2.0
    """

    def __init__(
        self,
        detector: OverflowDetector,
        loss_scale: tf.Tensor,
        scaling: Scaling = Scaling.UNSCALED,
        num_summed: int = 1,
        overwritten: Collection[int] = (),
        needs_max_abs: bool = False,
    ) -> None:
        self._detector = detector
        self._loss_scale = loss_scale
        self._scaling = scaling
        self._num_summed = 1 if detector.ignores_sums else num_summed
        self._overwritten = overwritten
        self._needs_max_abs = needs_max_abs

    def checked_form(self, grads: Gradients) -> Gradients:
        """Return the gradients in the form in which they are checked: unscaled if `scaling` is `UNSCALE_FIRST`."""
        if self._scaling is not Scaling.UNSCALE_FIRST:
            return grads
        unscaled = arithmetic.unscale(grads, self._loss_scale)
        return [grads[index] if index in self._overwritten else grad for index, grad in enumerate(unscaled)]

    def of(self, grads: Gradients, earlier: EarlierCheck | None = None) -> LocalResult:
        """Check gradients in the checked form; those that were checked before and did not change are not read again.

        `earlier` is the result of an earlier check of gradients on this replica, if there was one.
        """
        if earlier is None:
            found = LocalResult(self.all_finite(grads))
        else:
            found, changed = earlier.result, arithmetic.without(grads, earlier.checked)
            if changed:
                found = found._replace(usable=tf.logical_and(self.all_finite(changed), found.usable))
        if self._needs_max_abs and found.max_abs is None:
            return found._replace(max_abs=self.max_abs(grads))
        return found

    def all_finite(self, grads: Gradients) -> tf.Tensor:
        """Return a boolean scalar: True if all gradients, in the checked form, can be applied."""
        to_detect = self._to_detect(grads)
        flags = [self._detector.all_finite(to_detect, self._loss_scale)]
        if self._scaling is Scaling.CHECK_SCALED:
            # The scale may come from a checkpoint and be lower than the manager would ever choose. Below 1, unscaling
            # makes values larger, and a finite scaled value could overflow. Such a step is skipped, although no value
            # is counted as overflowed, and the manager then raises the scale to its lowest.
            flags.append(self._loss_scale >= 1)
        if self._num_summed > 1:
            # NonFiniteDetector decides by the same sums of squares; in a graph TensorFlow computes them only once.
            flags.append(finiteness.all_finite(to_detect, self._num_summed))
        if self._overwritten:
            flags.append(finiteness.all_finite(self._next_values(grads)))
        return functools.reduce(tf.logical_and, flags)

    def max_abs(self, grads: Gradients) -> tf.Tensor:
        """Return the largest magnitude of the unscaled gradients, a float32 scalar; called with their checked form."""
        largest = norms.max_abs(self._to_detect(grads))
        return largest / self._loss_scale if self._scaling is Scaling.CHECK_SCALED else largest

    def squares(self, grads: Gradients) -> list[tf.Tensor]:
        """Return what `counts` needs to know which gradients it must read; in a graph the check has computed it too."""
        if not self._reads_suspects_only or tf.executing_eagerly():
            return []
        return [finiteness.halves_of_large_square_sums(self._to_detect(grads))]

    @property
    def _reads_suspects_only(self) -> bool:
        # A detector of another kind may also count finite values.
        return type(self._detector) is NonFiniteDetector and not within_xla()

    def counts(self, grads: Gradients, squares: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        """Count the values of each gradient that overflowed, as `OverflowDetector.counts` does.

        A value that could overflow in the sum over the replicas counts as infinite. In a gradient whose sum of squares
        is finite, there is neither such a value nor one that is not finite. The argument `squares` is what the method
        of this name returned for these gradients.
        """
        to_detect = self._to_detect(grads)
        if self._reads_suspects_only:
            known = squares[0] if squares else finiteness.halves_of_large_square_sums(to_detect)
            to_detect = finiteness.suspects(to_detect, known)
        counts = self._detector.counts(to_detect, self._loss_scale)
        if self._num_summed > 1:
            in_sum = counting.counts(to_detect, [lambda values: finiteness.overflows_in_sum(values, self._num_summed)])
            counts += tf.pad(in_sum, [[0, 0], [0, len(KINDS) - 1]])
        if self._overwritten:
            counts += NonFiniteDetector().counts(self._next_values(grads), self._loss_scale)
        return counts

    def _to_detect(self, grads: Gradients) -> Gradients:
        return [None if index in self._overwritten else grad for index, grad in enumerate(grads)]

    def _next_values(self, grads: Gradients) -> Gradients:
        return [grad if index in self._overwritten else None for index, grad in enumerate(grads)]
