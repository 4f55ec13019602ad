"""Levels of precision for layers of Keras and for graphs of TensorFlow 1."""
