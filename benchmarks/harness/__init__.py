"""What the commands share: what is measured, how turns are taken, what is printed."""
