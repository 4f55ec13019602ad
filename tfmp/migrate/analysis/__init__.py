"""What rules learn of a script."""
