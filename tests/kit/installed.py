"""The hosts that the installed packages and the behaviour (TensorFlow 1 or 2) of this process allow."""

from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import tensorflow as tf
from kerases import installed

from kit.estimator_host import Estimator
from kit.hosts import Host, V1Eager, V1Graph
from kit.keras_hosts import KerasFit, KerasLoop, LegacyGraph, LegacyLoop, by_xla, compiled
from kit.scaler_hosts import Scaler

#: A function that makes a host for a structure, a rule (None without tfmp) and what makes further settings.
Make = Callable[..., Host]


class Pair(NamedTuple):
    """Functions that make a host, and the host of the same optimizer without tfmp."""

    make: Make
    make_plain: Make


#: Without tfmp, all hosts but those of graphs run a function: it takes many more steps in a second than eager code.
_V1_FUNCTION = partial(V1Eager, compiled=compiled)
_V1 = {"v1 eager": Pair(V1Eager, _V1_FUNCTION), "v1 function": Pair(_V1_FUNCTION, _V1_FUNCTION)}


def hosts() -> dict[str, Pair]:
    """Return by name the hosts with one device."""
    found = {"v1 graph, resource variables": Pair(V1Graph, V1Graph)}
    if not tf.compat.v1.executing_eagerly_outside_functions():
        reference = partial(V1Graph, use_resource=False)
        return found | {"v1 graph, reference variables": Pair(reference, reference)} | _legacy_graphs()
    if hasattr(tf, "estimator"):
        found["Estimator"] = Pair(Estimator, V1Graph)
    found |= _V1
    found["GradScaler, v1 eager"] = Pair(Scaler, _V1_FUNCTION)
    for title, keras in installed().items():
        loop, plain = partial(KerasLoop, keras=keras), partial(KerasLoop, keras=keras, compiled=compiled)
        found |= {
            f"{title} eager": Pair(loop, plain),
            f"{title} function": Pair(plain, plain),
            f"{title} XLA": Pair(partial(loop, compiled=by_xla), plain),
            f"{title} fit": Pair(partial(KerasFit, keras=keras), plain),
            f"GradScaler, {title} function": Pair(partial(Scaler, keras=keras, compiled=compiled), plain),
        }
        if title == "keras3":
            by_program = {"keras": keras, "compiled": compiled, "jit_compile": True}
            found[f"{title} compiled update"] = Pair(partial(KerasLoop, **by_program), plain)
            found[f"GradScaler, {title} compiled update"] = Pair(partial(Scaler, **by_program), plain)
    for title, keras in _with_legacy().items():
        plain = partial(LegacyLoop, keras=keras, compiled=compiled)
        found |= {
            f"{title} eager": Pair(partial(LegacyLoop, keras=keras), plain),
            f"{title} function": Pair(plain, plain),
        }
    return found | _legacy_graphs()


def replicated_hosts() -> dict[str, Pair]:
    """Return by name the hosts that take the replicas of a `strategy`; those without tfmp are on one device."""
    found = {"v1 graph": Pair(V1Graph, V1Graph)}
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return found
    # Under a strategy Keras 3 fails to average the weights.
    in_function = {"compiled": compiled, "averages": False}
    loops = {title: partial(KerasLoop, keras=keras, **in_function) for title, keras in installed().items()}
    loops |= {title: partial(LegacyLoop, keras=keras, **in_function) for title, keras in _with_legacy().items()}
    found |= {title: Pair(loop, loop) for title, loop in loops.items()}
    if "keras3" in loops:
        loop = loops["keras3"]
        found["keras3 compiled update"] = Pair(partial(loop, jit_compile=True), loop)
    found |= _V1
    found["GradScaler, v1 function"] = Pair(partial(Scaler, compiled=compiled), _V1_FUNCTION)
    return found | {
        f"GradScaler, {title} eager": Pair(partial(Scaler, keras=keras, averages=False), loops[title])
        for title, keras in installed().items()
    }


def rows(names: Iterable[str]) -> list[Any]:
    """Return the names of hosts as parameters of a test, with the marks of those that build graphs."""
    in_graphs = ("v1 graph", "Estimator")
    return [pytest.param(name, marks=[pytest.mark.graph] * name.startswith(in_graphs)) for name in names]


def _legacy_graphs() -> dict[str, Pair]:
    makes = {f"{title} graph": partial(LegacyGraph, keras=keras) for title, keras in _with_legacy().items()}
    return {title: Pair(make, make) for title, make in makes.items()}


def _with_legacy() -> dict[str, ModuleType]:
    """Return each Keras that has legacy optimizers, by the name of their hosts."""
    # Keras 3 has the names of legacy optimizers, too, but they only raise errors.
    return {f"{title} legacy": keras for title, keras in installed().items() if title != "keras3"}
