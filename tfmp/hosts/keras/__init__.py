"""Optimizers of Keras 3, Keras 2 and tf_keras, none of which is imported here: how their updates are compiled."""
