"""R10: scripts that increment global_step although their optimizer increments it too."""

from collections.abc import Iterator, Sequence

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import WrappedOptimizers
from tfmp.migrate.analysis.training.optimizer_steps import Given, OptimizerStep, optimizer_steps
from tfmp.migrate.edits.results import Finding, Level, Options, Result

RULE = "R10"
# Arguments of tfmp.bert.create_optimizer that scripts name as NVIDIA's BERT does.
_BERTS_ARGUMENTS = ("num_accumulation_steps", "optimizer_type", "allreduce_post_accumulation", "init_loss_scale")


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report steps that are counted twice, and counters that count skipped steps."""
    del options
    reported: set[cst.Call] = set()
    for step in optimizer_steps(script) if "assign" in script.text else ():
        if step.update.call in reported:
            continue
        found = _of_step(script, step)
        if found is not None and step.is_run_with_update is not False:
            reported.add(step.update.call)
            level, message, details = found
            if step.is_run_with_update is None:
                details.append(_IF_BOTH.format(line=script.line(step.call)))
            if any(each.is_berts for each in step.optimizers):
                details.append(_kit(script, step))
            yield Finding(RULE, script.line(step.update.call), level, message, " ".join(details))


def _of_step(script: Script, step: OptimizerStep) -> tuple[Level, str, list[str]] | None:
    """Return the level, the message and the details for an increment with a step; None if the pair is correct."""
    optimizers = script.cached(WrappedOptimizers)
    if step.wrappers:
        # tfmp's wrappers count in all cases; TensorFlow's leave that to the optimizer inside.
        wrapper = min(step.wrappers, key=optimizers.is_tensorflows)
        of_wrapped = _of_tensorflows if optimizers.is_tensorflows(wrapper) else _of_tfmps
        message = of_wrapped(script, step)
        return (Level.WRONG, message, [_receives(script, step, [wrapper])]) if message else None
    if step.given is not Given.SAME:
        return None
    plain = [each.counts for each in step.optimizers if not each.is_wrapped]
    if True in plain:
        # BERT's LAMB corrects its moments by global_step, and a wrapper in another branch counts it.
        is_needed = optimizers.wrapping(step.optimizer) is not None or _is_of_kit(script)
        message = _TWICE_SOMETIMES if not all(plain) else _TWICE_NEEDED if is_needed else _TWICE
        return Level.WRONG, message, [_receives(script, step, [])]
    if plain and all(each is False for each in plain) and optimizers.wrapping(step.optimizer) is None:
        return Level.NOTE, _NOT_COUNTING, []
    return None


def _of_tfmps(script: Script, step: OptimizerStep) -> str:
    """Return the message for a step of an optimizer inside a wrapper of tfmp; empty if it is correct."""
    plain = [each for each in step.optimizers if not each.is_wrapped]
    if step.given is Given.SAME:
        is_never_needed = step.is_certain or (plain and all(each.counts for each in plain))
        return _BOTH + (_DELETE if is_never_needed else _ONLY_ELSE)
    if step.given is Given.NONE and not step.update.conditional:
        is_needed = not step.is_certain and any(each.counts is False for each in plain)
        return _SKIPPED + (_PASS_AND_ONLY_ELSE if is_needed else _PASS_AND_DELETE)
    return ""


def _of_tensorflows(script: Script, step: OptimizerStep) -> str:
    """Return the message for a step of an optimizer inside TensorFlow's wrapper; empty if it is correct."""
    optimizers = script.cached(WrappedOptimizers)
    inner = [each.counts for each in step.optimizers]
    if step.given is Given.SAME and True in inner:
        return _BOTH + (_DELETE if all(inner) else _ONLY_NOT_COUNTING)
    skips = any(optimizers.may_skip(wrapper) for wrapper in step.wrappers) and not step.update.conditional
    if skips and step.given is Given.NONE:
        return _SKIPPED + (_PASS_AND_DELETE if inner and all(inner) else _IF_FINITE)
    if skips and step.given is Given.SAME and inner and all(each is False for each in inner):
        return _SKIPPED + _IF_FINITE
    return ""


def _receives(script: Script, step: OptimizerStep, wrappers: Sequence[cst.Call]) -> str:
    """Return the sentence that names the optimizer, the counter and the line of the step."""
    optimizers, counter, line = (
        script.cached(WrappedOptimizers),
        script.code(step.update.counter),
        script.line(step.call),
    )
    wrapper, is_certain = (wrappers[0], step.is_certain) if wrappers else (step.call, True)
    name = optimizers.description(step.optimizer, wrapper, is_certain)
    if step.given is Given.SAME:
        return f"Line {line} passes {counter} to {name}."
    return f"Line {line} calls {name} without global_step={counter}."


def _is_of_kit(script: Script) -> bool:
    return any(use.name.startswith("tfmp.bert.") for use in script.uses)


def _kit(script: Script, step: OptimizerStep) -> str:
    """Return the sentence that says how to call the training step of `tfmp.bert`, with what the script passes."""
    functions = [each for each in script.ancestors(step.update.call) if isinstance(each, cst.FunctionDef)]
    names = [param.name.value for param in functions[-1].params.params] if functions else []
    constructions = script.cached(WrappedOptimizers).constructions
    arguments = [f"{name}={name}" for name in ("manual_fp16", "use_fp16") if name in names]
    halves = [name for name in names if "fp16" in name or "amp" in name.split("_")]
    if not arguments and (halves or constructions):
        rewritten = any(script.cached(WrappedOptimizers).is_tensorflows(each) for each in constructions)
        arguments = [f"{'use_fp16' if rewritten else 'manual_fp16'}={halves[0] if halves else True}"]
    if "hvd" in names or any(each.name.split(".")[0] == "horovod" for each in script.imports):
        arguments.insert(0, "hvd=hvd")
    arguments += [f"{name}={name}" for name in _BERTS_ARGUMENTS if name in names]
    module, rest = ("tfmp.bert", ", ".join(("", *arguments))) if arguments else ("tfmp.bert.google", "")
    return _KIT.format(module=module, rest=rest)


_IF_BOTH = "This is so if one session.run executes both this line and line {line}."
_KIT = (
    "For BERT, tfmp has the whole training step, which counts only applied steps: `import {module}`, and "
    "{module}.create_optimizer(loss, init_lr, num_train_steps, num_warmup_steps{rest})."
)
_TWO = "so a step may count as two, and the learning rate and the end of the training follow the wrong count."
_TWICE = (
    "Both the optimizer, which receives it as global_step, and this line increment the global step, "
    f"{_TWO} Delete this increment, or leave global_step out of the optimizer's call."
)
_TWICE_NEEDED = (
    "Both the optimizer, which receives it as global_step and needs it, and this line increment the global step, "
    f"{_TWO} Delete this increment."
)
_TWICE_SOMETIMES = (
    "Both one of the optimizers, which receives it as global_step, and this line increment the global step, "
    f"{_TWO} Make this increment only for optimizers that do not increment it themselves."
)
_BOTH = (
    f"Both the loss-scale optimizer, which receives it as global_step, and this line increment the global step, {_TWO} "
)
_DELETE = "Delete this increment."
_ONLY_ELSE = "Make this increment only where the optimizer is not wrapped."
_ONLY_NOT_COUNTING = "Make this increment only where the optimizer inside does not increment it itself."
_SKIPPED = (
    "This line increments the global step for every step, also for those that the loss-scale optimizer skips after an "
    "overflow, so the learning rate decays too early. "
)
_PASS_AND_DELETE = (
    "Pass global_step to the optimizer's call, which counts applied steps only, and delete this increment."
)
_PASS_AND_ONLY_ELSE = (
    "Pass global_step to the optimizer's call, which counts applied steps only, and make this increment only where the "
    "optimizer is not wrapped."
)
_IF_FINITE = (
    "TensorFlow's wrapper does not count here, because it leaves that to the optimizer inside it. Increment only if "
    "the applied gradients are finite: finite = tf.reduce_all([tf.reduce_all(tf.is_finite(grad)) for grad in grads]), "
    "and global_step.assign_add(tf.cast(finite, global_step.dtype.base_dtype))."
)
_NOT_COUNTING = (
    "This increment is right as long as the optimizer does not increment the global step itself. Delete it if you put "
    "tfmp.LossScaleOptimizer around the optimizer, which increments it for applied steps only."
)
