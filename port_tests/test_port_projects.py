"""The parts of the command that ports projects of TensorFlow 1, on a project of a few lines; with checkouts, all of it.

The environment variables in `port_projects_sources.PROJECTS` name the checkouts.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import port_projects
import pytest
import tensorflow as tf
from migrations import Migration
from port_projects import Port, Training, problem
from port_projects_sources import PROJECTS, Edit, Project, edit
from port_projects_training import TRAININGS, Finished, Recorder

import tfmp

tf1 = tf.compat.v1
_BERT = PROJECTS[0]
_GPT2 = PROJECTS[-1]

#: A model with the interface of BERT's `run_pretraining.py`.
_SCRIPT = """
import tensorflow as tf

import modeling
import optimization


def model_fn_builder(config, init_checkpoint, learning_rate, num_train_steps, num_warmup_steps, use_tpu, one_hot):
  def model_fn(features, labels, mode, params):
    output = modeling.encode(config, features["input_ids"], features["input_mask"])
    logits = tf.layers.dense(output, config["vocab_size"])
    loss = tf.losses.sparse_softmax_cross_entropy(features["masked_lm_ids"], logits[:, :3])
    train_op = optimization.create_optimizer(loss, learning_rate, num_train_steps, num_warmup_steps, use_tpu)
    return tf.contrib.tpu.TPUEstimatorSpec(mode=mode, loss=loss, train_op=train_op)

  return model_fn
"""
_MODELING = """
import tensorflow as tf


class BertConfig:
  from_dict = dict


def encode(config, ids, mask):
  width = config["hidden_size"]
  table = tf.get_variable("table", [config["vocab_size"], width], initializer=tf.random_normal_initializer(stddev=1.0))
  x = tf.layers.dense(tf.gather(table, ids), width, tf.nn.relu)
  scores = tf.matmul(x, x, transpose_b=True)
  scores += (1.0 - tf.cast(mask, tf.float32)[:, None]) * -10000.0
  return tf.contrib.layers.layer_norm(x + tf.matmul(tf.nn.softmax(scores), x), begin_norm_axis=-1)
"""
_OPTIMIZATION = """
import tensorflow as tf


def create_optimizer(loss, rate, steps, warmup, use_tpu):
  global_step = tf.train.get_or_create_global_step()
  optimizer = PlainDescent(0.05)
  tvars = tf.trainable_variables()
  grads = tf.gradients(loss, tvars)
  grads, _ = tf.clip_by_global_norm(grads, 64.0)
  train_op = optimizer.apply_gradients(zip(grads, tvars), global_step=global_step)
  new_global_step = global_step + 1
  train_op = tf.group(train_op, [global_step.assign(new_global_step)])
  return train_op


class PlainDescent(tf.train.GradientDescentOptimizer):
  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return tf.group(*(variable.assign_sub(0.05 * tf.convert_to_tensor(grad)) for grad, variable in grads_and_vars))
"""
_MIGRATION = Migration(3, 2, Counter(R1=3), Counter(), Counter(R16=1), [])
_SINGLE = Training("", [4.0, 3.0], [], [], ["float32"])
_HALF = Training("", [4.0, 3.0], [4.0, 4.0], [], ["float16", "float16"])
_NAN = Training("", [], [math.nan, math.nan])


def _write(directory: Path, files: Mapping[str, str]) -> Path:
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


@pytest.mark.skipif(not hasattr(tf, "estimator"), reason=f"TensorFlow {tf.__version__} has no tf.estimator")
def test_a_project_is_migrated_and_trained_at_o1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"run_pretraining.py": _SCRIPT, "modeling.py": _MODELING, "optimization.py": _OPTIMIZATION}
    checkout = _write(tmp_path / "checkout", files)
    path = tmp_path / "projects.json"
    status = port_projects.main(["--bert", str(checkout), "--steps", "4", "--json", str(path)])
    assert status == 0, capsys.readouterr().out
    figures = json.loads(path.read_text())["figures"]["BERT"]
    assert figures["migration"]["edited"] == 3
    assert figures["problem"] == ""
    trained = figures["trainings"]
    assert trained["own"]["losses"] == pytest.approx(trained["O0"]["losses"])
    assert trained["O1"]["losses"] != trained["O0"]["losses"]
    # The scale begins at 2**32, and a gradient of 2**-16 is infinite then.
    assert len(trained["O1"]["skipped"]) > 4
    # Nothing that is random, so that skipped steps that change nothing have the same loss.
    assert len({*trained["O1"]["skipped"], *trained["O1"]["losses"][:1]}) == 1
    # The checkout itself is as it was.
    assert (checkout / "modeling.py").read_text() == _MODELING


def test_every_project_has_a_training() -> None:
    assert list(TRAININGS) == [project.training for project in PROJECTS]
    assert len({project.variable for project in PROJECTS}) == len(PROJECTS)


@pytest.mark.parametrize("counts", [False, True])
def test_steps_that_are_skipped_are_told_from_applied_ones(counts: bool, session: tf1.Session) -> None:
    weight = tf1.get_variable("weight", initializer=1.0, use_resource=True)
    runs = tf1.get_variable("runs", initializer=0.0, trainable=False, use_resource=True)
    factor = tf1.placeholder(tf.float32, [])
    step = tf1.train.get_or_create_global_step()
    opt = tfmp.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.125), 1024.0)
    loss = weight * factor
    train_op = opt.minimize(loss, step)
    if counts:
        train_op = tf.group(train_op, runs.assign_add(1.0))
    session.run(tf1.global_variables_initializer())
    recorder = Recorder(steps=2, idle=1)
    assert recorder.run(session.run, [loss, train_op], {factor: 8.0}) == [8.0, None]
    recorder.run(session.run, [loss, train_op], {factor: 1.0})
    recorder.run(session.run, [loss, train_op], {factor: math.inf})
    with pytest.raises(Finished):
        recorder.run(session.run, [loss, train_op], {factor: 1.0})
    assert recorder.losses == [1.0, 0.875]
    assert recorder.skipped == [math.inf]
    assert recorder.changed_by_skipped == ["runs"] * counts


def test_an_edit_needs_its_text_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = f(1)\ny = f(2)\n")
    edit(tmp_path, (Edit("a.py", r"x = f\((\d)\)", r"x = g(\1)"),))
    assert (tmp_path / "a.py").read_text() == "x = g(1)\ny = f(2)\n"
    with pytest.raises(ValueError, match=r"a\.py must have one `=g`, and has 0; it may be another version"):
        edit(tmp_path, (Edit("a.py", "=g", ""),))
    with pytest.raises(ValueError, match="and has 2"):
        edit(tmp_path, (Edit("a.py", " = ", ""),))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"own": Training("ImportError: six")}, "the own training: ImportError: six"),
        ({"half": _NAN}, "the O1 training: it applied no step; its first loss is nan"),
        ({"single": _SINGLE._replace(losses=[3.0, 3.0])}, "the O0 training: the loss does not fall: 3.000, then 3.000"),
        ({"half": _HALF._replace(changed_by_skipped=["b", "a", "b"])}, "skipped steps changed a, b"),
        ({"half": _HALF._replace(skipped=[])}, "no step overflowed"),
        ({"half": _HALF._replace(products=["float16", "float32"])}, "a matrix product at O1 is not in float16"),
        ({"half": _HALF._replace(losses=[4.0, 3.3])}, "the losses differ by 1.0e-01"),
        (
            {
                "single": _SINGLE._replace(losses=[4.0, math.nan, 3.0]),
                "half": _HALF._replace(losses=[4.0, math.nan, 3.0]),
            },
            "the losses differ by nan",
        ),
        ({"half": _HALF._replace(losses=[math.nan, 3.0])}, "the O1 training: the loss does not fall: nan, then 3.000"),
        ({"migration": _MIGRATION._replace(notes=Counter())}, "R16 notes nothing"),
        ({"unheeded": _HALF}, "the losses at O1 are finite, although a note was not followed"),
    ],
)
def test_the_problem_of_a_port_is_named(changes: Mapping[str, Any], expected: str) -> None:
    works = Port(_MIGRATION, _SINGLE, _HALF, _SINGLE, _NAN)
    assert problem(_GPT2, works._replace(**changes)) == expected


def test_tables_are_markdown() -> None:
    ports = {"GPT-2": Port(_MIGRATION, _SINGLE, _HALF, _SINGLE), "BERT": Port(_MIGRATION, _SINGLE, _NAN, _SINGLE)}
    first, second = port_projects.table(ports, {"GPT-2": "", "BERT": "it is NaN"}).splitlines()[2:]
    cells = [cell.strip() for cell in first.strip("|").split(" | ")]
    assert cells == ["GPT-2", "2, 3", "0", "1", "4.00, 3.00", "2", "0.0e+00", "yes"]
    assert second.endswith("| inf        | it is NaN |")


def test_without_a_checkout_nothing_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert port_projects.main([]) == 0
    assert "skipped: no checkout is given: name one by --bert DIR" in capsys.readouterr().out


def test_without_estimator_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(port_projects, "tf", SimpleNamespace(__version__="2.21.0"))
    (tmp_path / "run_pretraining.py").touch()
    assert port_projects.main(["--bert", str(tmp_path)]) == 0
    assert "skipped: the projects need tf.estimator" in capsys.readouterr().out


def test_another_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        port_projects.main(["--xlnet", str(tmp_path)])
    assert f"{tmp_path} has no xlnet.py: name a checkout of XLNet." in capsys.readouterr().err


def test_a_checkout_of_another_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not hasattr(tf, "estimator"):
        pytest.skip(f"TensorFlow {tf.__version__} has no tf.estimator; 2.15 has")
    checkout = _write(tmp_path / "checkout", {"run_pretraining.py": "", "optimization.py": "import tensorflow as tf\n"})
    assert port_projects.main(["--bert", str(checkout)]) == 2
    assert "optimization.py must have one" in capsys.readouterr().err


@pytest.mark.timeout(900)
@pytest.mark.parametrize("project", PROJECTS, ids=[project.name for project in PROJECTS])
def test_migrated_projects_train_at_o1(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if project.variable not in os.environ:
        pytest.skip(f"{project.variable} names no checkout")
    if not hasattr(tf, "estimator"):
        pytest.skip(f"TensorFlow {tf.__version__} has no tf.estimator; 2.15 has")
    path = tmp_path / "projects.json"
    option = f"--{project.training.replace('_', '-')}"
    status = port_projects.main([option, os.environ[project.variable], "--json", str(path)])
    assert status == 0, capsys.readouterr().out
    assert json.loads(path.read_text())["figures"][project.name]["problem"] == ""
