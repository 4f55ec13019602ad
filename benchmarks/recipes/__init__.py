"""Tells what each recipe of precision, memory and state costs and saves; `python -m benchmarks.recipes`."""
