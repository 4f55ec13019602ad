"""What observes steps without changing them: ranges of gradients, and records of graphs."""
