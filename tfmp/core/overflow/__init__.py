"""Which gradients overflowed: the detectors, the check of a replica's gradients, and the counts by variable."""
