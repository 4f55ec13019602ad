"""All rules, in the order of their numbers."""

from collections.abc import Callable, Iterator

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Result
from tfmp.migrate.rules import misuse, removed_names
from tfmp.migrate.rules.contrib import mixed_precision, other_contrib
from tfmp.migrate.rules.loss_scaling import advised_names, graph_rewrite, keras_experimental, manual_loss_scaling
from tfmp.migrate.rules.npu import npu_bridge
from tfmp.migrate.rules.tensorflow1 import (
    out_of_sight,
    unclear_imports,
    unknown_names,
    v1_behavior,
    without_estimator,
)
from tfmp.migrate.rules.training import fetches, half_range, step_counter

#: A rule reads a script and yields edits and findings. It is named `rewrite` if it may edit, else `report`.
Rule = Callable[[Script], Iterator[Result]]

RULES: tuple[Rule, ...] = (
    v1_behavior.rewrite,
    mixed_precision.rewrite,
    unclear_imports.report,
    out_of_sight.report,
    npu_bridge.rewrite,
    graph_rewrite.report,
    keras_experimental.rewrite,
    manual_loss_scaling.report,
    advised_names.report,
    step_counter.report,
    fetches.report,
    misuse.report,
    other_contrib.rewrite,
    unknown_names.report,
    without_estimator.rewrite,
    half_range.report,
    removed_names.rewrite,
)
