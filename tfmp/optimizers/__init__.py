"""The classes behind `tfmp.LossScaleOptimizer`: one front-end for each framework whose optimizers it wraps."""
