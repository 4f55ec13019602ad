"""The front-ends that the installed packages and the behaviour (TensorFlow 1 or 2) of this process allow."""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import tensorflow as tf
from estimator_front_end import Estimator
from faults import (
    FAULTS,
    FAULTS_WITH_WIDE_FLOAT16,
    LARGE_FAULTS,
    REPLICA_FAULTS,
    REPLICA_FAULTS_IF_SUMMED_FIRST,
    Fault,
    Rule,
)
from front_ends import FrontEnd, V1Eager, V1Graph
from keras_front_ends import KerasFit, KerasLoop, LegacyGraph, LegacyLoop, by_xla, compiled
from kerases import installed
from structures import Structure

#: A function that makes a front-end for a structure.
Make = Callable[..., FrontEnd]


def front_ends() -> dict[str, tuple[Make, Make]]:
    """Return, by name, the functions that make a front-end, and the front-end of the optimizer without a wrapper."""
    found: dict[str, tuple[Make, Make]] = {"v1 graph, resource variables": (V1Graph, V1Graph)}
    if not tf.compat.v1.executing_eagerly_outside_functions():
        reference = partial(V1Graph, use_resource=False)
        found["v1 graph, reference variables"] = (reference, reference)
        return found | _legacy_graphs()
    if hasattr(tf, "estimator"):
        found["Estimator"] = (Estimator, V1Graph)
    found["v1 eager"] = (V1Eager, V1Eager)
    for title, keras in installed().items():
        plain = partial(KerasLoop, keras)
        found[f"{title} eager"] = (plain, plain)
        found[f"{title} function"] = (partial(KerasLoop, keras, compiled=compiled), plain)
        found[f"{title} XLA"] = (partial(KerasLoop, keras, compiled=by_xla), plain)
        if title == "keras3":
            found[f"{title} compiled update"] = (partial(KerasLoop, keras, compiled=compiled, jit_compile=True), plain)
        found[f"{title} fit"] = (partial(KerasFit, keras), plain)
    for title, keras in _with_legacy().items():
        plain = partial(LegacyLoop, keras)
        found[f"{title} eager"] = (plain, plain)
        found[f"{title} function"] = (partial(LegacyLoop, keras, compiled=compiled), plain)
    return found | _legacy_graphs()


def replicated_front_ends() -> dict[str, Make]:
    """Return, by name, functions that make front-ends on the replicas of a `strategy`, or on one device without it."""
    found: dict[str, Make] = {"v1 graph": V1Graph}
    if tf.compat.v1.executing_eagerly_outside_functions():
        found |= {title: partial(_loop, KerasLoop, keras) for title, keras in installed().items()}
        found |= {title: partial(_loop, LegacyLoop, keras) for title, keras in _with_legacy().items()}
    return found


def faults_of(front_end: str) -> Mapping[str, Fault]:
    """Return the faults for a front-end of `front_ends`.

    Only a session of TF1 and the `tf.function` of each Keras have the faults with large variables.

    Args:
        front_end: The name of the front-end.
    """
    is_fed_large = front_end == "v1 graph, resource variables" or front_end.endswith(" function")
    faults = FAULTS | LARGE_FAULTS if is_fed_large else FAULTS
    has_wide_float16 = front_end.endswith(" XLA") and tf.__version__.startswith(("2.16.", "2.17."))
    return faults | FAULTS_WITH_WIDE_FLOAT16 if has_wide_float16 else faults


def replica_faults_of(front_end: str) -> Mapping[str, Fault]:
    """Return the faults for a front-end of `replicated_front_ends`.

    Args:
        front_end: The name of the front-end.
    """
    return REPLICA_FAULTS_IF_SUMMED_FIRST if front_end in ("keras2", "tf_keras") else REPLICA_FAULTS


def _loop(loop: Make, keras: ModuleType, structure: Structure, rule: Rule | None, **settings: Any) -> FrontEnd:
    return loop(keras, structure, rule, compiled=compiled, averages=False, **settings)


def _legacy_graphs() -> dict[str, tuple[Make, Make]]:
    makes = {f"{title} graph": partial(LegacyGraph, keras) for title, keras in _with_legacy().items()}
    return {title: (make, make) for title, make in makes.items()}


def _with_legacy() -> dict[str, ModuleType]:
    """Return each Keras that has legacy optimizers, by the name of their front-ends."""
    # Keras 3 has the names of legacy optimizers, too, but they only raise errors.
    return {f"{title} legacy": keras for title, keras in installed().items() if title != "keras3"}
