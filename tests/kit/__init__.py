"""What the tests of several folders use: hosts that take steps, and an oracle in NumPy of what the steps must do."""
