"""Sums of the gradients of several micro-batches, to be applied as those of one batch."""
