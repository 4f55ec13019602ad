"""The places where tfmp uses private names of TensorFlow and Keras, all others being refused.

Private are the modules `tensorflow.python`, `keras.src` and `tf.__internal__`, and names with an underscore in front
that tfmp does not define itself. Three modules exist for nothing else. What stands elsewhere is listed here, with the
reason; the tests of these modules fail where a name is gone.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import keras
import pytest
from kerases import installed

import tfmp

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "tfmp"

#: Modules of private names alone. The last has the functions that autocast replaces, and asks for all of them when the
#: first scope is entered.
_OF_PRIVATE_NAMES = ("core/tensorflow_internals.py", "any_keras/internals.py", "mixed_precision/autocast/hooks.py")

_CHILDREN = "TensorFlow has no public way to name the children of an object in a checkpoint or SavedModel"
_UNWRAPPED = "the name of the wrapped optimizer in Keras 2's own wrapper, which public code reads"
_RECOMPUTED = "; a wrapper stands for the layer in it"

#: The private names in other modules, and why they are there.
_ELSEWHERE: dict[str, tuple[str, str]] = {
    "bert/lamb.py": (
        "_prepare",
        "what an optimizer of tf.compat.v1.train is asked for before each step; TensorFlow documents it for subclasses",
    ),
    "bert/optimizers.py": (
        "_create_slots _apply_dense _apply_sparse _resource_apply_dense _resource_apply_sparse "
        "_get_or_make_slot _get_or_make_slot_with_initializer",
        "what an optimizer of tf.compat.v1.train consists of; TensorFlow documents it for subclasses",
    ),
    "core/distribute/horovod_detection.py": (
        "_agg_helper _optimizer",
        "Horovod's (0.28.1), which has no public way to ask for what its optimizer wraps, and sums",
    ),
    "core/managers/base.py": ("_trackable_children", _CHILDREN),
    "core/storage/state_variables.py": ("_serialize_to_tensors _restore_from_tensors _trackable_children", _CHILDREN),
    "hosts/keras/adapters.py": (
        "_create_all_weights",
        "what `apply_gradients` of a legacy optimizer calls to make its variables; it has no public name",
    ),
    "mixed_precision/autocast/around_calls.py": (
        "tensorflow.python.ops.parallel_for. tensorflow.python.data. keras.src.layers. tf_keras.src.layers.",
        "what makes functions for one call; such a function does not say so itself",
    ),
    "monitoring/callbacks.py": (
        "_implements_train_batch_hooks _implements_test_batch_hooks _implements_predict_batch_hooks",
        "Keras 2 asks callbacks whether it must read each batch for them; no public method is asked",
    ),
    "optimizer_state/keras3.py": (
        "_apply_weight_decay _var_key _learning_rate _distribution_strategy",
        "Keras 3 would decay weights in half precision, and not find the slots of a view; a configuration leaves out "
        "settings of an optimizer",
    ),
    "hosts/keras/checkpoints.py": (
        "_trackable_children _lookup_dependency _deferred_dependencies _update_uid _learning_rate",
        f"{_CHILDREN}; `_learning_rate` is the name of one in Keras' checkpoints",
    ),
    "hosts/keras/files.py": ("_optimizer", f"{_UNWRAPPED}; Keras' walk comes to it"),
    "hosts/keras/legacy.py": (
        "__internal__ _track_trackable _hyper _get_hyper _set_hyper _create_hypers _create_all_weights "
        "_compute_gradients _aggregate_gradients _restore_slot_variable _create_or_restore_slot_variable "
        "_HAS_AGGREGATE_GRAD",
        "what Keras, Estimator and TensorFlow's checkpoints ask of a legacy optimizer, which the one inside has; "
        "legacy optimizers have no other interface, and are no longer developed",
    ),
    "hosts/keras/keras2.py": (
        "_optimizer _learning_rate",
        f"{_UNWRAPPED}; Keras' TensorBoard callback reads the rate of a schedule, and reads nothing public",
    ),
    "hosts/tf1/optimizer.py": ("_trackable_children", f"{_CHILDREN}, or to refuse it"),
    "recomputation/layers/keras2.py": (
        "_trackable_children _lookup_dependency _compute_output_and_mask_jointly",
        f"{_CHILDREN}{_RECOMPUTED}; and Keras 2 would compute masks, and with them a whole model, a second time",
    ),
    "recomputation/layers/keras3.py": ("_trackable_children _lookup_dependency", f"{_CHILDREN}{_RECOMPUTED}"),
}

_OF_NAMED_TUPLES = {"_replace", "_asdict", "_make", "_fields"}
#: What tfmp itself sets on tensors and functions.
_OWN_PREFIX = "_tfmp_"
_PRIVATE_MODULE = re.compile(r"\btensorflow\.python\b|\b(tf_)?keras\.src\b|^\.src\.|\btf\.__internal__\b")
_BY_STRING = {"getattr", "setattr", "hasattr", "delattr"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and not name.startswith(_OWN_PREFIX) and name != "_"


def _defined_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, their attributes, and variables of the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def _uses(tree: ast.AST, own: set[str], known: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines and the private names of others in a module.

    `own` are the names that tfmp defines; `known` are those of them that are private names of others all the same.
    """
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
        if isinstance(node.body[0], ast.Expr)
    }
    of_others = known | {"__internal__", "src"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            paths = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            yield from ((node.lineno, path) for path in paths if _PRIVATE_MODULE.search(path))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if node.value in known or _PRIVATE_MODULE.search(node.value):
                yield node.lineno, node.value
        elif isinstance(node, ast.Attribute) and node.attr not in _OF_NAMED_TUPLES:
            is_own = node.attr in own and (node.attr not in known or _is_self(node.value))
            if node.attr in of_others - own or (_is_private(node.attr) and not is_own):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_STRING:
            named = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if _is_private(named) and named not in own and named not in known:
                yield node.lineno, named
        elif isinstance(node, ast.ClassDef):
            yield from ((node.lineno, name) for name in _set_in_class(node) if name in known)


def _set_in_class(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names that a class gives to what it may override."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            yield each.name
        elif isinstance(each, ast.Assign | ast.AnnAssign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _trees() -> dict[str, ast.Module]:
    paths = sorted(_PACKAGE.rglob("*.py"))
    # The rewriter knows private names as words of the scripts that it reads, and imports neither TensorFlow nor Keras.
    trees = {path.relative_to(_PACKAGE).as_posix(): path for path in paths if "migrate" not in path.parts}
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in trees.items()}


def _used_outside_of_internals() -> dict[str, set[str]]:
    """Return the private names of others in each module that does not exist for them."""
    trees = _trees()
    others = {name: tree for name, tree in trees.items() if name not in _OF_PRIVATE_NAMES}
    own = {name for tree in others.values() for name in _defined_in(tree)}
    known = {name for names, _ in _ELSEWHERE.values() for name in names.split()}
    for module in _OF_PRIVATE_NAMES:
        tree = trees[module]
        known.update(name for _, name in _uses(tree, set(_defined_in(tree)), set()))
        known.update(
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if node.value.isidentifier() and _is_private(node.value)
        )
    found = {name: {used for _, used in _uses(tree, own, known)} for name, tree in others.items()}
    return {name: used for name, used in found.items() if used}


def test_private_names_are_used_in_the_listed_places_only() -> None:
    assert _used_outside_of_internals() == {module: set(names.split()) for module, (names, _) in _ELSEWHERE.items()}


_KNOWN = {"_trackable_children", "_keras_mask", "_dtype_policy", "_set_dtype_policy"}
_KNOWN.add("_compute_output_and_mask_jointly")


@pytest.mark.parametrize(
    ("source", "is_noticed"),
    [
        ("from tensorflow.python.eager import context", True),
        ("import keras.src.backend", True),
        ("tf.__internal__.FuncGraph('graph')", True),
        ("importlib.import_module(f'{keras.__name__}.src.backend')", True),
        ("keras.src.backend.RandomGenerator", True),
        ("layer._flatten_layers()", True),
        ("super()._trackable_children()", True),
        ("self._use_weight_decay(variable)", True),
        ("getattr(tensor, '_keras_mask', None)", True),
        ("getattr(tensor, '_unheard_of', None)", True),
        ("vars(layer)['_dtype_policy'] = policy", True),
        ("class Layer(keras.layers.Layer):\n    def _set_dtype_policy(self, policy): pass", True),
        ("class Layer(keras.layers.Layer):\n    _compute_output_and_mask_jointly = True", True),
        # Own names may be used.
        ('"""A docstring about `tensorflow.python`."""', False),
        ("self._counters.read()._replace(value=1)", False),
        ("other._counters", False),
        ("vars(self)['_counters']", False),
        ("type(self).__name__", False),
    ],
)
def test_each_way_to_use_a_private_name_of_others_is_noticed(source: str, is_noticed: bool) -> None:
    assert any(_uses(ast.parse(source), {"_trackable_children", "_counters"}, _KNOWN)) is is_noticed


@pytest.mark.parametrize("module", ["core/tensorflow_internals.py", "any_keras/internals.py"])
def test_each_private_name_is_explained_with_the_versions_it_was_read_in(module: str) -> None:
    tree = _trees()[module]
    unexplained = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            text = ast.get_docstring(node) or ""
            if not re.search(r"2\.15 to 2\.21|of Keras [23]|; see `|See `", text):
                unexplained.append(node.name)
    assert unexplained == []


def _classes() -> set[type]:
    """Return the classes of tfmp that work with what is installed, and two that it makes when it is asked for them."""
    keras3 = keras.__version__.startswith("3.")
    without = {"keras215"} if keras3 else {"keras3", "keras3_scope"}
    if importlib.util.find_spec("tf_keras") is None:
        without.add("tf_keras")
    names = [module.name for module in pkgutil.walk_packages(tfmp.__path__, "tfmp.")]
    names = [name for name in names if not name.startswith("tfmp.migrate") and not name.endswith("__main__")]
    modules = [importlib.import_module(name) for name in names if name.rpartition(".")[2] not in without]
    found = {each for module in modules for each in vars(module).values() if inspect.isclass(each)}
    if keras3:
        found.add(importlib.import_module("tfmp.optimizer_state.keras3").half_state_class(keras.optimizers.SGD))
    return {each for each in found if _is_of(each, "tfmp")}


def _is_of(cls: type, *packages: str) -> bool:
    return cls.__module__.partition(".")[0] in packages


def _overrides(classes: Iterable[type]) -> set[tuple[str, str]]:
    """Return the modules and the private names by which a class of tfmp has what a class of a host has too."""
    found = set()
    for each in classes:
        hosts = [base for base in each.__mro__ if _is_of(base, "tensorflow", "keras", "tf_keras")]
        for base in each.__mro__:
            if _is_of(base, "tfmp") and base.__module__.startswith("tfmp."):
                names = [*vars(base), *vars(base).get("__annotations__", {})]
                found.update(
                    (base.__module__.removeprefix("tfmp.").replace(".", "/") + ".py", name)
                    for name in names
                    if _is_private(name) and any(name in vars(host) for host in hosts)
                )
    return found


def test_private_methods_are_overridden_in_the_listed_places_only() -> None:
    listed = {(module, name) for module, (names, _) in _ELSEWHERE.items() for name in names.split()}
    assert _overrides(_classes()) <= listed


def test_libraries_that_make_functions_for_one_call_have_the_listed_modules() -> None:
    for name in _ELSEWHERE["mixed_precision/autocast/around_calls.py"][0].split():
        package = name.partition(".")[0]
        if package == "tensorflow" or package in {each.__name__ for each in installed().values()}:
            assert importlib.util.find_spec(name.rstrip(".")) is not None, name
