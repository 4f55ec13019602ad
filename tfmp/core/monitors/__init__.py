"""What observes steps without changing them: ranges of gradients, records of graphs, a notice about bfloat16."""
