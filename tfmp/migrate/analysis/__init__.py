"""Analysis of one script: its names and calls, the flow of its values, its optimizers, and its TensorFlow version."""
