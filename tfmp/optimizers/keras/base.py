"""The base class of the front-ends for Keras 2, tf_keras and Keras 3, without their legacy optimizers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfmp.core import lists, settings
from tfmp.core.accumulation.accumulator import GradientAccumulator
from tfmp.core.accumulation.settings import AccumulationSettings
from tfmp.core.managers import LossScaleManager
from tfmp.core.overflow.detectors import OverflowDetector, validated_detector
from tfmp.core.spikes.detector import SpikeDetector, validated_spike_detector
from tfmp.core.step.scaler import LossScaler
from tfmp.optimizers.base import settings_to_show
from tfmp.optimizers.keras.accumulation import KerasAccumulation
from tfmp.optimizers.keras.arguments import parts_of_config
from tfmp.optimizers.keras.checkpoints import CheckpointedAsInner
from tfmp.optimizers.keras.files import SavedAsInner, StateInFiles
from tfmp.optimizers.keras.loops import LoopRecord
from tfmp.optimizers.keras.methods import MethodsOfKeras


class LossScaleOptimizerKeras(CheckpointedAsInner, SavedAsInner, MethodsOfKeras):
    """The methods that are the same in the front-ends for all versions of Keras."""

    #: The settings that every optimizer of this Keras has, with their defaults. Those of the inner optimizer count.
    #: Before Keras 3.10 they are also in the configuration of Keras' own wrapper, where they have no effect.
    _settings_of_every_optimizer: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {
            **dict.fromkeys(("clipnorm", "clipvalue", "global_clipnorm", "ema_overwrite_frequency", "weight_decay")),
            "ema_momentum": 0.99,
            "use_ema": False,
        }
    )
    #: Holds the variables of this class in Keras' files.
    _state_in_files: ClassVar[type[StateInFiles]]
    # The next four come from a base class of Keras, or from the front-end.
    name: str
    inner_optimizer: Any
    add_variable: Callable[..., Any]
    variables: Any

    def _set_up(
        self,
        manager: LossScaleManager,
        is_distributed: bool,
        overflow_detector: OverflowDetector | None,
        accumulation: AccumulationSettings,
        spike_detector: SpikeDetector | None,
        aggregation_dtype: tf.DType | None = None,
    ) -> None:
        self._loss_scale_manager = manager
        self._is_distributed = settings.flag("is_distributed", is_distributed)
        detector = validated_detector(overflow_detector)
        self.spike_detector = validated_spike_detector(spike_detector)
        self._scaler = LossScaler(manager, detector, is_distributed, aggregation_dtype, self.spike_detector)
        self._has_spike_state = False
        self._accumulation = KerasAccumulation(accumulation, detector)
        # TensorFlow exports a function only if the variables that it uses are reachable from a tracked attribute.
        self._overflow_counts = self._scaler.overflow_counts
        self._norms = self._scaler.norms
        self._loop = LoopRecord()
        num_unused = len(self._own_variables())
        # The variables are made here and not in `build`, so that a checkpoint can be restored before `build`.
        self._loss_scale_manager.store_in(self._add_state_variable)
        self._loss_scale_state = self._state_in_files(lambda: self._own_variables()[num_unused:], self._continue_at)

    def _add_state_variable(self, name: str, initial_value: np.generic | np.ndarray) -> tf.Variable:
        raise NotImplementedError

    def _build_spike_detector(self) -> None:
        """Make the variables of the spike detector, if there is one and they are not made yet.

        They come after those that accumulate gradients, whose positions in checkpoints stay the same without a
        detector.
        """
        if self.spike_detector is not None and not self._has_spike_state:
            self.spike_detector.store_in(self._add_state_variable)
            self._has_spike_state = True

    def exclude_from_weight_decay(
        self, var_list: Iterable[Any] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Exclude variables from the inner optimizer's weight decay.

        Args:
            var_list: The variables to exclude.
            var_names: Strings. A variable whose name contains one of them is excluded.

        Raises:
            TypeError: An argument is a single variable or string, or anything else that is not a list.
        """
        self.inner_optimizer.exclude_from_weight_decay(
            None if var_list is None else lists.variables("var_list", var_list),
            None if var_names is None else lists.names("var_names", var_names),
        )

    def finalize_variable_values(self, var_list: Iterable[Any]) -> None:
        """Set the variables to their moving averages, if the inner optimizer keeps moving averages (`use_ema=True`).

        Args:
            var_list: The variables that were trained.

        Raises:
            TypeError: `var_list` is not a list of variables.
        """
        self.inner_optimizer.finalize_variable_values(lists.variables("var_list", var_list))

    def _own_variables(self) -> list[Any]:
        variables = self.variables
        return list(variables[: len(variables) - len(self.inner_optimizer.variables)])

    def set_weights(self, weights: Iterable[np.ndarray]) -> None:
        """Set the values of `variables`, which include the inner optimizer's variables, or of the latter alone.

        Args:
            weights: An array for each variable, in the order of `variables`; or of the inner optimizer's `variables`,
                as it has them without a wrapper.

        Raises:
            TypeError: `weights` is not a list.
            ValueError: The number of values differs from the number of variables. Before `build` the optimizer does not
                have all its variables yet.
        """
        variables, inner_variables = self.variables, self.inner_optimizer.variables
        weights = lists.items("weights", weights, "a list of values", "pass one array for each of the variables")
        if len(weights) not in {len(variables), len(inner_variables)}:
            raise ValueError(
                f"the optimizer has {len(variables)} variables, got {len(weights)} values: build it first, for the "
                "weights that it trains."
            )
        if len(weights) == len(inner_variables):
            variables = inner_variables
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)

    def get_config(self) -> dict[str, Any]:
        """As in `tfmp.LossScaleOptimizer`."""
        serialize = self._keras.saving.serialize_keras_object
        return {
            "name": self.name,
            "inner_optimizer": serialize(self.inner_optimizer),
            "loss_scale_manager": serialize(self._loss_scale_manager),
            "is_distributed": self._is_distributed,
            "skip_spikes": None if self.spike_detector is None else serialize(self.spike_detector),
            **self._accumulation.get_config(),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "LossScaleOptimizerKeras":
        """As in `tfmp.LossScaleOptimizer`."""
        optimizers = cls._keras.optimizers
        parts = parts_of_config(cls._keras, config, optimizers.Optimizer, vars(optimizers).values(), custom_objects)
        # `type.__call__` does what `cls(...)` does, without the metaclass of Keras 2. The metaclass would pass the
        # inner optimizer by position, and the subclass that Horovod makes accepts it by keyword only.
        used = {name: value for name, value in parts.items() if name not in cls._settings_of_every_optimizer}
        return type.__call__(cls, **used)

    def _settings_to_show(self) -> list[str]:
        shown = {
            "is_distributed": self._is_distributed,
            "skip_spikes": self.spike_detector,
            **self._accumulation.get_config(),
            **self._own_settings(),
        }
        return settings_to_show(self.inner_optimizer, shown)

    def _own_settings(self) -> dict[str, Any]:
        """Return the entries of `get_config` that only the front-end for this version of Keras has."""
        raise NotImplementedError

    def _accumulator_of(self, variables: Sequence[Any]) -> GradientAccumulator | None:
        return self._accumulation.accumulator_of(variables)
