"""Replacements of the names of the NPU bridge where there is no NPU."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tfmp import npu
from tfmp.npu.advice import ADVICE

STAR = "npu_bridge.npu_init"
#: The names that `tfmp.npu` has of modules of the bridge.
MEMBERS = {
    "npu_ops": ("dropout", "initialize_system", "shutdown_system"),
    "npu_unary_ops": ("gelu",),
    "ops_adapter": ("size", "rank"),
}

_PROTOBUF = "tensorflow.core.protobuf"
# Names that `npu_bridge.npu_init` takes from other modules, with these modules; empty for a top-level module.
_OF_OTHERS = {
    "os": "",
    "config_pb2": _PROTOBUF,
    "rewriter_config_pb2": _PROTOBUF,
    "RewriterConfig": f"{_PROTOBUF}.rewriter_config_pb2",
    "session": "tensorflow.python.client",
    "session_run_hook": "tensorflow.python.training",
}
# Advice for names of the star import that do not concern the NPU.
_ADVICE = {
    "tf": "write `import tensorflow.compat.v1 as tf`, and run this again",
    "backend": "use tf.compat.v1.keras.backend",
}
# The pattern must not match `inputs` and `INPUT_SIZE`, which contain "npu" too.
_OF_THE_BRIDGE = re.compile("(?<![A-Za-z])(?i:npu)|(?<=[a-z])N(PU|pu)|(?i:hccl)|^get_([a-z]+_)?rank_")


def advice(name: str) -> str:
    """Return the advice for a name of the bridge: the end of a sentence, without a full stop.

    Examples:
        >>> advice("npu_rnn")
        'use tf.compat.v1.nn.static_rnn'
    """
    word = name.rpartition(".")[2]
    if word in dir(npu):
        return "import it from tfmp.npu"
    return {**ADVICE, **_ADVICE}.get(word, "leave it out, or do by TensorFlow what it did")


def is_of_bridge(name: str) -> bool:
    """Tell whether an unbound name must come from the bridge.

    Examples:
        >>> is_of_bridge("npu_config_proto"), is_of_bridge("KerasNPUModel"), is_of_bridge("get_group_rank_of")
        (True, True, True)
        >>> is_of_bridge("numpy"), is_of_bridge("input_data"), is_of_bridge("INPUT_SIZE"), is_of_bridge("low_rank_dim")
        (False, False, False, False)
    """
    return name in _ADVICE or name in ADVICE or name in dir(npu) or _OF_THE_BRIDGE.search(name) is not None


def target(name: str) -> str | None:
    """Return the module that has a name of the bridge without an NPU; None if no module has it.

    The module is empty if `import name` imports the name.

    Examples:
        >>> target("npu_bridge.npu_init.NPULossScaleOptimizer"), target("npu_bridge.npu_init.npu_rnn")
        ('tfmp.npu', None)
    """
    module, _, word = name.rpartition(".")
    if module == STAR and word in _OF_OTHERS:
        return _OF_OTHERS[word]
    return "tfmp.npu" if word in dir(npu) else None


def import_lines(names: Iterable[str]) -> list[str]:
    """Return the imports that replace the star import of the bridge.

    Examples:
        >>> import_lines(["os", "NPULossScaleOptimizer", "FixedLossScaleManager"])
        ['import os', 'from tfmp.npu import FixedLossScaleManager, NPULossScaleOptimizer']
    """
    by_module: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        by_module[target(f"{STAR}.{name}") or ""].append(name)
    lines = ((module, ", ".join(words)) for module, words in sorted(by_module.items()))
    return [f"from {module} import {words}" if module else f"import {words}" for module, words in lines]


def advised(names: Mapping[str, Sequence[int]]) -> str:
    """Return the advice for several names of the bridge.

    Examples:
        >>> advised({"npu_rnn": [3, 9]})
        'npu_rnn (lines 3, 9): use tf.compat.v1.nn.static_rnn'
    """
    return "; ".join(
        f"{name} ({in_lines(lines)}){f': {advice(name)}' if lines else ''}" for name, lines in names.items()
    )


def in_lines(lines: Sequence[int]) -> str:
    """Return line numbers as text for a message: `line 3`, `lines 3, 9` or `not used`."""
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}" if lines else "not used"
