"""Rules on the NPU bridge."""
