"""The wrapped optimizers: one thin front-end for each host framework."""
