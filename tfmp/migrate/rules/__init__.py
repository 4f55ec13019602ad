"""All rules, in the order of their numbers."""

from collections.abc import Callable, Iterator

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Options, Result
from tfmp.migrate.rules import misuse
from tfmp.migrate.rules.contrib import contrib_imports, contrib_names, indirect_access, other_contrib
from tfmp.migrate.rules.loss_scaling import (
    environment,
    graph_rewrite,
    keras_experimental,
    manual_loss_scaling,
    openseq2seq,
    storage_getters,
)
from tfmp.migrate.rules.npu import npu_imports, npu_star_import
from tfmp.migrate.rules.tensorflow1 import unknown_names, v1_behavior, without_estimator
from tfmp.migrate.rules.training import fetches, step_counter

#: A rule reads a script and yields edits and findings. It is named `rewrite` if it may edit, else `report`.
Rule = Callable[[Script, Options], Iterator[Result]]

RULES: tuple[Rule, ...] = (
    v1_behavior.rewrite,
    contrib_names.rewrite,
    contrib_imports.rewrite,
    indirect_access.rewrite,
    npu_imports.rewrite,
    npu_star_import.rewrite,
    graph_rewrite.rewrite,
    keras_experimental.rewrite,
    manual_loss_scaling.report,
    openseq2seq.report,
    storage_getters.report,
    step_counter.report,
    fetches.report,
    misuse.report,
    other_contrib.rewrite,
    unknown_names.report,
    without_estimator.rewrite,
    environment.report,
)
