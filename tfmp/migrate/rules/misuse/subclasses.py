"""Finds subclasses of loss scale managers and wrappers."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import dotted
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.loss_scale_wrappers import PACKAGES
from tfmp.migrate.edits.results import Level

_MANAGERS = ("FixedLossScaleManager", "ExponentialUpdateLossScaleManager")
# Private attributes in which the managers of tf.contrib kept their state.
_OF_CONTRIB = tuple(
    f"self.{name}"
    for name in (
        *("_loss_scale", "_num_good_steps", "_num_bad_steps", "_incr_every_n_steps"),
        *("_decr_every_n_nan_or_inf", "_incr_ratio", "_decr_ratio"),
    )
)


def find(script: Script) -> Iterator[tuple[cst.CSTNode, Level, str, str]]:
    """Report the subclasses of managers and wrappers that do not work with tfmp."""
    for node in script.nodes(cst.ClassDef):
        for base in node.bases:
            package, _, last = script.name_of(base.value).rpartition(".")
            if not any(f"{package}.".startswith(f"{each}.") for each in PACKAGES):
                continue
            if last == "LossScaleOptimizer":
                yield node.name, Level.FAILS, _OPTIMIZER, f"The class is {node.name.value}."
            inside = (each for each in script.nodes(cst.Attribute) if node in script.ancestors(each))
            private = dict.fromkeys(dotted(each) for each in inside if dotted(each) in _OF_CONTRIB)
            if last in _MANAGERS and private:
                yield node.name, Level.FAILS, _PRIVATE, f"{node.name.value} uses {', '.join(private)}."


_OPTIMIZER = (
    "A subclass of LossScaleOptimizer raises TypeError when it is constructed, because tfmp.LossScaleOptimizer only "
    "chooses the wrapper for the type of the optimizer. Write `import tfmp.optimizers.v1`, and "
    "tfmp.optimizers.v1.LossScaleOptimizerV1 as the base class. Its compute_gradients, apply_gradients, _opt and "
    "_loss_scale_manager are those of tf.contrib; other private names are not."
)
_PRIVATE = (
    "A subclass of a manager uses private attributes of tf.contrib's manager, which tfmp's does not have: it raises "
    "AttributeError. Make the class a subclass of tfmp.LossScaleManager with variables of its own, or set tfmp's "
    "manager by its arguments."
)
