"""Recomputation: keep the inputs of a block instead of its activations, and compute these again for the gradients."""
