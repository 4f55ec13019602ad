"""Where state is kept: variables of eager code and of graphs, and what belongs to a graph."""
