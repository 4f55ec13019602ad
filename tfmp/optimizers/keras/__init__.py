"""What the front-ends for all versions of Keras share."""
