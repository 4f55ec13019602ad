"""Rules on training loops: the global step, and tensors that are fetched by name."""
