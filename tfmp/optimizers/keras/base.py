"""The base class of the front-ends for Keras 2, tf_keras and Keras 3, without their legacy optimizers."""

from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfmp.core import lists
from tfmp.core.adapters import names_of
from tfmp.optimizers.keras.checkpoints import CheckpointedAsInner
from tfmp.optimizers.keras.files import SavedAsInner, StateInFiles
from tfmp.optimizers.keras.methods import MethodsOfKeras


class LossScaleOptimizerKeras(CheckpointedAsInner, SavedAsInner, MethodsOfKeras):
    """The methods that are the same in the front-ends for all versions of Keras."""

    _settings_of_every_optimizer = MappingProxyType(
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

    def _set_up(self, *arguments: Any) -> None:  # noqa: ANN401 - as of the base class
        super()._set_up(*arguments)
        self._has_spike_state = False
        # TensorFlow exports a function only if the variables that it uses are reachable from a tracked attribute.
        self._overflow_counts = self._scaler.overflow_counts
        self._norms = self._scaler.norms
        num_unused = len(self._own_variables())
        # The variables are made here and not in `build`, so that a checkpoint can be restored before `build`.
        self._loss_scale_manager.store_in(self._add_state_variable)
        self._loss_scale_state = self._state_in_files(lambda: self._own_variables()[num_unused:], self._continue_at)

    def build(self, var_list: Iterable[Any]) -> None:
        """Make the variables of the inner optimizer and those that accumulate gradients.

        Args:
            var_list: The variables to train.

        Raises:
            TypeError: `var_list` is not a list of variables.
            ValueError: `accumulation_steps` is greater than 1, and the "gradient" of a variable is its next value, as
                Keras has it for float8 scales.
        """
        var_list = lists.variables("var_list", var_list)
        # The accumulation may raise an error, so it comes before Keras marks the optimizers as built.
        self._accumulators.build(var_list, self._add_buffer)
        self._build_optimizers(var_list)
        # Last, so that the positions of all others in checkpoints are the same without a detector.
        if self.spike_detector is not None and not self._has_spike_state:
            self.spike_detector.store_in(self._add_state_variable)
            self._has_spike_state = True
        self._scaler.prepare(names_of(var_list))

    def _build_optimizers(self, variables: Sequence[Any]) -> None:
        self.inner_optimizer.build(variables)

    def _add_state_variable(self, name: str, initial_value: np.generic | np.ndarray) -> tf.Variable:
        # Keras 3's Constant initializer multiplies by a tensor of ones, and TensorFlow before 2.19 cannot multiply
        # booleans.
        return self._add(
            name, initial_value.shape, initial_value.dtype.name, lambda *_, **__: tf.constant(initial_value)
        )

    def _add_buffer(self, name: str, shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
        """Make a variable of which each replica has its own copy; a checkpoint holds the copies' sum."""

        def make(next_creator: Any, **settings: Any) -> tf.Variable:  # noqa: ANN401 - TensorFlow ships no types
            settings["synchronization"] = tf.VariableSynchronization.ON_READ
            settings["aggregation"] = tf.VariableAggregation.SUM
            return next_creator(**settings)

        with tf.variable_creator_scope(make):
            return self._add(name, shape, dtype.name, "zeros", "sum")

    def _add(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        initializer: str | Callable[..., tf.Tensor],
        aggregation: str = "only_first_replica",
    ) -> tf.Variable:
        """Add a variable to the wrapper's own; by default one of which every replica computes the same value."""
        raise NotImplementedError

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
        return {"name": self.name, **super().get_config()}
