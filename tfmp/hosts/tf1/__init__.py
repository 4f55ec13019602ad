"""The optimizers of TensorFlow 1, `tf.compat.v1.train`."""
