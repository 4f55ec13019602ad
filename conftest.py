"""Leaves modules out of the collection that the installed packages cannot run, or need not run.

The doctests leave out the front-ends whose Keras is not installed, and what needs JAX, mutmut or MkDocs where these are
not.
With Keras 3, the tests of `tfmp.migrate` are left out: the environment with TensorFlow 2.15 runs them.
"""

import importlib.metadata
import importlib.util

import pytest

_KERAS3 = importlib.metadata.version("keras").startswith("3.")

_OTHER_KERAS = ["keras215.py"] if _KERAS3 else ["keras3.py", "keras3_scope.py"]
if importlib.util.find_spec("tf_keras") is None:
    _OTHER_KERAS.append("tf_keras.py")
collect_ignore = [
    f"tfmp/{package}/{module}"
    for package in ("optimizers", "optimizer_state", "recomputation/layers")
    for module in _OTHER_KERAS
]
if not _KERAS3:
    # Its example is an optimizer of Keras 3.
    collect_ignore += ["tfmp/optimizer_state/half_state.py", "docs/howto/half_state.md"]
if importlib.util.find_spec("jax") is None:
    collect_ignore += [
        f"tools/{name}.py" for name in ("exported_program", "run_exported_steps", "run_exported_trainings")
    ]
if importlib.util.find_spec("mutmut") is None:
    collect_ignore.append("tools/mutation")
if importlib.util.find_spec("mkdocs") is None:
    collect_ignore.append("tools/site/notebooks.py")
if _KERAS3:
    # No TensorFlow that Keras 3 runs on has Estimator.
    collect_ignore.append("tfmp/npu/estimator.py")
    # The rewriter does not import TensorFlow, and its tables list the names of TensorFlow 2.15.
    collect_ignore += ["tfmp/migrate", "tests/migrate"]

#: The page whose examples save models in the files of Keras.
_SAVING = "docs/howto/checkpoints.md"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Keras warn where it saves models, as the tests do that save some: Keras 3.15.1 does for any Dense."""
    ignored = "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    for item in items:
        if item.path.as_posix().endswith(_SAVING):
            item.add_marker(pytest.mark.filterwarnings(ignored))
