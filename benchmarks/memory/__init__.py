"""Measures what recomputation and accumulation save of the memory of a training; `python -m benchmarks.memory`."""
