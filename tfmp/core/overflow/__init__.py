"""Overflow: the detectors, the check of one replica's gradients, and the counts of overflowed values by variable."""
