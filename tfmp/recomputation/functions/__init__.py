"""Functions of raw TensorFlow whose activations are computed again."""
