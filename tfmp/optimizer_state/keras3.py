"""Optimizers of Keras 3 whose slots are in half precision."""

import contextlib
import copy
import functools
import math
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import keras
import tensorflow as tf

from tfmp.any_keras.configurations import object_of_config
from tfmp.any_keras.internals import decays, index_of
from tfmp.core.dtypes import HALF_TYPES_BY_NAME
from tfmp.core.gradients import arithmetic
from tfmp.optimizer_state.float32_view import Float32View
from tfmp.optimizer_state.half_state import HalfSettings, SlotBytes, StateBytes, half_settings
from tfmp.types import Gradient

_Optimizer = TypeVar("_Optimizer")

#: A variable, optimizer, class or initializer of Keras, which has no types. Variables may be those of TensorFlow.
_Keras: TypeAlias = Any

# The class of optimizers that stands behind `HalfState`.
_NextClass: _Keras = keras.optimizers.Optimizer if TYPE_CHECKING else object

#: The first of the numbers from which the random numbers for a weight follow. Those of slots count from 0.
_FIRST_OF_WEIGHTS = 2**24


def with_half_state(optimizer: _Optimizer, settings: HalfSettings) -> _Optimizer:
    """Return an optimizer of Keras 3 that is like another one, but keeps its slots in half precision."""
    not_sound = _not_sound_in_half(optimizer)
    _validate(optimizer, settings, not_sound)
    dtypes = {slot: dtype for slot, dtype in settings.dtypes.items() if slot not in not_sound}
    plain: _Keras = type(optimizer)
    settings = settings._replace(dtypes=dtypes)
    return _unbuilt_copy(optimizer, half_state_class(plain), _half_settings=settings, _half_slots=[], _slot_dtype=None)


def _validate(optimizer: _Keras, settings: HalfSettings, not_sound: dict[str, str]) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, HalfState):
        raise ValueError(f"the {kind} has half-precision state already: call tfmp.half_state once, with all slots.")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(f"the optimizer is a {kind}, which has no slots: call tfmp.half_state with the one inside it.")
    if hasattr(optimizer, "optimizers"):
        raise ValueError(f"the {kind} has no slots itself: call tfmp.half_state with each of the optimizers inside it.")
    for slot, reason in not_sound.items():
        if slot in settings.dtypes and not settings.by_default:
            raise ValueError(f"{slot} of {kind} {reason}: leave it in float32.")
    if optimizer.built:
        raise ValueError(f"the {kind} is built already, with slots in float32: call tfmp.half_state before it is.")


def _not_sound_in_half(optimizer: object) -> dict[str, str]:
    """Return the slots that this optimizer cannot keep in half precision, though others can, with the reasons."""
    # Older versions of Keras do not have this class.
    schedule_free = getattr(keras.optimizers, "ScheduleFreeAdamW", None)
    if schedule_free is not None and isinstance(optimizer, schedule_free):
        return {"momentum": "holds weights, from which it computes others"}
    if isinstance(optimizer, keras.optimizers.RMSprop) and optimizer.centered:
        return {"velocity": "with centered=True is an average from which another is subtracted, and may be below it"}
    return {}


def _unbuilt_copy(optimizer: _Keras, to_class: _Keras, **attributes: object) -> _Keras:
    """Return an object of a class with what an optimizer that is not built has and more, but variables of its own.

    A configuration would not do: it leaves out what `exclude_from_weight_decay` sets, and not each schedule has one.
    """
    copied = object.__new__(to_class)

    def own(value: Any) -> Any:  # noqa: ANN401 - any attribute
        if isinstance(value, types.MethodType) and value.__self__ is optimizer:
            return types.MethodType(value.__func__, copied)
        return copy.copy(value) if isinstance(value, list | dict | set) else value

    rate = own(optimizer._learning_rate)
    in_scope = contextlib.nullcontext() if tf.distribute.has_strategy() else optimizer._distribution_strategy.scope()
    with in_scope:
        new = keras.optimizers.Optimizer(0.0 if hasattr(rate, "assign") else rate, name=optimizer.name)
    # Beside its settings, a new optimizer has its variables and what keeps track of them.
    state = {name: value for name, value in vars(new).items() if not isinstance(value, str | int | float | None)}
    object.__setattr__(copied, "__dict__", state)
    for name, value in {**vars(optimizer), **attributes}.items():
        # Keras keeps track of what it sees being set. What a user's class makes in its constructor, both have.
        if name not in state:
            setattr(copied, name, own(value))
    for variable, value in zip(new.variables, optimizer.variables, strict=False):
        variable.assign(value)
    return copied


class HalfState(_NextClass):
    """What a class of optimizers does in another way if its slots are in half precision; see `tfmp.half_state`.

    Each optimizer with half-precision state is of a class that inherits from this one and from the optimizer's own.
    """

    #: Asks the front-ends and `tfmp.GradScaler` for float32 gradients of weights in half precision.
    takes_float32_gradients = True

    #: The class of optimizers that a subclass is made for.
    plain_class: _Keras
    _half_settings: HalfSettings
    #: The names of the slots, with their variables.
    _half_slots: list[tuple[str, _Keras]]
    #: The type of the slot that is being made, if it is in half precision.
    _slot_dtype: tf.DType | None

    def build(self, variables: Sequence[_Keras]) -> None:
        """Make the slots, and check that they, and the weights, can be trained in these types."""
        half = [variable for variable in variables if _is_half(variable)]
        if half:
            self._validate_half_weights(half[0])
        super().build(variables)
        try:
            self._validate_slots(list(variables), half)
        except ValueError:
            self.built = False
            raise

    def _validate_slots(self, variables: Sequence[_Keras], half: Sequence[_Keras]) -> None:
        made = {str(name) for name, _ in self._half_slots}
        wanted = self._half_settings.dtypes
        missing = [name for name in wanted if name not in made]
        if self._half_settings.by_default:
            # Weights in half precision are reason enough for an optimizer without such slots.
            missing = [] if half or made.intersection(wanted) else ["that can be in half precision"]
        # Keras builds the optimizer of a model without weights, too.
        if missing and variables:
            raise ValueError(
                f"the optimizer made no slot {', '.join(missing)}, only {', '.join(sorted(made)) or 'none'}: name those"
                " that it has with its settings."
            )
        slots = {id(slot) for _, slot in self._half_slots}
        others = [each.name for each in self.variables if _is_half(each) and id(each) not in slots]
        if others and half:
            raise ValueError(
                f"the optimizer keeps {', '.join(others)} in the type of the weights itself, which is half precision: "
                "train weights in float32."
            )

    def _validate_half_weights(self, variable: _Keras) -> None:
        which = f"the weight {variable.name} is in {keras.backend.standardize_dtype(variable.dtype)}"
        if not self._half_settings.is_stochastic:
            raise ValueError(
                f"{which}, and most steps would be lost by rounding it to the nearest value: pass "
                "rounding='stochastic', or train weights in float32."
            )
        if self.plain_class._apply_weight_decay is not keras.optimizers.SGD._apply_weight_decay:
            raise ValueError(f"{which}, which {self.plain_class.__name__} decays in its own way: train it in float32.")
        for setting in ("use_ema", "gradient_accumulation_steps"):
            if getattr(self, setting):
                raise ValueError(
                    f"{which}, for which {setting}={getattr(self, setting)!r} does not work: leave it out."
                )

    def add_variable_from_reference(
        self, reference_variable: _Keras, name: str | None = None, initializer: _Keras = "zeros"
    ) -> _Keras:
        """Make a slot for a variable. One in half precision is read and assigned as if it were in float32."""
        name = name or "var"
        half_type = HALF_TYPES_BY_NAME.get(self._half_settings.dtypes.get(name, ""))
        # Keras gives no other way to the type: a slot has that of its weight.
        self._slot_dtype = half_type
        try:
            slot = super().add_variable_from_reference(reference_variable, name=name, initializer=initializer)
        finally:
            self._slot_dtype = None
        self._half_slots.append((name, slot))
        # The number tells the random numbers of this slot from those of others.
        return slot if half_type is None else self._view(slot, number=len(self._half_slots))

    def add_variable(
        self, shape: Sequence[int], initializer: _Keras = "zeros", dtype: _Keras = None, *args: _Keras, **kwargs: _Keras
    ) -> _Keras:
        """Make a variable, in half precision only where that was asked for; `add_variable_from_reference` calls this.

        Half precision that the optimizer asks for itself, because a weight has it, becomes float32.
        """
        if dtype is not None and keras.backend.standardize_dtype(dtype) in HALF_TYPES_BY_NAME:
            dtype = "float32"
        return super().add_variable(shape, initializer, self._slot_dtype or dtype, *args, **kwargs)

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[_Keras] | None = None) -> None:
        """Update the variables; gradients in half precision are clipped and applied in float32."""
        super().apply([arithmetic.map_values(arithmetic.widen, grad) for grad in grads], trainable_variables)

    def update_step(self, gradient: Gradient, variable: tf.Variable, learning_rate: tf.Tensor | float) -> None:
        """Update a variable and its slots; a variable in half precision as if it were in float32."""
        # TensorFlow would read the slots ahead of the gradients, and keep them in float32 until then.
        with tf.control_dependencies(arithmetic.values_of([gradient])):
            super().update_step(gradient, self._decayed(variable, learning_rate), learning_rate)

    def _decayed(self, variable: tf.Variable, learning_rate: tf.Tensor | float) -> tf.Variable | Float32View:
        """Return what to update: the variable; or a view of one in half precision, whose decay is applied before."""
        if not _is_half(variable):
            return variable
        # Two for each weight: for its decay, and for its update.
        number = _FIRST_OF_WEIGHTS + 2 * index_of(self, variable)
        if self.weight_decay is not None and decays(self, variable):
            decayed = self._view(variable, number)
            decayed.assign_sub(decayed * self.weight_decay * tf.cast(learning_rate, tf.float32))
        return self._view(variable, number + 1)

    # The next two methods are private in Keras. Its own would decay weights in half precision, where the decay is lost
    # by rounding, and would not find the slots of a view.

    def _apply_weight_decay(self, variables: Sequence[_Keras]) -> None:
        super()._apply_weight_decay([variable for variable in variables if not _is_half(variable)])

    def _var_key(self, variable: _Keras) -> _Keras:
        return super()._var_key(variable.variable if isinstance(variable, Float32View) else variable)

    def _view(self, variable: _Keras, number: int) -> Float32View:
        """Return a view of a variable, whose random numbers follow from a number of its own."""

        def seed(number: tf.Tensor | int) -> list[Any] | None:
            return [self._half_settings.seed, number, self.iterations] if self._half_settings.is_stochastic else None

        return Float32View(variable, seed, number)

    def state_bytes(self) -> StateBytes:
        """Report the memory of the slots.

        Raises:
            ValueError: The optimizer is not built, and has no slots yet.
        """
        if not self.built:
            raise ValueError("the optimizer is not built and has no slots yet: call build with the variables to train.")
        by_name: dict[str, list[_Keras]] = {}
        for name, variable in self._half_slots:
            by_name.setdefault(name, []).append(variable)
        return StateBytes(tuple(_bytes_of(name, slots) for name, slots in by_name.items()))

    def get_config(self) -> dict[str, Any]:
        """Return the configuration, from which `from_config` makes an optimizer with the same settings."""
        plain: _Keras = object.__new__(type(self).plain_class)
        object.__setattr__(plain, "__dict__", vars(self))
        settings = self._half_settings
        return {
            "optimizer": keras.saving.serialize_keras_object(plain),
            "slots": None if settings.by_default else settings.dtypes,
            "rounding": settings.rounding,
            "seed": settings.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> _Keras:
        """Make an optimizer from a configuration that `get_config` returned."""
        optimizers = keras.optimizers
        optimizer = object_of_config(
            keras, config["optimizer"], optimizers.Optimizer, vars(optimizers).values(), custom_objects
        )
        settings = half_settings(config["slots"], config["rounding"], config["seed"])
        return with_half_state(optimizer, settings)


@functools.cache
def half_state_class(plain: _Keras) -> _Keras:
    """Return the class for optimizers of a class whose slots are in half precision.

    A wrapper would have to pass on each setting and method of each class of optimizers, and be no instance of it.
    """
    attributes = {"__doc__": plain.__doc__, "__module__": plain.__module__, "plain_class": plain}
    made = type(f"HalfState{plain.__name__}", (HalfState, plain), attributes)
    # All classes have one name in saved models: which one an optimizer is of follows from its configuration.
    keras.saving.register_keras_serializable(package="tfmp", name="HalfState")(made)
    return made


def _is_half(variable: _Keras) -> bool:
    return keras.backend.standardize_dtype(variable.dtype) in HALF_TYPES_BY_NAME


def _bytes_of(name: str, slots: Sequence[_Keras]) -> SlotBytes:
    values = sum(math.prod(variable.shape) for variable in slots)
    dtype = tf.as_dtype(keras.backend.standardize_dtype(slots[0].dtype))
    return SlotBytes(name, dtype.name, values * dtype.size, values * tf.float32.size)
