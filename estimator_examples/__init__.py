"""Runnable examples: BERT with tf.estimator, digits in a session loop and with Keras, a GAN in a hand-written loop."""

import os

# TensorFlow reads this variable when it is imported, which happens after the import of this package. Otherwise the INFO
# lines of TensorFlow's C++ code would hide the output of an example.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
