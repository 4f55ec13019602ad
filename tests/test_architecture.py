"""The imports that the design allows, and no other."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_MODULES = sorted((_ROOT / "tfmp").rglob("*.py"))

_LEAVES = {"tfmp.types", "tfmp.optional", "tfmp.core.settings"}
_CORE = {
    f"tfmp.core.{name}"
    for name in (
        "accumulation",
        "accumulation_settings",
        "accumulators",
        "autograph",
        "numerics",
        "reductions",
        "overflow",
        "overflow_counts",
        "inspection",
        "outcomes",
        "managers",
        "horovods",
        "distribute",
        "lists",
        "scaler",
        "steps_of_graph",
        "verdicts",
    )
}
_MONITORING = {f"tfmp.monitoring.{name}" for name in ("guilty", "log", "stuck")}
_BELOW_MANAGERS = {"tfmp.core.numerics", "tfmp.core.outcomes", "tfmp.core.state", *_LEAVES}
_RULES = {
    f"tfmp.migrate.rules.{name}"
    for name in (
        *(f"contrib.{name}" for name in ("contrib_imports", "contrib_names", "indirect_access", "other_contrib")),
        *(f"loss_scaling.{name}" for name in ("environment", "graph_rewrite", "keras_experimental")),
        *(f"loss_scaling.{name}" for name in ("manual_loss_scaling", "openseq2seq", "storage_getters")),
        "misuse",
        *(f"misuse.{name}" for name in ("attributes", "clipped", "doubled", "inner_optimizer_steps")),
        *(f"misuse.{name}" for name in ("subclasses", "unscaled_gradients", "wrapper_order")),
        *(f"npu.{name}" for name in ("npu_imports", "npu_star_import")),
        *(f"tensorflow1.{name}" for name in ("unknown_names", "v1_behavior", "without_estimator")),
        *(f"training.{name}" for name in ("fetches", "step_counter")),
    )
}
_TABLES = {
    f"tfmp.migrate.tables.{name}"
    for name in ("api_names", "changed_positions", "contrib_successors", "npu_bridge_names")
}
_ANALYSIS = {
    f"tfmp.migrate.analysis.{name}"
    for name in (
        "bindings",
        "calls",
        "conditions",
        "data_flow",
        "dotted_names",
        "global_step_updates",
        "gradient_values",
        "guarded_imports",
        "loss_scale_wrappers",
        "manual_scaling",
        "project_role",
        "return_values",
        "script",
        "tf_version",
    )
}
_RULES_SEE = {"tfmp.migrate.edits.results", "tfmp.migrate.edits.import_edits", *_ANALYSIS, *_TABLES}

# Which modules of tfmp a module may import. `state` and `graph_variables` are the storage below the managers,
# `settings` checks what users pass.
_ALLOWED = {
    "tfmp": {"tfmp.keras_registration", "tfmp.optional"},
    "tfmp.keras_registration": set(),
    "tfmp.types": set(),
    "tfmp.optional": set(),
    "tfmp.core.numerics": {"tfmp.core.xla", "tfmp.types"},
    "tfmp.core.reductions": {"tfmp.core.numerics", "tfmp.core.xla", "tfmp.types"},
    "tfmp.core.xla": set(),
    "tfmp.core.compilation": {"tfmp.core.numerics", "tfmp.core.xla", "tfmp.types"},
    "tfmp.core.debugging": set(),
    "tfmp.core.settings": set(),
    "tfmp.core.lists": {"tfmp.types"},
    "tfmp.core.graph_variables": {"tfmp.types"},
    "tfmp.core.state": {"tfmp.core.graph_variables", "tfmp.types"},
    "tfmp.core.overflow": {"tfmp.core.reductions", *_LEAVES},
    "tfmp.core.inspection": {"tfmp.core.numerics", "tfmp.core.overflow", "tfmp.core.reductions", "tfmp.types"},
    "tfmp.core.overflow_counts": {"tfmp.core.overflow", "tfmp.core.state"},
    "tfmp.core.outcomes": set(),
    "tfmp.core.managers": {
        f"tfmp.core.managers.{name}" for name in ("base", "exponential", "fixed", "log_max", "specification")
    },
    "tfmp.core.managers.base": _BELOW_MANAGERS,
    "tfmp.core.managers.fixed": {"tfmp.core.managers.base", *_BELOW_MANAGERS},
    "tfmp.core.managers.exponential": {"tfmp.core.managers.base", *_BELOW_MANAGERS},
    "tfmp.core.managers.log_max": {"tfmp.core.managers.base", *_BELOW_MANAGERS},
    "tfmp.core.managers.specification": {
        "tfmp.core.settings",
        *(f"tfmp.core.managers.{name}" for name in ("base", "exponential", "fixed", "log_max")),
    },
    "tfmp.core.horovods": set(),
    "tfmp.core.accumulation": {
        *(f"tfmp.core.{name}" for name in ("accumulation_settings", "autograph", "conditionals", "inspection")),
        *(f"tfmp.core.{name}" for name in ("lists", "numerics", "overflow", "verdicts")),
        *_LEAVES,
    },
    "tfmp.core.accumulation_settings": {"tfmp.core.settings"},
    "tfmp.core.accumulators": {
        f"tfmp.core.{name}" for name in ("accumulation", "accumulation_settings", "overflow", "state")
    },
    "tfmp.core.autograph": set(),
    "tfmp.core.clipping": {*(f"tfmp.core.{name}" for name in ("lists", "numerics", "reductions")), *_LEAVES},
    "tfmp.core.conditionals": {"tfmp.core.numerics", "tfmp.core.xla", "tfmp.types"},
    "tfmp.core.distribute": {
        f"tfmp.core.distribute.{name}" for name in ("base", "current", "horovod", "mirrored", "single_process")
    },
    "tfmp.core.distribute.base": {"tfmp.types"},
    "tfmp.core.distribute.sums": set(),
    "tfmp.core.distribute.single_process": {"tfmp.core.conditionals", "tfmp.types"},
    "tfmp.core.distribute.mirrored": {
        *(f"tfmp.core.{name}" for name in ("conditionals", "distribute.sums", "numerics")),
        "tfmp.types",
    },
    "tfmp.core.distribute.horovod": {
        *(f"tfmp.core.{name}" for name in ("distribute.single_process", "distribute.sums", "numerics")),
        "tfmp.types",
    },
    "tfmp.core.distribute.current": {
        "tfmp.core.horovods",
        *(f"tfmp.core.distribute.{name}" for name in ("base", "horovod", "mirrored", "single_process")),
    },
    "tfmp.core.noted_losses": set(),
    "tfmp.core.call_sites": set(),
    "tfmp.core.scaled_losses": {"tfmp.core.call_sites", "tfmp.types"},
    "tfmp.core.scaler": {"tfmp.core.noted_losses", "tfmp.types", *_CORE} - {"tfmp.core.scaler"},
    "tfmp.core.steps_of_graph": {f"tfmp.core.{name}" for name in ("managers", "overflow_counts")},
    "tfmp.core.verdicts": set(),
    "tfmp.core.findings": {f"tfmp.core.{name}" for name in ("state", "verdicts")},
    "tfmp.core.iteration": {"tfmp.core.verdicts"},
    "tfmp.core.optimizer_steps": {"tfmp.types", *_CORE},
    "tfmp.grad_scaler": {
        *(
            f"tfmp.core.{name}"
            for name in (
                "conditionals",
                "findings",
                "iteration",
                "optimizer_steps",
                "scaled_losses",
                "step_properties",
            )
        ),
        *_LEAVES,
        *_CORE,
    },
    "tfmp.batch_replay": {
        *(f"tfmp.core.{name}" for name in ("iteration", "managers", "settings", "step_properties")),
        "tfmp.grad_scaler",
    },
    "tfmp.core.step_properties": {f"tfmp.core.{name}" for name in ("managers", "overflow_counts", "scaler")},
    "tfmp.optimizers.base": {"tfmp.core.step_properties", "tfmp.optional", "tfmp.types", *_CORE},
    "tfmp.optimizers.keras": {
        "tfmp.core.call_sites",
        "tfmp.core.settings",
        "tfmp.optimizers.base",
        "tfmp.optimizers.keras_accumulation",
        "tfmp.types",
        *_CORE,
    },
    "tfmp.optimizers.keras_accumulation": {"tfmp.types", *_CORE},
    "tfmp.optimizers.keras2": {
        *(f"tfmp.optimizers.{name}" for name in ("base", "keras", "keras_accumulation")),
        "tfmp.types",
        *_CORE,
    },
    "tfmp.optimizers.keras215": {"tfmp.optimizers.keras", "tfmp.optimizers.keras2"},
    "tfmp.optimizers.keras3": {
        *(f"tfmp.optimizers.{name}" for name in ("keras", "keras3_update", "keras_accumulation")),
        "tfmp.types",
        *_CORE,
    },
    "tfmp.optimizers.keras3_update": {
        *(f"tfmp.core.{name}" for name in ("compilation", "debugging", "xla")),
        "tfmp.types",
        *_CORE,
    },
    "tfmp.optimizers.tf_keras": {"tfmp.optimizers.keras", "tfmp.optimizers.keras2"},
    "tfmp.optimizers.v1": {"tfmp.core.call_sites", "tfmp.core.settings", "tfmp.optimizers.base", "tfmp.types", *_CORE},
    "tfmp.monitoring.callbacks": {
        "tfmp.core.call_sites",
        "tfmp.core.step_properties",
        "tfmp.optimizers.base",
        *_MONITORING,
        *_LEAVES,
        *_CORE,
    },
    "tfmp.monitoring.graph_losses": {"tfmp.core.noted_losses", *_CORE},
    "tfmp.monitoring.guilty": {*_CORE},
    "tfmp.monitoring.log": set(),
    "tfmp.monitoring.hooks": {
        "tfmp.monitoring.graph_losses",
        "tfmp.monitoring.step_counting",
        *_MONITORING,
        *_LEAVES,
        *_CORE,
    },
    "tfmp.monitoring.step_counting": {"tfmp.core.call_sites"},
    "tfmp.monitoring.stuck": {*_LEAVES, *_CORE},
    "tfmp.npu": {"tfmp.npu.advice", "tfmp.optional"},
    "tfmp.npu.advice": set(),
    "tfmp.npu.npu_loss_scale_manager": {"tfmp.core.settings", *_CORE},
    "tfmp.npu.npu_loss_scale_optimizer": {
        "tfmp.npu.npu_loss_scale_manager",
        "tfmp.optimizers.v1",
        "tfmp.types",
        *_CORE,
    },
    "tfmp.precision.storage": {"tfmp.types", *_CORE},
    "tfmp.checkpoints.files": set(),
    "tfmp.checkpoints.layouts": {"tfmp.checkpoints.files"},
    "tfmp.checkpoints.states": {"tfmp.checkpoints.files", "tfmp.checkpoints.layouts"},
    "tfmp.checkpoints.names": {"tfmp.checkpoints.files", "tfmp.core.graph_variables", "tfmp.core.lists"},
    # Tables, analysis of scripts, rules, the command: each may import those before it.
    **{f"tfmp.migrate{package}": set() for package in ("", ".analysis", ".cli", ".edits", ".tables")},
    **{f"tfmp.migrate.rules.{group}": set() for group in ("contrib", "loss_scaling", "npu", "tensorflow1", "training")},
    **{table: set() for table in _TABLES},
    "tfmp.migrate.tables.npu_bridge_names": {"tfmp.npu.advice"},
    **{module: {*_ANALYSIS, *_TABLES} - {module} for module in _ANALYSIS},
    "tfmp.migrate.edits.results": set(),
    "tfmp.migrate.edits.import_edits": {"tfmp.migrate.edits.results", *_ANALYSIS},
    **dict.fromkeys(_RULES, _RULES_SEE),
    "tfmp.migrate.rules": _RULES | _RULES_SEE,
    "tfmp.migrate.rules.misuse": _RULES | _RULES_SEE,
    # The names that these rules are about too.
    **{
        f"tfmp.migrate.rules.contrib.{name}": {"tfmp.migrate.rules.contrib.contrib_names", *_RULES_SEE}
        for name in ("contrib_imports", "indirect_access", "other_contrib")
    },
    "tfmp.migrate.edits.rewriting": {"tfmp.migrate.rules", *_RULES_SEE},
    **{f"tfmp.migrate.cli.{name}": set() for name in ("files", "modules", "syntax", "unified_diff")},
    "tfmp.migrate.cli.processing": {
        *(f"tfmp.migrate.cli.{name}" for name in ("files", "modules", "syntax", "unified_diff")),
        *(f"tfmp.migrate.edits.{name}" for name in ("results", "rewriting")),
        *(f"tfmp.migrate.analysis.{name}" for name in ("project_role", "tf_version")),
    },
    "tfmp.migrate.cli.project": {
        *(f"tfmp.migrate.{name}" for name in ("cli.modules", "cli.processing", "analysis.tf_version", "edits.results"))
    },
    "tfmp.migrate.cli.runs": {f"tfmp.migrate.cli.{name}" for name in ("files", "processing", "project", "workers")},
    "tfmp.migrate.cli.workers": {f"tfmp.migrate.cli.{name}" for name in ("files", "processing")},
    "tfmp.migrate.cli.reporting": {
        f"tfmp.migrate.{name}" for name in ("cli.processing", "edits.results", "edits.rewriting")
    },
    "tfmp.migrate.cli.command": {
        *(f"tfmp.migrate.cli.{name}" for name in ("files", "processing", "reporting", "runs", "workers")),
        *("tfmp.migrate.edits.results", "tfmp.optional"),
    },
    "tfmp.migrate.__main__": {"tfmp.migrate.cli.command"},
    "tfmp.bert": {"tfmp.optional"},
    "tfmp.bert.accumulation": {"tfmp.core.conditionals", "tfmp.types", *_CORE},
    "tfmp.bert.google": {"tfmp.bert.optimizers", "tfmp.bert.training", *_LEAVES},
    "tfmp.bert.lamb": {"tfmp.bert.optimizers", "tfmp.types"},
    "tfmp.bert.modes": {*_CORE},
    "tfmp.bert.normalization": {"tfmp.core.numerics"},
    "tfmp.bert.optimizers": {"tfmp.core.lists", "tfmp.core.numerics", *_LEAVES},
    "tfmp.bert.schedule": {"tfmp.core.settings"},
    "tfmp.bert.throughput": {"tfmp.core.settings"},
    "tfmp.bert.training": {
        *(f"tfmp.bert.{name}" for name in ("accumulation", "lamb", "modes", "optimizers", "schedule")),
        *("tfmp.core.clipping", "tfmp.optimizers.base", "tfmp.optimizers.v1"),
        *_LEAVES,
        *_CORE,
    },
    **{f"tfmp.{package}": set() for package in ("checkpoints", "core", "optimizers", "monitoring", "precision")},
}
# Only inside a function: importing the front door must not import what it opens to.
_ALLOWED_INSIDE_FUNCTIONS = {
    "tfmp.keras_registration": {"tfmp.optimizers.base"},
    "tfmp.optimizers.base": {f"tfmp.optimizers.{name}" for name in ("v1", "keras3", "keras215", "tf_keras")},
}
_ALLOWED_PACKAGES = {"numpy", "tensorflow"}
_ALLOWED_PACKAGES_OF = {
    # A dependency of TensorFlow.
    "tfmp.checkpoints.files": {"h5py"},
    "tfmp.monitoring.callbacks": {"keras", "tf_keras"},
    "tfmp.optimizers.keras215": {"keras"},
    "tfmp.optimizers.keras3": {"keras"},
    "tfmp.optimizers.keras3_update": {"keras"},
    "tfmp.optimizers.tf_keras": {"tf_keras"},
}


def _packages(name: str) -> set[str]:
    if name.startswith("tfmp.migrate"):
        # It runs where TensorFlow is not.
        return {"libcst", "tqdm"}
    return _ALLOWED_PACKAGES | _ALLOWED_PACKAGES_OF.get(name, set())


def _name(path: Path) -> str:
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                # `from tfmp.core import numerics` imports a module; `from tfmp.core.numerics import scale` a name.
                full = f"{node.module}.{alias.name}"
                yield node, full if full in _ALLOWED else str(node.module)


def _type_checking_nodes(tree: ast.AST) -> set[ast.AST]:
    guarded = (
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    return {inner for node in guarded for inner in ast.walk(node)}


def _inside_functions(tree: ast.AST) -> set[ast.AST]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {inner for function in functions for inner in ast.walk(function)}


@pytest.mark.parametrize("path", _MODULES, ids=_name)
def test_module_imports_only_what_the_design_allows(path: Path) -> None:
    name = _name(path)
    assert name in _ALLOWED, f"{name} is not in the design"
    tree = ast.parse(path.read_text())
    ignored = _type_checking_nodes(tree)
    allowed = _ALLOWED[name] | _ALLOWED_INSIDE_FUNCTIONS.get(name, set())
    for node, imported in _imports(tree):
        if node in ignored:
            continue
        if imported.split(".")[0] == "tfmp":
            assert imported in allowed, f"{name} may not import {imported}"
            if imported in _ALLOWED_INSIDE_FUNCTIONS.get(name, set()):
                assert node in _inside_functions(tree), f"{name} may import {imported} only inside a function"
        elif imported.split(".")[0] not in _packages(name):
            assert imported.split(".")[0] in sys.stdlib_module_names, f"{name} imports {imported}"


def _listed_in_design() -> Iterator[str]:
    """Yield the paths of the list of layers; what stands in a line beside the first name is of the same directory."""
    text = (_ROOT / "docs" / "design.md").read_text()
    parents: list[str] = []
    for line in text.split("```\ntfmp/\n")[1].split("```")[0].splitlines():
        first, *words = line.split()
        del parents[(len(line) - len(line.lstrip())) // 2 - 1 :]
        path = "/".join([*parents, first])
        yield path
        if path.endswith("/"):
            parents.append(first.rstrip("/"))
        else:
            yield from ("/".join([*parents, word]) for word in words if word.endswith(".py"))


def test_design_lists_every_module() -> None:
    listed = set(_listed_in_design())
    # A directory without lines of its own stands for all that is in it.
    whole = tuple(path for path in listed if path.endswith("/") and sum(each.startswith(path) for each in listed) == 1)
    modules = {path.relative_to(_ROOT / "tfmp").as_posix() for path in _MODULES}
    named = {path for path in modules if not path.startswith(whole) and "/__" not in path}
    assert named == {path for path in listed if path.endswith(".py")}
    assert all(any(module.startswith(path) for module in modules) for path in whole)


@pytest.mark.parametrize("path", sorted((_ROOT / "estimator_examples").rglob("*.py")), ids=_name)
def test_examples_import_public_names_only(path: Path) -> None:
    for _, imported in _imports(ast.parse(path.read_text())):
        public = imported in {"tfmp", "tfmp.bert"}
        assert public or not imported.startswith("tfmp."), f"{path.name} imports {imported}"
