"""Gradient accumulation: sums of the gradients of several micro-batches, which are applied like those of one batch."""
