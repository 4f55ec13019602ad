"""Arithmetic on gradients: None, dense tensors and IndexedSlices."""
