"""Storage: the variables that hold state, in graphs and in eager code, and the objects that belong to one graph."""
