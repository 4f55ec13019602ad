"""The parts of the command that ports BERT scripts; with checkouts, the whole command.

The environment variables TFMP_NVIDIA_BERT and TFMP_GOOGLE_BERT name the checkouts.
"""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import migrations
import numpy as np
import port_bert
import port_bert_data
import pytest
import tensorflow as tf
from port_bert_outcomes import RESUMED_SCALE, Outcome, Run, problem, read_counts
from port_bert_runs import Bench
from port_bert_sources import COLUMNS, GOOGLE, NVIDIA, Configuration
from port_bert_stubs import COUNTS_VARIABLE, write_counting, write_stubs

_FALLING = [Run(1, 0, 0, 2.0**14, 4.0), Run(2, 1, 1, 2.0**13, 4.0), Run(3, 2, 2, 2.0**13, 3.0)]
_PLAIN = Configuration("manual_fp16 Adam", wrapped=True)


def test_records_hold_what_scripts_read(tmp_path: Path) -> None:
    port_bert_data.write_records(tmp_path / "records", 5)
    records = list(tf.compat.v1.io.tf_record_iterator(str(tmp_path / "records")))
    assert len(records) == 5
    features = tf.train.Example.FromString(records[0]).features.feature
    ids = features["input_ids"].int64_list.value
    positions = features["masked_lm_positions"].int64_list.value
    assert len(ids) == len(features["input_mask"].int64_list.value) == port_bert_data.SEQ_LENGTH
    assert len(features["segment_ids"].int64_list.value) == port_bert_data.SEQ_LENGTH
    assert {ids[position] for position in positions} == {3}
    masked = features["masked_lm_ids"].int64_list.value
    assert len(masked) == len(positions) == len(features["masked_lm_weights"].float_list.value)
    assert set(masked) <= set(range(4, 12))
    assert features["next_sentence_labels"].int64_list.value[0] in {0, 1}


def test_checkpoint_holds_the_names_of_tensorflow_1(tmp_path: Path) -> None:
    values = port_bert_data.trained_values(20, port_bert_data.CONFIG) | port_bert_data.scaling_values(2.0**13, 990)
    # With two layers, TensorFlow 1.15 saves the same number of values.
    assert len(values) == 142
    port_bert_data.write_checkpoint(tmp_path / "model", values)
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path / "model")))
    assert reader.get_variable_to_shape_map() == {name: list(value.shape) for name, value in values.items()}
    assert reader.get_variable_to_dtype_map()["good_steps"] == tf.int32
    assert reader.get_tensor("global_step") == 20
    assert reader.get_tensor("loss_scale") == 2.0**13
    name = "bert/encoder/layer_1/attention/self/query/kernel"
    np.testing.assert_array_equal(reader.get_tensor(name), values[name])


def test_accumulation_adds_a_sum_for_each_variable() -> None:
    values = port_bert_data.accumulation_values(port_bert_data.CONFIG)
    assert len(values) == 48
    assert values["bert/embeddings/word_embeddings/accum"].shape == (64, 32)


def test_stubs_are_what_scripts_import(tmp_path: Path) -> None:
    write_stubs(tmp_path)
    lines = [
        "import pynvml; pynvml.nvmlInit()",
        "from dllogger import Logger, StdOutBackend, JSONStreamBackend, Verbosity",
        "logger = Logger([StdOutBackend(Verbosity.DEFAULT), JSONStreamBackend(Verbosity.VERBOSE, 'path')])",
        "logger.metadata('loss', {}); logger.log(step=3, data={'loss': 0.5}, verbosity=Verbosity.DEFAULT)",
    ]
    if (tmp_path / "horovod").exists():
        lines.append("from horovod.tensorflow.compression import Compression; Compression.fp16, Compression.none")
        # tfmp calls this function of an imported Horovod.
        lines.append("import horovod.tensorflow; assert not horovod.tensorflow.is_initialized()")
    command = [sys.executable, "-S", "-c", "\n".join(lines)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout == "3 {'loss': 0.5}\n"


def test_the_scripts_of_a_checkout_import_their_optimizer_through_a_module_that_counts(tmp_path: Path) -> None:
    (tmp_path / "run_pretraining.py").write_text("import modeling\nimport optimization\nimport tensorflow\n")
    (tmp_path / "optimization.py").write_text("train_op = tf.group(train_op, [global_step.assign(new_global_step)])\n")
    (tmp_path / "fused_layer_norm.py").write_text("")
    (tmp_path / "bench").mkdir()
    Bench(tmp_path / "bench", steps=2, timeout=1).put_columns(NVIDIA, tmp_path)
    for column in COLUMNS:
        script = (tmp_path / f"port_bert_{column}.py").read_text()
        assert script == f"import modeling\nimport counted_{column} as optimization\nimport tensorflow\n"
    assert "\nimport tfmp.bert as measured\n" in (tmp_path / "counted_kit.py").read_text()
    assert "\nimport optimization_edited as measured\n" in (tmp_path / "counted_edited.py").read_text()
    edited = "train_op = tf.group(train_op, [] if manual_fp16 else [global_step.assign(new_global_step)])\n"
    assert (tmp_path / "optimization_edited.py").read_text() == edited
    assert not (tmp_path / "fused_layer_norm.py").exists()


def test_an_optimizer_that_counts_in_another_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run_pretraining.py").write_text("import optimization\n")
    (tmp_path / "optimization.py").write_text("train_op = tf.group(train_op, global_step.assign_add(1))\n")
    (tmp_path / "bench").mkdir()
    bench = Bench(tmp_path / "bench", steps=2, timeout=1)
    with pytest.raises(
        ValueError, match=r"optimization\.py must have `\[global_step\.assign\(new_global_step\)\]`; it"
    ):
        bench.put_columns(NVIDIA, tmp_path)
    # Google's module is not edited.
    bench.put_columns(GOOGLE, tmp_path)


def test_another_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run_pretraining.py").write_text("from bert import optimization\n")
    (tmp_path / "bench").mkdir()
    with pytest.raises(ValueError, match="must have one line `import optimization`"):
        Bench(tmp_path / "bench", steps=2, timeout=1).put_columns(GOOGLE, tmp_path)


_CREATE_OPTIMIZER = """
import tensorflow.compat.v1 as tf
import tfmp

def create_optimizer(loss, rate):
    weight, moments = (tf.get_variable("pooler/dense/bias" + slot, initializer=[0.0]) for slot in ("", "/adam_m"))

    class Adam(tf.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            return moments.assign(0.5 * moments + 0.5 * grads_and_vars[0][0])

    opt = tfmp.LossScaleOptimizer(Adam(rate), tfmp.ExponentialUpdateLossScaleManager(2**32, 1000))
    # Some scripts count every step in this way, also those that are skipped.
    with tf.control_dependencies([opt.minimize(loss * weight[0], var_list=[weight])]):
        return tf.train.get_global_step().assign_add(1)
"""


def test_runs_and_applied_steps_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: tf.compat.v1.Session
) -> None:
    (tmp_path / "create_optimizer_of_test.py").write_text(_CREATE_OPTIMIZER)
    write_counting(tmp_path / "counted_of_test.py", "import create_optimizer_of_test as measured")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(COUNTS_VARIABLE, str(tmp_path / "counts"))
    loss = tf.compat.v1.placeholder(tf.float32, [])
    tf.compat.v1.train.get_or_create_global_step()
    train_op = importlib.import_module("counted_of_test").create_optimizer(loss, 0.125)
    saved = {variable.op.name for variable in tf.compat.v1.global_variables()}
    assert not [name for name in saved if name.startswith("port_bert")]
    session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
    for value in (1.0, math.inf, 1.0):
        session.run(train_op, {loss: value})
    assert read_counts(tmp_path / "counts") == [
        Run(1, 1, 1, 2.0**32, 1.0),
        Run(2, 1, 2, 2.0**32, math.inf),
        Run(3, 2, 3, 2.0**32, 1.0),
    ]


def test_counts_are_read(tmp_path: Path) -> None:
    assert read_counts(tmp_path / "missing") == []
    (tmp_path / "counts").write_text("1 0 0 4294967296 4.5\n2 1 1 4294967296 nan\n3 1")
    first, second = read_counts(tmp_path / "counts")
    assert first == Run(1, 0, 0, 2.0**32, 4.5)
    assert math.isnan(second.loss)


def test_a_training_is_correct_if_its_loss_falls_and_its_steps_are_counted() -> None:
    assert problem(Outcome("", 1.0, _FALLING, step=2), 0, 2, _PLAIN) == ""


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome("", 1.0, []), "it ran no step"),
        (Outcome("", 1.0, [Run(1, 1, 1, 0, math.inf)], step=1), "the loss is inf in run 1 of 1"),
        (Outcome("", 1.0, _FALLING[:2], step=1), "the loss does not fall: 4.000, then 4.000"),
        (Outcome("", 1.0, _FALLING, step=4), "the step ends at 4, where 2 were applied"),
        (Outcome("", 1.0, _FALLING[::2], step=2), ""),
    ],
)
def test_the_problem_of_a_training_is_named(outcome: Outcome, expected: str) -> None:
    assert problem(outcome, 0, 2, _PLAIN) == expected


def test_a_resumed_training_must_go_on_with_its_scale() -> None:
    resumed = _PLAIN._replace(resumes=True)
    runs = [Run(1, 1, 21, RESUMED_SCALE, 4.0), Run(2, 2, 22, RESUMED_SCALE, 3.0)]
    assert problem(Outcome("", 1.0, runs, step=22, scale=RESUMED_SCALE), 20, 2, resumed) == ""
    assert "the scale ends at 1.0" in problem(Outcome("", 1.0, runs, step=22, scale=1.0), 20, 2, resumed)
    runs[0] = runs[0]._replace(scale=2.0**32)
    assert "it goes on with the scale 4.29497e+09" in problem(Outcome("", 1.0, runs, step=22), 20, 2, resumed)


def test_tables_are_markdown() -> None:
    trained = {
        ("fp32", "own"): Outcome("the loss does not fall: 4|5", 7.4, _FALLING, step=2, scale=2.0**13),
        ("fp32", "kit"): Outcome("ModuleNotFoundError: no", 1.0, []),
    }
    first, second = port_bert.training_table(trained).splitlines()[2:]
    cells = [cell.strip() for cell in first.strip("|").split(" | ")]
    assert cells[:3] == ["fp32", "own", r"no: the loss does not fall: 4\|5"]
    assert cells[3:] == ["3", "2", "2", "4.000", "3.000", "8,192", "7"]
    assert "| no: ModuleNotFoundError: no " in second


def test_a_migrations_report_is_counted_by_rule() -> None:
    findings = [
        {"rule": "R10", "line": 9, "message": "counted twice", "column": 3},
        {"rule": "R6", "line": 10, "message": "kept", "level": "note"},
    ]
    edits = [{"rule": "R2", "line": 1}, {"rule": "R13", "line": 4}]
    files = [
        {"path": "/bert/a.py", "edits": edits, "findings": findings},
        {"path": "/bert/b.py", "edits": [], "findings": [], "error": "line 3: it is Python 2"},
    ]
    migration = migrations.parse_migration(json.dumps({"files": files, "version": 1}), Path("/bert"))
    assert migration.messages == [
        "b.py: line 3: it is Python 2",
        "a.py:9: R10: counted twice",
        "a.py:10: R6: kept",
    ]
    assert migrations.migration_table(migration).splitlines() == [
        "| rule                 | rewritten | left to a human | noted |",
        "|----------------------|-----------|-----------------|-------|",
        "| R2                   | 1         | 0               | 0     |",
        "| R6                   | 0         | 0               | 1     |",
        "| R10                  | 0         | 1               | 0     |",
        "| R13                  | 1         | 0               | 0     |",
        "| in all, 1 of 2 files | 2         | 1               | 1     |",
    ]


def test_without_a_checkout_nothing_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert port_bert.main([]) == 0
    assert "skipped: no checkout is given: name one by --nvidia DIR or --google DIR." in capsys.readouterr().out


def test_without_estimator_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(port_bert, "tf", SimpleNamespace(__version__="2.21.0"))
    (tmp_path / "run_pretraining.py").touch()
    assert port_bert.main(["--google", str(tmp_path)]) == 0
    assert "skipped: the scripts need tf.estimator" in capsys.readouterr().out


def test_a_directory_without_the_script_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        port_bert.main(["--nvidia", str(tmp_path)])
    assert f"{tmp_path} has no run_pretraining.py" in capsys.readouterr().err


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("option", "variable"), [("--nvidia", "TFMP_NVIDIA_BERT"), ("--google", "TFMP_GOOGLE_BERT")])
def test_migrated_scripts_train_with_the_kit(
    option: str, variable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    if not hasattr(tf, "estimator"):
        pytest.skip(f"TensorFlow {tf.__version__} has no tf.estimator; 2.15 has")
    path = tmp_path / "port.json"
    assert port_bert.main([option, os.environ[variable], "--columns", "kit", "--json", str(path)]) == 0, (
        capsys.readouterr().out
    )
    (figures,) = json.loads(path.read_text())["figures"].values()
    assert set(figures["problems"].values()) == {""}
