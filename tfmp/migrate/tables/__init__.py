"""What rules know of TensorFlow and of the NPU bridge."""
