"""What computes in half precision: autocast for raw TensorFlow, levels for Keras, and float32 storage of variables."""
