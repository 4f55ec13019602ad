"""What all rooms of tfmp ask of any Keras: Keras 3, Keras 2.15, or tf_keras."""
