"""Loss scaling in plain TensorFlow: no optimizer, no Keras, no session."""
