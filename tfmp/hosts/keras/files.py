"""Saves a Keras front-end in Keras' files like the optimizer that it wraps, and reads what other wrappers saved there.

A `.weights.h5` file, alone or in a `.keras` file, has a group of values for each object on Keras' walk through the
attributes of a model. The number of its values shows who saved an optimizer:

    no wrapper               optimizer/vars: the variables of the optimizer
    tfmp                     the same; and optimizer/_loss_scale_state/vars: the wrapper's own, by their names
    Keras 2's own wrapper    as no wrapper
    Keras 3's own wrapper    optimizer/vars: four of its own, then those of the optimizer
    tfmp 0.2 and earlier     optimizer/vars: the wrapper's own, then those of the optimizer

Every wrapper also has optimizer/inner_optimizer/vars, from which Keras' own wrapper loads what tfmp saved.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from tfmp.core.managers import OWN_MANAGERS, LossScaleManager
from tfmp.core.managers.step_counters import StepCounters
from tfmp.core.spikes.detector import SpikeDetector
from tfmp.hosts.keras.checkpoints import continue_at

_logger = logging.getLogger("tfmp")

#: The attributes by which Keras' walk comes to the optimizer that is wrapped, or to those within it.
_NAMES_OF_INNER = {"inner_optimizer", "_inner_optimizer", "_optimizer", "optimizers"}


class SavedAsInner:
    """The methods of a Keras front-end that Keras' files call."""

    # These three come from the front-end.
    inner_optimizer: Any
    _loss_scale_manager: LossScaleManager
    _own_variables: Callable[[], list[Any]]
    #: The names of the values that Keras' own wrapper saves before those of the optimizer.
    _saved_by_keras: Sequence[str] = ()
    _inner_is_loaded = False

    def save_own_variables(self, store: Any) -> None:  # noqa: ANN401 - a group of a file
        """Save the variables of the inner optimizer by their positions; Keras saves the loss scale beside them."""
        self._inner_is_loaded = False
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Set the variables to the values that this class, Keras' own wrapper or an optimizer without one saved."""
        num_inner = len(self.inner_optimizer.variables)
        num_before = len(store.keys()) - num_inner
        own = self._own_variables()
        if num_before == 0:
            self.inner_optimizer.load_own_variables(store)
            self._inner_is_loaded = True
        elif num_before == len(self._saved_by_keras) and _have_shapes(store, [()] * num_before):
            saved = {name: store[str(index)][()] for index, name in enumerate(self._saved_by_keras)}
            continue_at(self._loss_scale_manager, saved["dynamic_scale"], saved["step_counter"])
        elif num_before == len(own) and _have_shapes(store, [tuple(variable.shape) for variable in own]):
            _assign((variable, store[str(index)]) for index, variable in enumerate(own))
        else:
            _logger.warning(
                "%d values that the file holds for the optimizer do not fit and are left out: %s has %d variables. "
                "Before you load, build the optimizer, model.optimizer.build(model.trainable_variables), with the "
                "settings that it was saved with.",
                len(store.keys()),
                type(self.inner_optimizer).__name__,
                num_inner,
            )

    def __dir__(self) -> Iterable[str]:
        """Return the names of the attributes; to Keras' walk after loading, without the optimizer that is loaded."""
        names = list(super().__dir__())
        if self._inner_is_loaded:
            self._inner_is_loaded = False
            return [name for name in names if name not in _NAMES_OF_INNER]
        return names


class StateInFiles:
    """The wrapper's own variables in Keras' files: of the loss scale, the counters, an unfinished window, and spikes.

    Each front-end has a subclass of this class and of `keras.losses.Loss`, the simplest one that Keras' walk comes to.
    `continue_at` gets the scale and the count that a manager of another class saved.
    """

    def __init__(self, variables: Callable[[], Sequence[Any]], continue_at: Callable[[float, int], None]) -> None:
        super().__init__(name="loss_scale_state")  # type: ignore[call-arg] # of Keras' Loss
        # Functions, so that Keras' walk does not come back to the wrapper.
        self._variables = variables
        self._continue_at = continue_at
        self._of_manager = self.by_name().keys() - StepCounters._fields

    def save_own_variables(self, store: Any) -> None:  # noqa: ANN401 - a group of a file
        """Save the variables by their names."""
        for name, variable in self.by_name().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Set the variables to saved values, by their names; a variable that is not saved keeps its value."""
        saved = {name: np.asarray(store[name]) for name in store.keys()}  # noqa: SIM118 - a file has only this
        here = self.by_name()
        if self._of_manager - saved.keys() and {"loss_scale", "good_steps"} <= saved.keys():
            # A manager of another class saved them.
            self._continue_at(float(saved["loss_scale"]), int(saved["good_steps"]))
            saved = {name: value for name, value in saved.items() if name not in self._of_manager}
        _assign((variable, saved[name]) for name, variable in here.items() if name in saved)
        if "kept" not in here and saved.get("kept", 0) > 0:
            _logger.warning(
                "the sums of the %d micro-batches in the unfinished window of the file are not loaded, because "
                "accumulation_steps is 1 here.",
                saved["kept"],
            )

    def by_name(self) -> dict[str, Any]:
        """Return the variables by their names, without the `:0` of Keras 2."""
        return {variable.name.split(":")[0]: variable for variable in self._variables()}


def _have_shapes(store: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the first values have these shapes."""
    return all(np.shape(store[str(index)]) == shape for index, shape in enumerate(shapes))


def _assign(pairs: Iterable[tuple[Any, Any]]) -> None:
    for variable, value in pairs:
        # A variable of each replica divides the value by their number, and an HDF5 dataset cannot be divided.
        variable.assign(np.asarray(value))


def register_own_classes(keras: ModuleType) -> None:
    """Register tfmp's managers and spike detector with `keras` or `tf_keras`, so that saved models can be loaded."""
    for own_class in (*OWN_MANAGERS, SpikeDetector):
        keras.saving.register_keras_serializable(package="tfmp")(own_class)
