"""R15: environment variables that only NVIDIA's builds of TensorFlow read."""

from collections.abc import Iterator

import libcst as cst

from tfmp.migrate.analysis.expressions import literal_text
from tfmp.migrate.analysis.script import Script
from tfmp.migrate.edits.results import Finding, Level, Options, Result

RULE = "R15"
_PREFIX = "TF_ENABLE_AUTO_MIXED_PRECISION"
_CALLS = ("os.environ.setdefault", "os.putenv")
_REWRITE = "`opt = tf.compat.v1.train.experimental.enable_mixed_precision_graph_rewrite(opt)`"
_INSTEAD = {
    f"{_PREFIX}_LOSS_SCALING": "to scale the loss, write `opt = tfmp.LossScaleOptimizer(opt, manager)`; "
    "enable_mixed_precision_graph_rewrite scales it by itself",
}
_POLICY = "`tf.keras.mixed_precision.set_global_policy('mixed_float16')`"
_GENERAL = f"to turn mixed precision on, write {_REWRITE}, or in Keras {_POLICY}"


def report(script: Script, options: Options) -> Iterator[Result]:
    """Report each place that sets one of these variables."""
    del options
    for place, name in _settings(script):
        message = f"{name} has no effect outside of NVIDIA's containers: {_INSTEAD.get(name, _GENERAL)}."
        yield Finding(RULE, script.line(place), Level.NOTE, message)


def _settings(script: Script) -> Iterator[tuple[cst.CSTNode, str]]:
    """Yield each place that sets an environment variable, with the variable's name."""
    for target in script.nodes(cst.AssignTarget):
        if isinstance(target.target, cst.Subscript) and script.name_of(target.target.value) == "os.environ":
            index = target.target.slice[0].slice
            name = literal_text(index.value) if isinstance(index, cst.Index) else ""
            if name.startswith(_PREFIX):
                yield target, name
    for call in script.nodes(cst.Call):
        called = script.name_of(call.func)
        if called in _CALLS and call.args and literal_text(call.args[0].value).startswith(_PREFIX):
            yield call, literal_text(call.args[0].value)
        elif called == "os.environ.update":
            yield from ((node, name) for node, name in _updates(call) if name.startswith(_PREFIX))


def _updates(call: cst.Call) -> Iterator[tuple[cst.CSTNode, str]]:
    """Yield the variables that `os.environ.update(...)` sets, by keyword or in a dictionary."""
    for arg in call.args:
        if arg.keyword is not None:
            yield arg, arg.keyword.value
        elif isinstance(arg.value, cst.Dict):
            for element in arg.value.elements:
                if isinstance(element, cst.DictElement):
                    yield element, literal_text(element.key)
