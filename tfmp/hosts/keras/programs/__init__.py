"""The programs that update variables in the place of optimizers of Keras."""
