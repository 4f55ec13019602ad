"""What looks at steps without changing them: the ranges of gradients, records of graphs, a notice."""
