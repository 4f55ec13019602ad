"""Rules on loss scaling and mixed precision without `tf.contrib`."""
