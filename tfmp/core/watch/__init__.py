"""Notices gradients that are not those of a scaled loss, or are not unscaled."""
