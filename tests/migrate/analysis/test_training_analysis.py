"""How a script trains: its losses, gradients, optimizers and counters of steps."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.global_step_updates import global_step_updates
from tfmp.migrate.analysis.training.gradient_values import may_be_gradient
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.manual_scaling import find_manual_scaling
from tfmp.migrate.analysis.training.operands import operands, without_casts
from tfmp.migrate.analysis.training.optimizer_classes import counts
from tfmp.migrate.analysis.training.optimizer_steps import Given, optimizer_steps
from tfmp.migrate.analysis.training.optimizer_types import class_answer
from tfmp.migrate.edits.results import Level
from tfmp.migrate.edits.rewriting import rewrite


@pytest.mark.parametrize(
    ("text", "conditional"),
    [
        ("global_step.assign_add(1)", [False]),
        ("tf.assign_add(global_step, tf.constant(1))", [False]),
        ("tf.assign(global_step, global_step + 1)", [False]),
        ("global_step.assign(tf.cond(finite, lambda: global_step + 1, lambda: global_step))", [True]),
        ("step = tf.train.get_global_step()\nstep.assign_add(1)", [False]),
        ("global_step.assign_add(2)", []),
        ("global_step.assign(0)", []),
        ("other.assign_add(1)", []),
    ],
)
def test_only_increments_of_the_global_step_by_one_are_found(text: str, conditional: list[bool]) -> None:
    script = Script(f"import tensorflow as tf\n{text}\n")
    assert [update.conditional for update in global_step_updates(script)] == conditional


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("grads", True),
        ("[g * 2.0 for g in grads]", True),
        ("parameter", True),
        ("tf.global_norm(grads)", False),
        ("tf.zeros_like(grads[0])", False),
        ("1.0 / tf.global_norm(grads)", False),
        ("3.0", False),
    ],
)
def test_norms_and_shapes_are_no_gradients(value: str, expected: bool) -> None:
    script = Script(f"import tensorflow as tf\ndef f(parameter):\n    grads = tf.gradients(a, b)\n    read({value})\n")
    call = next(call for call in script.nodes(cst.Call) if script.code(call.func) == "read")
    assert may_be_gradient(script, call.args[0].value) is expected


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
    def indented(text: str) -> str:
        return "\n".join(f"    {line}" for line in text.splitlines())

    done = rewrite(_SCRIPT.format(above=above, make=indented(make), count=indented(count)))
    return any(one.rule == "R10" and one.level is Level.WRONG for one in done.findings)


@pytest.mark.parametrize(
    ("make", "condition"),
    [
        (_BY_DECAY, "isinstance(optimizer, AdamW)"),
        (_BY_DECAY, "isinstance(optimizer, (AdamW, Lamb)) and FLAGS.counts"),
        (_BY_DECAY, "not isinstance(optimizer, tf.train.AdamOptimizer)"),
        (_BY_DECAY, "type(optimizer).__name__ == 'AdamW'"),
        (_BY_DECAY + "\nis_adamw = isinstance(optimizer, AdamW)", "is_adamw"),
        (_BY_DECAY + "\noptimizer = tf.contrib.tpu.CrossShardOptimizer(optimizer)", "isinstance(optimizer, AdamW)"),
        (_WRAPPED, "isinstance(optimizer, AdamW)"),
        (_BY_DECAY, "FLAGS.decay > 0"),
        (_BY_DECAY, "0 != FLAGS.decay"),
        (_BY_DECAY, "FLAGS.decay"),
        (_BY_DECAY, "FLAGS.decay > 0 and not FLAGS.use_tpu"),
        (_BY_NAME, "FLAGS.name == 'adamw'"),
        (_BY_NAME, "FLAGS.name in ('adamw', 'lamb')"),
        (f"use = FLAGS.decay > 0\nif use:\n    {_ADAMW}\nelse:\n    {_ADAM}", "FLAGS.decay > 0"),
        ("optimizer = AdamW(False, 'AdamW') if FLAGS.decay else tf.train.AdamOptimizer(0.1)", "FLAGS.decay"),
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
        (_BY_DECAY, "True"),
        (_BY_DECAY, "isinstance(optimizer, tf.train.Optimizer)"),
        (_BY_DECAY, "isinstance(optimizer, other)"),
        (_BY_DECAY, "isinstance(other, AdamW)"),
        (_BY_DECAY, "isinstance(optimizer, AdamW) or FLAGS.counts"),
        (_BY_DECAY, "FLAGS.decay >= 0"),
        (_BY_DECAY, "FLAGS.decay < 1"),
        (_BY_DECAY, "FLAGS.warmup > 0"),
        (_BY_DECAY + "\nFLAGS.decay = 0.1", "FLAGS.decay > 0"),
        (_BY_DECAY + "\nFLAGS = other", "FLAGS.decay > 0"),
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


_WRAP = "opt = tfmp.LossScaleOptimizer(opt, manager)\n"


@pytest.mark.parametrize(
    ("text", "certain"),
    [
        (_WRAP, True),
        (f"opt = make()\nif float16:\n    {_WRAP}", False),
        (f"{_WRAP}opt = hvd.DistributedOptimizer(opt)\n", True),
        ("def make():\n    return tfmp.LossScaleOptimizer(o, m)\nopt = make()\n", True),
        ("opt = other.LossScaleOptimizer(opt, manager)\n", None),
        ("opt = make()\n", None),
    ],
)
def test_a_wrapper_is_found_through_assignments_and_functions(text: str, certain: bool | None) -> None:
    script = Script(f"import other\nimport tfmp\n{text}opt.minimize(loss)\n")
    ((_, owner),) = script.methods("minimize")
    wrapping = WrappedOptimizers(script).wrapping(owner)
    assert (None if wrapping is None else wrapping.certain) is certain


@pytest.mark.parametrize(
    ("loss", "grads", "scale"),
    [
        ("loss * scale", "[g / scale for g in grads]", "scale"),
        ("tf.cast(loss * 128, tf.float32)", "[g / 128.0 for g in grads]", "128"),
        ("tf.multiply(loss, scale)", "[g * (1.0 / scale) for g in grads]", "scale"),
        ("loss * scale", "[g / 2 for g in grads]", None),
        ("loss * scale / scale", "[g / scale for g in grads]", None),
        ("loss", "grads", None),
    ],
)
def test_the_factor_of_the_loss_that_divides_the_gradients_is_found(loss: str, grads: str, scale: str | None) -> None:
    script = Script(f"import tensorflow as tf\ngrads = tf.gradients({loss}, w)\nunscaled = {grads}\n")
    call = next(call for call in script.nodes(cst.Call) if script.name_of(call.func) == "tensorflow.gradients")
    found = find_manual_scaling(script, call)
    assert (None if found is None else script.code(found[0])) == scale


@pytest.mark.parametrize(
    ("text", "operator", "found"),
    [
        ("a * b", cst.Multiply, ["a", "b"]),
        ("tf.math.multiply(a, y=b)", cst.Multiply, ["a", "b"]),
        ("tf.div(a, b)", cst.Divide, ["a", "b"]),
        ("a / b", cst.Multiply, []),
        ("other.multiply(a, b)", cst.Multiply, []),
        ("tf.add(a)", cst.Add, []),
    ],
)
def test_operators_and_functions_give_their_operands(
    text: str, operator: type[cst.BaseBinaryOp], found: list[str]
) -> None:
    script = Script(f"import tensorflow as tf\nread({text})\n")
    node = script.nodes(cst.Call)[0].args[0].value
    assert [script.code(each) for each in operands(script, node, operator)] == found


def test_an_assignment_with_an_operator_gives_its_target_and_its_value() -> None:
    script = Script("grad /= scale\n")
    (node,) = script.nodes(cst.AugAssign)
    assert [script.code(each) for each in operands(script, node, cst.Divide)] == ["grad", "scale"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tf.cast(tf.constant(8.0), tf.float16)", "8.0"),
        ("tf.identity(step.read_value())", "step"),
        ("step", "step"),
        ("tf.reduce_sum(step)", "tf.reduce_sum(step)"),
    ],
)
def test_casts_and_reads_are_left_out(text: str, found: str) -> None:
    script = Script(f"import tensorflow as tf\nread({text})\n")
    assert script.code(without_casts(script, script.nodes(cst.Call)[0].args[0].value)) == found


_HEAD = (
    "import tensorflow as tf\nfrom mine import Imported\n\n\n"
    "class Own({base}):\n    def apply_gradients(self, pairs, step=None):\n"
)


@pytest.mark.parametrize(
    ("base", "body", "expected"),
    [
        ("tf.train.Optimizer", "return step.assign_add(1)", True),
        ("tf.train.Optimizer", "return tf.assign(step, step + 1)", True),
        ("tf.train.Optimizer", "return super().apply_gradients(pairs, step)", True),
        ("tf.train.Optimizer", "return super().apply_gradients(pairs)", False),
        ("tf.train.Optimizer", "return self.update(pairs, tf.cast(step, tf.float32))", False),
        ("tf.train.Optimizer", "return self.update(pairs, step)", None),
        ("Imported", "return super().apply_gradients(pairs, step)", None),
        ("Imported", "return tf.no_op()", False),
    ],
)
def test_a_class_is_judged_by_its_apply_gradients(base: str, body: str, expected: bool | None) -> None:
    script = Script(_HEAD.format(base=base) + f"        {body}\n\n\nOwn(0.1)\n")
    assert counts(script, script.nodes(cst.Call)[-1].func) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tf.train.AdamOptimizer", True),
        ("tf.compat.v1.train.AdamOptimizer", True),
        ("AdamWeightDecayOptimizer", False),
        ("tfmp.bert.LAMBOptimizer", True),
        ("other.Optimizer", None),
    ],
)
def test_a_class_from_elsewhere_is_judged_by_its_name(name: str, expected: bool | None) -> None:
    script = Script(f"import other\nimport tensorflow as tf\nimport tfmp.bert\n{name}(0.1)\n")
    assert counts(script, script.nodes(cst.Call)[0].func) is expected


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("loss, global_step", Given.SAME),
        ("loss, global_step=local_step", Given.OTHER),
        ("loss, **arguments", Given.OTHER),
        ("loss", Given.NONE),
    ],
)
def test_the_counter_that_a_step_receives_is_compared(arguments: str, given: Given) -> None:
    script = Script(f"opt.minimize({arguments})\nglobal_step.assign_add(1)\n")
    assert [step.given for step in optimizer_steps(script)] == [given]


def test_the_optimizers_are_found_through_wrappers_and_branches() -> None:
    script = Script(
        "import tensorflow as tf\nimport tfmp\nopt = LAMBOptimizer() if lamb else tf.train.AdamOptimizer()\n"
        "opt = tf.contrib.tpu.CrossShardOptimizer(opt)\nif fp16:\n    opt = tfmp.LossScaleOptimizer(opt, manager)\n"
        "opt.minimize(loss, global_step)\nglobal_step.assign_add(1)\n"
    )
    (step,) = optimizer_steps(script)
    found = {(each.counts, each.is_berts, each.is_wrapped) for each in step.optimizers}
    assert found == {(counts, not counts, wrapped) for counts in (True, False) for wrapped in (True, False)}
    assert [script.line(each) for each in step.wrappers] == [6]


def test_optimizers_are_unknown_if_one_of_them_is() -> None:
    script = Script("opt = given or make()\nopt.minimize(loss, global_step)\nglobal_step.assign_add(1)\n")
    assert [step.optimizers for step in optimizer_steps(script)] == [[]]


_CLASSES = """
import tensorflow as tf
from elsewhere import Other
class Own(tf.train.Optimizer): pass
class Derived(Own): pass
Alias = Own
def f(cls):
    made = {made}(0.1)
    return {test}
"""


def _answer(made: str, test: str) -> bool | None:
    script = Script(_CLASSES.format(made=made, test=test))
    (returned,) = script.nodes(cst.Return)
    (assigned,) = (node.value for node in script.nodes(cst.Assign) if dotted(node.targets[0].target) == "made")
    assert returned.value is not None
    assert isinstance(assigned, cst.Call)
    return class_answer(script, returned.value, assigned, lambda node: dotted(node) == "made")


@pytest.mark.parametrize(
    ("made", "test", "answer"),
    [
        ("Own", "isinstance(made, Own)", True),
        ("Derived", "isinstance(made, Own)", True),
        ("Derived", "type(made) is Own", False),
        ("Derived", "type(made) is not Own", True),
        ("Own", "isinstance(made, (Derived, Own))", True),
        ("Own", "type(made) in (Derived, Own)", True),
        ("Own", "made.__class__.__name__ == 'Own'", True),
        ("Own", "type(made).__name__ != 'Own'", False),
        ("Own", "type(made) == Alias", True),
        ("Own", "isinstance(made, tf.train.Optimizer)", True),
        ("tf.train.AdamOptimizer", "isinstance(made, tf.train.Optimizer)", True),
        ("tf.train.AdamOptimizer", "isinstance(made, tf.train.MomentumOptimizer)", False),
        ("tf.train.AdamOptimizer", "isinstance(made, Own)", False),
        ("tf.train.AdamOptimizer", "isinstance(made, Other)", False),
        ("tf.train.AdamOptimizer", "not isinstance(made, Own)", True),
        ("Other", "isinstance(made, Own)", False),
        ("Other", "isinstance(made, tf.train.AdamOptimizer)", None),
        ("Own", "isinstance(made, cls)", None),
        ("Own", "isinstance(other, Own)", None),
        ("Own", "isinstance(made, Own) and a", None),
        ("Own", "isinstance(made, Own) or a", True),
        ("tf.train.AdamOptimizer", "isinstance(made, Own) and a", False),
        ("Own", "made is None", None),
    ],
)
def test_a_condition_on_a_class_has_this_answer(made: str, test: str, answer: bool | None) -> None:
    assert _answer(made, test) is answer
