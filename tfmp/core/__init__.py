"""The path of a gradient through a step, in plain TensorFlow: it knows no framework of optimizers, and no Keras."""
