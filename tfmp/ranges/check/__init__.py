"""Finds out before the training what float16 would do to a model."""
