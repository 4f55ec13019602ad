"""Tables of the names of TensorFlow, of tf.contrib and of the NPU bridge."""
