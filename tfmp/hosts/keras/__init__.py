"""The optimizers of Keras 3, Keras 2 and tf_keras. A Keras is imported by the modules named after it alone."""
