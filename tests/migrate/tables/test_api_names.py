"""The table of TensorFlow's names, against TensorFlow."""

import importlib
from pathlib import Path

import pytest
import tensorflow as tf

from tfmp.migrate.tables import api_names
from tfmp.migrate.tables.api_names import Standing, standing
from tools.api_names import table


@pytest.mark.skipif(not tf.__version__.startswith("2.15."), reason="the table is of TensorFlow 2.15")
def test_the_table_is_what_tensorflow_has() -> None:
    assert Path(api_names.__file__).with_suffix(".txt").read_text() == table()


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
