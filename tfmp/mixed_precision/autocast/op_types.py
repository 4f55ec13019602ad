"""The types in which the inputs of an op are given to it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import tensorflow as tf

from tfmp.core.dtypes import HALF_TYPES
from tfmp.mixed_precision.autocast.lists import AutocastLists

#: The types that autocast changes, or takes into account.
FLOATS = frozenset([*HALF_TYPES, tf.float32, tf.float64])

#: What reads a variable.
_READS = frozenset(["ReadVariableOp", "VariableV2", "Variable"])

# State of the module, because a tensor tells more than one scope what it is, and lives as long as the user wants.
_gates: WeakValueDictionary[int, tf.Tensor] = WeakValueDictionary()
_weights: WeakValueDictionary[int, tf.Tensor] = WeakValueDictionary()

Computes = Literal["half", "float32", "widest"]


class OpInputs(NamedTuple):
    """Inputs of an op that must have the same type."""

    #: Where they stand among the inputs of the op.
    positions: tuple[int, ...]
    names: tuple[str, ...]
    #: The types that the op can compute in.
    types: frozenset[tf.DType]
    #: Whether results of the op have this type, too, or are other floating-point numbers.
    is_result: bool


class OpTypes:
    """Gives the inputs of ops the types that the lists ask for.

    `inputs_of` returns the inputs of an op, and whether the op has state.
    """

    def __init__(
        self, dtype: tf.DType, lists: AutocastLists, inputs_of: Callable[[str], tuple[Sequence[OpInputs], bool]]
    ) -> None:
        self.dtype = dtype
        self._clear = lists.clear
        self._gates = lists.gates
        self._inputs_of = inputs_of
        self._computes: dict[str, Computes] = {
            **dict.fromkeys(lists.allow, "half"),
            **dict.fromkeys(lists.infer | lists.clear, "widest"),
            **dict.fromkeys(lists.deny | lists.gates, "float32"),
        }
        self._plans: dict[str, tuple[tuple[OpInputs, Computes], ...]] = {}

    def cast_in_order(self, op: str, values: Sequence[Any], cast: Callable[..., Any]) -> Sequence[Any]:
        """Return values with the inputs of an op, which come first, in their types; the same object if none is cast."""
        result: list[Any] | None = None
        for inputs, computes in self._plan(op):
            group = [values[position] for position in inputs.positions]
            cast_group = self._cast(inputs, computes, group, cast)
            if cast_group is not None:
                result = list(values) if result is None else result
                for position, value in zip(inputs.positions, cast_group, strict=True):
                    result[position] = value
        return values if result is None else result

    def cast_by_name(self, op: str, values: Mapping[str, Any], cast: Callable[..., Any]) -> Mapping[str, Any]:
        """Return the inputs of an op by their names, among other values."""
        result = values
        for inputs, computes in self._plan(op):
            cast_group = self._cast(inputs, computes, [values[name] for name in inputs.names], cast)
            if cast_group is not None:
                result = {**result, **dict(zip(inputs.names, cast_group, strict=True))}
        return result

    def makes_weights(self, op: str, values: Sequence[Any]) -> bool:
        """Return whether an op of eager code reads a variable, or only moves what was read from variables."""
        if op in _READS:
            return True
        floats = [each for each in flat(values) if _type_of(each) in FLOATS] if op in self._clear else []
        return bool(floats) and all(map(self._is_weight, floats))

    def makes_gates(self, op: str, values: Sequence[Any], is_cast: bool) -> bool:
        """Return whether an op computes a gate of half-precision values, or computes with such gates alone.

        `values` are its inputs, and perhaps its attributes; `is_cast` is whether autocast cast inputs of the op.
        """
        if op in self._gates:
            return is_cast or any(map(_is_gate, flat(values)))
        if self._computes.get(op) != "widest":
            return False
        floats = [each for each in flat(values) if _type_of(each) in FLOATS and each.shape.rank != 0]
        return any(map(_is_gate, floats)) and all(_is_gate(each) or self._is_weight(each) for each in floats)

    def _plan(self, op: str) -> tuple[tuple[OpInputs, Computes], ...]:
        plan = self._plans.get(op)
        if plan is None:
            groups, has_state = self._inputs_of(op)
            plan = tuple((inputs, self._computes_in(op, inputs, has_state)) for inputs in groups)
            self._plans[op] = plan
        return plan

    def _computes_in(self, op: str, inputs: OpInputs, has_state: bool) -> Computes:
        listed = self._computes.get(op)
        if listed == "half" and self.dtype not in inputs.types:
            return "widest"
        if listed is None:
            return "float32" if inputs.is_result and not has_state else "widest"
        return listed

    def _cast(
        self, inputs: OpInputs, computes: Computes, values: list[Any], cast: Callable[..., Any]
    ) -> list[Any] | None:
        """Return the inputs in the type that they are to have; None if they have it."""
        floats = [each for each in flat(values) if _type_of(each) in FLOATS]
        types = {_type_of(each) for each in floats}
        if not types:
            return None
        target = self._target(inputs, computes, floats, types)
        if types == {target}:
            return None

        def as_target(value: Any) -> Any:  # noqa: ANN401 - whatever TensorFlow takes for a tensor
            return cast(value, target) if _type_of(value) in FLOATS and _type_of(value) != target else value

        return [
            list(map(as_target, value)) if isinstance(value, list | tuple) else as_target(value) for value in values
        ]

    def _target(self, inputs: OpInputs, computes: Computes, floats: Sequence[Any], types: set[Any]) -> tf.DType:
        deciding = types if len(types) == 1 else self._deciding(floats)
        if tf.float64 in deciding:
            target = tf.float64
        elif computes == "half":
            target = self.dtype
        elif computes == "float32":
            target = tf.float32
        else:
            target = widest(deciding)
        return target if target in inputs.types else tf.float32

    def _deciding(self, values: Sequence[Any]) -> set[Any]:
        """Return the types of the values that decide in which type an op computes.

        A number does not make a tensor wider, as in torch. Neither does a weight: it is float32 because it is updated
        in small steps, and not because the op needs that. A gate is float32 because a logarithm may follow.
        """
        tensors = [value for value in values if value.shape.rank != 0]
        activations = [value for value in tensors if not self._is_weight(value)]
        others = [value for value in activations if not _is_gate(value)]
        return {_type_of(value) for value in others or activations or tensors or values}

    def _is_weight(self, value: Any) -> bool:  # noqa: ANN401 - a tensor or a variable of any Keras
        if isinstance(value, tf.Variable) or not isinstance(value, tf.Tensor):
            return True
        if not tf.is_symbolic_tensor(value):
            return id(value) in _weights
        op = value.op
        if op.type in _READS:
            return True
        floats = [each for each in op.inputs if _type_of(each) in FLOATS]
        return op.type in self._clear and bool(floats) and all(map(self._is_weight, floats))


def widest(types: set[Any]) -> tf.DType:
    """Return the widest of some types."""
    dtype = next(iter(types))
    if len(types) > 1:
        # float16 and bfloat16 have no type in common but a wider one.
        dtype = tf.float64 if tf.float64 in types else tf.float32
    return dtype


def flat(values: Sequence[Any]) -> list[Any]:
    """Return values, with the elements of lists in place of the lists."""
    return [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]


def _type_of(value: Any) -> tf.DType | None:  # noqa: ANN401 - whatever TensorFlow takes for a tensor
    """Return the type of a tensor or a variable. Numbers and arrays take the type of the tensors beside them."""
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, tf.DType):
        return dtype.base_dtype
    # The variables of Keras 3 have the name of their type.
    return tf.as_dtype(dtype) if isinstance(dtype, str) and hasattr(value, "__tf_tensor__") else None


def has_type(value: object) -> bool:
    """Return whether a value is a tensor or a variable, of TensorFlow or of Keras 3."""
    return isinstance(value, tf.Tensor | tf.Variable) or hasattr(value, "__tf_tensor__")


def cast_float(value: Any, dtype: object) -> Any:  # noqa: ANN401 - whatever TensorFlow takes for a tensor
    """Return a tensor of floating-point numbers in another such type, and anything else as it is."""
    present = _type_of(value)
    return tf.cast(value, dtype) if present != dtype and present in FLOATS and dtype in FLOATS else value


def mark_as_gate(results: Any) -> None:  # noqa: ANN401 - whatever an op returns
    """Remember a tensor, or each of a list, as a gate of half-precision values."""
    # Symbolic tensors, too: to ask their op, and its inputs, would take long in deep graphs.
    for each in results if isinstance(results, list | tuple) else [results]:
        if isinstance(each, tf.Tensor) and each.dtype == tf.float32:
            _gates[id(each)] = each


def _is_gate(value: Any) -> bool:  # noqa: ANN401 - whatever TensorFlow takes for a tensor
    return id(value) in _gates


def mark_as_weight(tensor: Any) -> None:  # noqa: ANN401 - whatever an op returns
    """Remember an eager tensor, or each of a list, as read from a variable: it has no op that would tell."""
    for each in tensor if isinstance(tensor, list | tuple) else [tensor]:
        _weights[id(each)] = each
