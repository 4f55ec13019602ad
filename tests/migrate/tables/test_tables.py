"""The tables of names, against TensorFlow."""

import importlib
import inspect
import re
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import python_process
import tensorflow as tf

import tfmp.npu
from tfmp.migrate.rules.tensorflow1.without_estimator import is_hook
from tfmp.migrate.tables import api_names, npu_bridge_names
from tfmp.migrate.tables.api_names import Standing, standing
from tfmp.migrate.tables.changed_positions import FIRST_CHANGED
from tfmp.migrate.tables.contrib_successors import ADVICE, SUCCESSORS, advice
from tfmp.migrate.tables.python_names import missing_part, replacement


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="the table is of TensorFlow 2.15")
def test_the_tables_are_what_tensorflow_has(tmp_path: Path) -> None:
    # In a process of its own: what other tests imported changes what TensorFlow's lazy modules list.
    assert python_process.run("-m", "tools.api_names", str(tmp_path)).returncode == 0
    for name in ("api_names.txt", "python_names.txt"):
        assert Path(api_names.__file__).with_name(name).read_text() == tmp_path.joinpath(name).read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("placeholder", Standing.OLD),
        ("app.flags.DEFINE_string", Standing.OLD),
        ("flags.FLAGS.batch_size", Standing.OLD),
        ("random.set_seed", Standing.NEW),
        ("reduce_sum", Standing.AMBIGUOUS),
        ("math.exp", Standing.SAME),
        ("float32.name", Standing.SAME),
        ("train", Standing.UNTOLD),
        ("logging", Standing.OLD),
        ("app", Standing.OLD),
        ("mixed_precision", Standing.OLD),
        ("logging.no_such_name", Standing.MISSING),
        ("keras.layers.Dense", Standing.SAME),
        ("keras.layers.LSTM", Standing.AMBIGUOUS),
        ("keras.backend.set_session", Standing.OLD),
        ("keras.utils.multi_gpu_model", Standing.MISSING),
        ("train.AdamOptimiser", Standing.MISSING),
        ("placehodler", Standing.MISSING),
    ],
)
def test_a_name_stands_where_its_longest_known_start_stands(name: str, expected: Standing) -> None:
    assert standing(name) is expected


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="later ones want Keras 2, and have no Estimator")
def test_modules_whose_names_differ_can_be_imported_below_compat_v1() -> None:
    rows = (line.split(" ", 2) for line in Path(api_names.__file__).with_suffix(".txt").read_text().splitlines())
    # Importing the module of the cells would change what `tf.nn.rnn_cell` is for the tests that follow.
    modules = {module for module, sign, _ in rows if module and sign in "1!" and module != "nn.rnn_cell"}
    assert modules
    for module in sorted(modules):
        importlib.import_module(f"tensorflow.compat.v1.{module}")


def test_a_missing_name_is_cut_after_its_first_missing_word() -> None:
    assert missing_part("training.no_such_module.f") == "training.no_such_module"
    assert missing_part("util.nest.no_such_name.f") == "util.nest.no_such_name"


def test_a_public_name_is_the_replacement_before_a_module() -> None:
    assert replacement("ops.control_flow_ops.cond") == "tf.compat.v1.cond"
    assert replacement("distribute.all_reduce") == "tensorflow.python.distribute.v1.all_reduce"
    assert replacement("ops.rnn_cell_impl._no_such_name") == ""


_OF_TENSORFLOW = sorted({successor.name for successor in SUCCESSORS.values() if not successor.module})
# What TensorFlow 2.15 has, and later ones do not, or only with Keras 2.
_GONE = ("estimator.", "nn.rnn_cell.")


@pytest.mark.parametrize("name", _OF_TENSORFLOW)
def test_a_successor_is_in_tensorflow(name: str) -> None:
    if name.startswith(_GONE) and not tf.__version__.startswith("2.15."):
        pytest.skip("needs TensorFlow 2.15")
    found = reduce(getattr, name.split("."), tf.compat.v1)
    module, _, last = f"tensorflow.compat.v1.{name}".rpartition(".")
    # Importing the module of the cells would change what `tf.nn.rnn_cell` is for the tests that follow.
    if not module.endswith(("ModeKeys", "rnn_cell")):
        assert getattr(importlib.import_module(module), last) is found


def test_the_table_of_names_knows_every_successor() -> None:
    for name in _OF_TENSORFLOW:
        assert standing(name) not in (Standing.MISSING, Standing.NEW), name


def test_advice_ends_without_a_period_and_names_what_it_is_about() -> None:
    for name in ADVICE:
        assert advice(name)
        assert not advice(name).endswith(".")
        assert "{" not in advice(name)
    assert advice("layers.conv2d").endswith("write tf_slim.conv2d")
    assert advice("framework.list_variables") == "write tf.train.list_variables, its arguments without their names"
    assert advice("memory_stats.MaxBytesInUse") == ""


#: The arguments of names of tf.contrib as TensorFlow 1.15 had them, in their order, as far as scripts give them.
_ARGUMENTS = dict(
    line.split(": ")
    for line in (Path(__file__).parents[2] / "recordings" / "contrib_arguments.txt").read_text().splitlines()
)


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="the successors are those of TensorFlow 2.15")
@pytest.mark.parametrize("name", sorted(_ARGUMENTS))
def test_a_successor_takes_the_arguments_in_their_order(name: str) -> None:
    successor = reduce(getattr, SUCCESSORS[name].name.split("."), tf.compat.v1)
    arguments = _ARGUMENTS[name].split()
    assert list(inspect.signature(successor).parameters)[: len(arguments)] == arguments


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="tf.layers needs Keras 2")
def test_a_batch_norm_that_is_written_as_advised_normalizes_as_that_of_contrib() -> None:
    written = re.search(r"tf\.layers\.batch_normalization\([^)]+\)", advice("layers.batch_norm"))
    assert written is not None
    values = np.random.default_rng(0).normal(3.0, 5.0, (64, 4)).astype(np.float32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with pytest.warns(UserWarning, match="is deprecated"):
            output = eval(written[0], {"tf": tf.compat.v1, "inputs": tf.constant(values)})
        updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
        session.run(tf.compat.v1.global_variables_initializer())
        np.testing.assert_allclose(session.run(output).std(0), np.ones(4), rtol=1e-3)
        session.run(updates)
        beta, mean, variance = session.run(tf.compat.v1.global_variables())
    assert beta.tolist() == [0.0] * 4
    np.testing.assert_allclose(mean, 0.001 * values.mean(0), rtol=1e-3)
    np.testing.assert_allclose(variance, 0.999 + 0.001 * values.var(0), rtol=1e-4)


# Another word for the same argument.
_RENAMED = {"filter": "filters", "value": "input"}


def _arguments(module: object, name: str) -> list[str]:
    function = reduce(getattr, name.split("."), module)
    return [_RENAMED.get(word, word) for word in inspect.signature(function).parameters]


@pytest.mark.parametrize(("name", "position"), FIRST_CHANGED.items())
def test_the_first_position_that_differs_is_the_one_of_the_table(name: str, position: int) -> None:
    assert standing(name) is Standing.AMBIGUOUS
    old, new = _arguments(tf.compat.v1, name), _arguments(tf, name)
    assert old[:position] == new[:position]
    assert old[position] != new[position]


@pytest.mark.parametrize("name", dir(tfmp.npu))
def test_a_name_that_tfmp_has_is_imported_from_it(name: str) -> None:
    for module in (
        npu_bridge_names.STAR,
        "npu_bridge.estimator.npu",
        "npu_bridge.estimator.npu.npu_optimizer",
        "hccl.manage.api",
    ):
        assert npu_bridge_names.target(f"{module}.{name}") == "tfmp.npu"
    assert npu_bridge_names.advice(name) == "import it from tfmp.npu"


def test_members_of_modules_are_those_of_tfmp() -> None:
    assert {name: set(vars(getattr(tfmp.npu, name))) for name in npu_bridge_names.MEMBERS} == {
        name: set(members) for name, members in npu_bridge_names.MEMBERS.items()
    }


def test_a_hook_is_the_same_object_in_both_modules() -> None:
    estimator = pytest.importorskip("tensorflow.compat.v1.estimator", reason="only TensorFlow 2.15 has Estimator")
    train = importlib.import_module("tensorflow.compat.v1").train
    hooks = [name for name in dir(estimator) if is_hook(name)]
    assert "SessionRunHook" in hooks
    assert [name for name in hooks if getattr(estimator, name) is not getattr(train, name)] == []
    assert not is_hook("Estimator")
