"""Leaves out of the doctests what needs Keras 3, where Keras is older."""

import importlib.metadata

collect_ignore = (
    [] if importlib.metadata.version("keras").startswith("3.") else ["docs/keras.md", "tfmp/optimizers/keras3.py"]
)
