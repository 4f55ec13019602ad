"""Rules on names and behavior that only TensorFlow 1 has."""
