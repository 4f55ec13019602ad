"""What rules learn of the training in a script: gradients, manual scaling, wrappers, the global step."""
