"""Leaves modules out of the collection that the installed packages cannot run, or need not run.

The doctests leave out the front-ends whose Keras is not installed. With Keras 3, the tests of `tfmp.migrate` are left
out: the environment with TensorFlow 2.15 runs them.
"""

import importlib.metadata
import importlib.util

_KERAS3 = importlib.metadata.version("keras").startswith("3.")

collect_ignore = (
    ["tfmp/optimizers/keras215.py"] if _KERAS3 else ["tfmp/optimizers/keras3.py", "tfmp/optimizers/keras3_update.py"]
)
if importlib.util.find_spec("tf_keras") is None:
    collect_ignore.append("tfmp/optimizers/tf_keras.py")
if _KERAS3:
    # The rewriter does not import TensorFlow, and its tables list the names of TensorFlow 2.15.
    collect_ignore += ["tfmp/migrate", "tests/migrate"]
