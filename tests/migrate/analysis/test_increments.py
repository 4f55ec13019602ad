"""Increments of the step counter beside an optimizer: of which optimizers each of them counts a step twice."""

import textwrap

import pytest

from tfmp.migrate.analysis.conditions import Conditions
from tfmp.migrate.edits.results import Level
from tfmp.migrate.edits.rewriting import rewrite

_SCRIPT = """
import tensorflow as tf

class AdamW(tf.train.Optimizer):
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return tf.group(*[variable.assign(grad) for grad, variable in grads_and_vars], name=name)

{above}
def train(FLAGS, loss, other):
    step = tf.train.get_or_create_global_step()
{make}
    op = optimizer.apply_gradients(optimizer.compute_gradients(loss), global_step=step)
{count}
    return op
"""
_ADAM, _ADAMW = "optimizer = tf.train.AdamOptimizer(0.1)", "optimizer = AdamW(False, 'AdamW')"
_BY_DECAY = f"if FLAGS.decay == 0:\n    {_ADAM}\nelse:\n    {_ADAMW}"
_BY_NAME = (
    f"if FLAGS.name == 'adam':\n    {_ADAM}\nelif FLAGS.name == 'adamw':\n    {_ADAMW}\nelse:\n    raise ValueError"
)
_WITH_FLAG = f"if FLAGS.decay == 0:\n    {_ADAM}\n    manual = {{}}\nelse:\n    {_ADAMW}\n    manual = {{}}"
_MADE = """
def make(FLAGS):
    if FLAGS.decay == 0:
        return tf.train.AdamOptimizer(0.1)
    return AdamW(False, 'AdamW')
"""
_WRAPPED = (
    _BY_DECAY
    + """
manager = tf.contrib.mixed_precision.FixedLossScaleManager(8)
optimizer = tf.contrib.mixed_precision.LossScaleOptimizer(optimizer, manager)
"""
)
_COUNT = "op = tf.group(op, [step.assign(step + 1)])"


def _is_wrong(make: str, count: str, above: str = "") -> bool:
    make, count = (textwrap.indent(text, "    ") for text in (make, count))
    done = rewrite(_SCRIPT.format(above=above, make=make, count=count))
    return any(one.rule == "R10" and one.level is Level.WRONG for one in done.findings)


@pytest.mark.parametrize(
    ("make", "condition"),
    [
        (_BY_DECAY, "isinstance(optimizer, AdamW)"),
        (_BY_DECAY, "isinstance(optimizer, (AdamW, Lamb)) and FLAGS.counts"),
        (_BY_DECAY, "not isinstance(optimizer, tf.train.AdamOptimizer)"),
        (_BY_DECAY, "type(optimizer).__name__ == 'AdamW'"),
        (_BY_DECAY + "\nis_adamw = isinstance(optimizer, AdamW)", "is_adamw"),
        (_BY_DECAY, "0 != FLAGS.decay"),
        (_BY_NAME, "FLAGS.name in ('adamw', 'lamb')"),
        (f"use = FLAGS.decay > 0\nif use:\n    {_ADAMW}\nelse:\n    {_ADAM}", "FLAGS.decay > 0"),
        (_WITH_FLAG.format(False, True), "manual"),
        (_WITH_FLAG.format("'adam'", "'adamw'"), "manual == 'adamw'"),
        ("manual = False\n" + _BY_DECAY + "\n    manual = True", "manual"),
    ],
)
def test_an_increment_for_the_other_optimizer_is_right(make: str, condition: str) -> None:
    assert not _is_wrong(make, f"if {condition}:\n    {_COUNT}")
    assert not _is_wrong(make, f"if not ({condition}):\n    return op\n{_COUNT}")
    assert _is_wrong(make, f"if not ({condition}):\n    {_COUNT}")


@pytest.mark.parametrize(
    ("make", "condition"),
    [
        (_BY_DECAY, "isinstance(optimizer, tf.train.Optimizer)"),
        (_BY_DECAY, "isinstance(optimizer, other)"),
        (_BY_DECAY, "isinstance(optimizer, AdamW) or FLAGS.counts"),
        (_BY_DECAY, "FLAGS.decay >= 0"),
        (_BY_DECAY, "FLAGS.decay < 1"),
        (_BY_DECAY + "\nFLAGS.decay = 0.1", "FLAGS.decay > 0"),
        (_BY_NAME, "FLAGS.name in ('adam', 'adamw')"),
        (f"{_ADAMW}\nis_adamw = isinstance(optimizer, AdamW)\n{_ADAM}", "is_adamw"),
        (_WITH_FLAG.format(True, True), "manual"),
        ("manual = 0\n" + _BY_DECAY + "\nmanual += 1", "manual > 0"),
    ],
)
def test_an_increment_for_both_optimizers_counts_twice(make: str, condition: str) -> None:
    assert _is_wrong(make, f"if {condition}:\n    {_COUNT}")


def test_an_increment_that_is_itself_a_choice_is_judged_by_it() -> None:
    count = "op = tf.group(op, [step.assign(step + 1 if isinstance(optimizer, {}) else step)])"
    assert not _is_wrong(_BY_DECAY, count.format("AdamW"))
    assert _is_wrong(_BY_DECAY, count.format("tf.train.AdamOptimizer"))


def test_an_increment_in_a_function_is_judged_by_the_calls_of_it() -> None:
    make = _BY_DECAY + "\ndef count(op):\n    return tf.group(op, step.assign_add(1))"
    assert not _is_wrong(make, "if FLAGS.decay > 0:\n    op = count(op)")
    assert _is_wrong(make, "if FLAGS.decay > 0:\n    op = count(op)\nelse:\n    op = count(op)")


def test_an_optimizer_that_a_function_makes_is_judged_by_the_flags_that_it_is_given() -> None:
    count = f"if FLAGS.decay > 0:\n    {_COUNT}"
    assert not _is_wrong("optimizer = make(FLAGS)", count, _MADE)
    assert not _is_wrong("optimizer = make(other)", f"if isinstance(optimizer, AdamW):\n    {_COUNT}", _MADE)
    assert _is_wrong("optimizer = make(other)", count, _MADE)
    assert _is_wrong("optimizer = make(FLAGS)", _COUNT, _MADE)
    assert _is_wrong("optimizer = make(FLAGS)", count, _MADE.replace(":\n", ":\n    FLAGS = defaults\n", 1))


def test_a_guard_asks_for_the_class_of_the_outermost_optimizer() -> None:
    count = f"if isinstance(optimizer, hvd.DistributedOptimizer):\n    {_COUNT}"
    above = "import horovod.tensorflow as hvd"
    assert _is_wrong(f"{_WRAPPED}\noptimizer = hvd.DistributedOptimizer(optimizer)", count, above)
    assert not _is_wrong(_WRAPPED, count, above)


def _questions_asked(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often R10 compares two places, in a script that gives one name a value for each layer."""
    asked: list[None] = []
    is_exclusive = Conditions.is_exclusive
    text = (
        "import tensorflow as tf\n"
        + "x = tf.tuple([x, layer(x)])[0]\n" * layers
        + "train_op = tf.train.AdamOptimizer().minimize(x, global_step)\n"
        + "increment = global_step.assign_add(1)\n"
        + "read(increment)\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(Conditions, "is_exclusive", lambda *given: asked.append(None) or is_exclusive(*given))
        done = rewrite(text)
    assert [found.rule for found in done.findings if found.rule == "R10"] == ["R10"]
    return len(asked)


def test_a_script_twice_as_long_takes_twice_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = _questions_asked(20, monkeypatch), _questions_asked(40, monkeypatch)
    assert 40 < short < long <= 2 * short


@pytest.mark.parametrize(
    ("increment", "is_found"),
    [
        ("global_step.assign_add(1)", True),
        ("tf.assign_add(global_step, tf.constant(1))", True),
        ("tf.assign(global_step, global_step + 1)", True),
        ("step.assign_add(1)", True),
        ("global_step.assign_add(2)", False),
        ("global_step.assign(0)", False),
        ("other.assign_add(1)", False),
    ],
)
def test_only_increments_of_the_global_step_by_one_are_found(increment: str, is_found: bool) -> None:
    name, made = ("step", "step = tf.train.get_global_step()") if increment.startswith("step") else ("global_step", "")
    text = f"import tensorflow as tf\n{made}\ntrain_op = tf.train.AdamOptimizer().minimize(x, {name})\n"
    done = rewrite(f"{text}increment = {increment}\nread(increment)\n")
    assert any(one.rule == "R10" for one in done.findings) is is_found
