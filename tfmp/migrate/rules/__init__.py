"""The rules, in the order of their numbers."""

from collections.abc import Callable, Iterator

from tfmp.migrate.reading.script import Script
from tfmp.migrate.results import Options, Result
from tfmp.migrate.rules import (
    contrib_imports,
    contrib_names,
    environment,
    fetches,
    graph_rewrite,
    hand_scaling,
    indirect_access,
    keras_experimental,
    misuse,
    npu_imports,
    npu_star_import,
    openseq2seq,
    other_contrib,
    step_counter,
    storage_getters,
    unknown_names,
    v1_behavior,
    without_estimator,
)

#: A rule looks at a script and yields what it has to say: `rewrite` edits, `report` does not.
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
    hand_scaling.report,
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
