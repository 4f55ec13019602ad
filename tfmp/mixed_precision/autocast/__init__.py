"""Half precision for raw TensorFlow code: each op computes in the type that is safe for it."""
