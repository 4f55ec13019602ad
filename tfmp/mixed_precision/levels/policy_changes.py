"""Changes the policies of layers of Keras that exist, such that all can be taken back."""

import contextlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from tfmp.any_keras.internals import dtype_policy, put_dtype_policy
from tfmp.any_keras.which import is_keras2
from tfmp.mixed_precision.keras_layers import attributes_with_cast_variables, widen_inputs

#: A layer or model of any Keras.
_Layer: TypeAlias = Any


def change_policies(
    keras: ModuleType,
    policies: Sequence[tuple[_Layer, str]],
    *,
    called: Sequence[_Layer],
    held: Sequence[_Layer],
    undo: contextlib.ExitStack,
) -> None:
    """Give layers other policies, and let models take float32 inputs and be traced anew.

    Args:
        keras: The package that the layers are of.
        policies: The layers that are changed, with the names of their policies.
        called: The layers that calls of the model may reach.
        held: All layers of the model.
        undo: Gets what takes the changes back.
    """
    # All are remembered before the first is changed: a layer may change the layers in it together with itself.
    for layer in held:
        _remember_policy(keras, layer, undo)
    for layer, policy in policies:
        _set_policy(keras, layer, policy, undo)
    for layer in called:
        widen_inputs(keras, layer, undo)
    for layer in held:
        _forget_traces(keras, layer, undo)


def _remember_policy(keras: ModuleType, layer: _Layer, undo: contextlib.ExitStack) -> None:
    policy = dtype_policy(layer)
    # Not by the public setter of Keras 3, which may be what fails. It changes a map of policies in place.
    undo.callback(put_dtype_policy, keras, layer, policy)
    if isinstance(policy, Mapping):
        undo.callback(_restore_map, policy, dict(policy))


def _restore_map(policies: Any, before: Mapping[str, Any]) -> None:  # noqa: ANN401 - a map of Keras 3
    for path in list(policies):
        del policies[path]
    for path, policy in before.items():
        policies[path] = policy


def _set_policy(keras: ModuleType, layer: _Layer, policy: str, undo: contextlib.ExitStack) -> None:
    if not is_keras2(keras):
        layer.dtype_policy = policy
        return
    put_dtype_policy(keras, layer, keras.mixed_precision.Policy(policy))
    if layer.built and policy.startswith("mixed_"):
        changed = attributes_with_cast_variables(keras, layer)
        undo.callback(layer.__dict__.update, {name: layer.__dict__[name] for name in changed})
        layer.__dict__.update(changed)


def _forget_traces(keras: ModuleType, layer: _Layer, undo: contextlib.ExitStack) -> None:
    if isinstance(layer, keras.Model):
        for name in ("train_function", "test_function", "predict_function"):
            traced = getattr(layer, name, None)
            if traced is not None:
                undo.callback(setattr, layer, name, traced)
                setattr(layer, name, None)
