"""Finds subclasses of loss scale managers and wrappers."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import PACKAGES
from tfmp.migrate.edits.results import Level

_MANAGERS = ("LossScaleManager", "FixedLossScaleManager", "ExponentialUpdateLossScaleManager")
_OPTIMIZERS = ("LossScaleOptimizer",)
_PROTOCOL = ("get_loss_scale", "update_loss_scale")
# Private attributes in which the managers of tf.contrib kept their state.
_OF_CONTRIB = (
    "_loss_scale",
    "_num_good_steps",
    "_num_bad_steps",
    "_incr_every_n_steps",
    "_decr_every_n_nan_or_inf",
    "_incr_ratio",
    "_decr_ratio",
)


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str]]:
    """Report, for each subclass of a manager or wrapper, whether it works with tfmp."""
    for node in script.nodes(cst.ClassDef):
        for base in node.bases:
            name = script.name_of(base.value)
            last = name.split(".")[-1]
            if not any(name.startswith(f"{package}.") for package in PACKAGES):
                continue
            if last in _OPTIMIZERS:
                yield node.name, Level.FAILS, _OPTIMIZER.format(name=node.name.value)
            elif last in _MANAGERS:
                yield node.name, *_of_manager(script, node, last)


def _of_manager(script: Script, node: cst.ClassDef, base: str) -> tuple[Level, str]:
    name = node.name.value
    defined = {each.name.value for each in script.nodes(cst.FunctionDef) if node in script.ancestors(each)}
    missing = [each for each in _PROTOCOL if each not in defined]
    if base == "LossScaleManager":
        if missing:
            return Level.FAILS, _MISSING.format(name=name, missing=" and ".join(missing))
        return Level.NOTE, _MANAGER.format(name=name)
    attributes = [each for each in script.nodes(cst.Attribute) if node in script.ancestors(each)]
    read = [each.attr.value for each in attributes if _is_self(each.value) and each.attr.value in _OF_CONTRIB]
    if read:
        return Level.FAILS, _PRIVATE.format(name=name, base=base, names=", ".join(dict.fromkeys(read)))
    return Level.NOTE, _MANAGER.format(name=name)


def _is_self(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Name) and node.value == "self"


_OPTIMIZER = (
    "{name} is a subclass of LossScaleOptimizer: tfmp's only picks the wrapper for an optimizer's type, and a subclass "
    "of it raises TypeError when it is made. Write class {name}(tfmp.optimizers.v1.LossScaleOptimizerV1) after import "
    "tfmp.optimizers.v1; compute_gradients, apply_gradients, _opt and _loss_scale_manager are as in tf.contrib, other "
    "private names are not."
)
_MANAGER = (
    "{name} is a manager of its own: tfmp takes it, by get_loss_scale() and update_loss_scale(finite_grads), and "
    "counts steps for it. The scale must be a float32 above 0."
)
_MISSING = "{name} lacks {missing}, which tfmp calls: a manager defines get_loss_scale and update_loss_scale."
_PRIVATE = (
    "{name} uses {names}, where tf.contrib's {base} kept its state: tfmp's keeps it elsewhere. Make {name} a subclass "
    "of tfmp.LossScaleManager with variables of its own, or set tfmp's {base} by its arguments."
)
