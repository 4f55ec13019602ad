"""Layers of Keras whose activations are computed again."""
