"""Rules on `tf.contrib`."""
