"""Rewrites legacy TensorFlow 1 scripts where it is certain how; lists what is left for a person.

`python -m tfmp.migrate PATH...` runs it. It needs no TensorFlow.
"""
