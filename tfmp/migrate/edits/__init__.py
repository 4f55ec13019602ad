"""What rules yield, and how it is applied to the text of a script."""
