"""Rewrites legacy TensorFlow 1 scripts where the rewrite is certain, and lists what is left for a person.

`python -m tfmp.migrate PATH...` runs it. TensorFlow is not needed.

`cli` reads the files and runs the rules of `rules` on each script. The rules read a script through `analysis` and the
facts of `tables`, and yield the results of `edits`, which applies them to the text.
"""
