"""Runnable examples: BERT pre-training with tf.estimator, digits in a session loop."""

import os

# TensorFlow reads this when it is imported, which is after this package. The INFO lines of its C++
# part would bury what an example prints.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
