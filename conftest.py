"""Leaves out of the doctests the front-ends whose Keras is not here, and the rewriter's tests of all lanes but one."""

import importlib.metadata
import importlib.util

_KERAS3 = importlib.metadata.version("keras").startswith("3.")

collect_ignore = (
    ["tfmp/optimizers/keras215.py"] if _KERAS3 else ["tfmp/optimizers/keras3.py", "tfmp/optimizers/keras3_update.py"]
)
if importlib.util.find_spec("tf_keras") is None:
    collect_ignore.append("tfmp/optimizers/tf_keras.py")
if _KERAS3:
    # The rewriter knows no TensorFlow, and its tables are those of 2.15.
    collect_ignore += ["tfmp/migrate", "tests/migrate"]
