"""R10: scripts that increment global_step although their optimizer increments it too."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.optimizer_steps import Given, OptimizerStep, optimizer_steps
from tfmp.migrate.edits.results import Finding, Level, Result

RULE = "R10"
# Arguments of tfmp.bert.create_optimizer that scripts name as NVIDIA's BERT does.
_BERTS_ARGUMENTS = ("num_accumulation_steps", "optimizer_type", "allreduce_post_accumulation", "init_loss_scale")


def report(script: Script) -> Iterator[Result]:
    """Report steps that are counted twice, and counters that count skipped steps."""
    reported: set[cst.Call] = set()
    for step in optimizer_steps(script) if "assign" in script.text else ():
        level, message = _judged(script, step) if step.update.call not in reported else (Level.NOTE, "")
        together = step.is_run_with_update() if message else False
        if together is not False:
            reported.add(step.update.call)
            details = [_names(script, step)]
            if together is None:
                details.append(f"This is so if one session.run executes both lines, {script.line(step.call)} and this.")
            if any(each.is_berts for each in step.optimizers):
                details.append(_kit(script, step))
            yield Finding(RULE, script.line(step.update.call), level, message, " ".join(details))


def _judged(script: Script, step: OptimizerStep) -> tuple[Level, str]:
    """Return the level and the message for an increment with a step; the message is empty if the pair is correct."""
    plain = [each.counts for each in step.optimizers if not each.is_wrapped]
    # tfmp's wrappers count in all cases; TensorFlow's leave that to the optimizer inside.
    if not all(map(script.cached(WrappedOptimizers).is_tensorflows, step.wrappers)):
        return Level.WRONG, _of_tfmps(step, plain)
    if step.wrappers:
        return Level.WRONG, _of_tensorflows(script, step)
    if step.given is not Given.SAME:
        return Level.NOTE, ""
    if True in plain:
        return Level.WRONG, _TWICE + (_DELETE if all(plain) else _ONLY_NOT_COUNTING)
    return Level.NOTE, _NOT_COUNTING if False in plain and step.wrapping is None else ""


def _of_tfmps(step: OptimizerStep, plain: Sequence[bool | None]) -> str:
    """Return the message for a step of an optimizer inside a wrapper of tfmp; empty if it is correct."""
    is_certain = step.wrapping is not None and step.wrapping.certain
    if step.given is Given.SAME:
        return _TWICE + (_DELETE if is_certain or (plain and all(plain)) else _ONLY_NOT_WRAPPED)
    if step.given is Given.NONE and not step.update.conditional:
        return _SKIPPED + _PASS + (_ONLY_NOT_WRAPPED if False in plain and not is_certain else _DELETE)
    return ""


def _of_tensorflows(script: Script, step: OptimizerStep) -> str:
    """Return the message for a step of an optimizer inside TensorFlow's wrapper; empty if it is correct."""
    inner = [each.counts for each in step.optimizers]
    all_count, none_counts = bool(inner) and all(inner), set(inner) == {False}
    skips = any(map(script.cached(WrappedOptimizers).may_skip, step.wrappers)) and not step.update.conditional
    if step.given is Given.SAME and (True in inner or (skips and not none_counts)):
        return _TWICE + _DELETE if all_count else _EITHER + _IF_FINITE
    if skips and step.given is not Given.OTHER:
        return _SKIPPED + (_PASS + _DELETE if all_count else _COUNTS_INSIDE + _IF_FINITE)
    return ""


def _names(script: Script, step: OptimizerStep) -> str:
    """Return the sentence that names the optimizer, the counter and the line of the step."""
    optimizers, counter = script.cached(WrappedOptimizers), script.code(step.update.counter)
    wrapper = min(step.wrappers, key=optimizers.is_tensorflows, default=step.call)
    is_certain = not step.wrappers or (step.wrapping is not None and step.wrapping.certain)
    name = optimizers.description(step.optimizer, wrapper, is_certain)
    is_passed = step.given is Given.SAME
    done = f"passes {counter} to {name}" if is_passed else f"calls {name} without global_step={counter}"
    return f"Line {script.line(step.call)} {done}."


def _kit(script: Script, step: OptimizerStep) -> str:
    """Return the sentence that says how to call the training step of `tfmp.bert`, with what the script passes."""
    optimizers = script.cached(WrappedOptimizers)
    functions = [each for each in script.ancestors(step.update.call) if isinstance(each, cst.FunctionDef)]
    names = [param.name.value for param in functions[-1].params.params] if functions else []
    halves = [name for name in names if "fp16" in name or "amp" in name.split("_")]
    arguments = ["hvd=hvd"] if "hvd" in names or any("horovod" in each.name for each in script.imports) else []
    if {"manual_fp16", "use_fp16"} & {*halves}:
        arguments += [f"{name}={name}" for name in halves]
    elif halves or optimizers.constructions:
        is_rewritten = any(map(optimizers.is_tensorflows, optimizers.constructions))
        arguments.append(f"{'use_fp16' if is_rewritten else 'manual_fp16'}={halves[0] if halves else True}")
    arguments += [f"{name}={name}" for name in _BERTS_ARGUMENTS if name in names]
    module = "tfmp.bert" if arguments else "tfmp.bert.google"
    return _KIT.format(module=module, rest="".join(f", {each}" for each in arguments))


_KIT = (
    "For BERT, tfmp has the whole training step, which counts only applied steps: write `import {module}` and "
    "{module}.create_optimizer(loss, init_lr, num_train_steps, num_warmup_steps{rest})."
)
_TWO = "so a step may count as two, and the learning rate and the end of the training follow the wrong count."
_TWICE = f"Both the optimizer, which receives it as global_step, and this line increment the global step, {_TWO} "
_DELETE = "Delete this increment."
_ONLY_NOT_WRAPPED = "Make this increment only where no loss-scale optimizer of tfmp is around the optimizer."
_ONLY_NOT_COUNTING = "Make this increment only for the optimizers that do not increment it themselves."
_SKIPPED = (
    "This line increments the global step for every step, also for those that the loss-scale optimizer skips after an "
    "overflow, so the learning rate decays too early. "
)
_PASS = "Pass global_step to the optimizer's call, which then counts applied steps only. "
_COUNTS_INSIDE = "TensorFlow's loss-scale optimizer leaves counting to the optimizer inside it. "
_EITHER = (
    f"{_COUNTS_INSIDE}If that one increments the global step, as those of tf.train do, this line increments it again, "
    f"{_TWO} Delete this increment then. If it does not, this line also counts the steps that are skipped after an "
    "overflow. "
)
_IF_FINITE = (
    "Increment only if the applied gradients are finite: "
    "finite = tf.reduce_all([tf.reduce_all(tf.is_finite(grad)) for grad in grads]), and "
    "global_step.assign_add(tf.cast(finite, global_step.dtype.base_dtype))."
)
_NOT_COUNTING = (
    "This increment is right as long as the optimizer does not increment the global step itself. Delete it if you put "
    "tfmp.LossScaleOptimizer around the optimizer, which increments it for applied steps only."
)
