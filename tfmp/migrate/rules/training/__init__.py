"""Rules on what a training loop does with the global step, and with tensors by name."""
