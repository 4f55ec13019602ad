"""Monitors that show the loss scale during training."""
