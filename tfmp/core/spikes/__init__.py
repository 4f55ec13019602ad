"""Spikes: steps whose gradients are finite, but whose norm is so large that applying them would do harm."""
