"""The wrapper around legacy optimizers, those of `keras.optimizers.legacy` in Keras 2.15 and in tf_keras."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from kerases import SCALE, dense_model, for_every_keras

import tfmp

for_every_keras2 = for_every_keras("keras2", "tf_keras")


def _wrap(inner: Any, **settings: Any) -> Any:
    return tfmp.LossScaleOptimizer(inner, **{"initial_scale": SCALE} | settings)


def _weights() -> list[tf.Variable]:
    return [tf.Variable([1.0, -2.0], name="kernel"), tf.Variable(0.5, name="bias")]


def _step(opt: Any, weights: list[tf.Variable], factor: Any, **kwargs: Any) -> Any:
    """Take a step in the style of Keras 2, wrapped or not."""
    is_wrapped = hasattr(opt, "get_scaled_loss")
    with tf.GradientTape() as tape:
        loss = (tf.reduce_sum(weights[0] ** 2) + weights[1] ** 2) * factor
        loss = opt.get_scaled_loss(loss) if is_wrapped else loss
    grads = tape.gradient(loss, weights)
    if is_wrapped:
        grads = opt.get_unscaled_gradients(grads)
    return opt.apply_gradients(zip(grads, weights, strict=True), **kwargs)


@for_every_keras2
def test_hyperparameters_are_those_of_the_inner_optimizer(keras: ModuleType) -> None:
    inner = keras.optimizers.legacy.Adam(0.25, beta_1=0.5, clipnorm=1.0)
    opt, weights = _wrap(inner), _weights()
    assert isinstance(opt, keras.optimizers.legacy.Optimizer)
    assert isinstance(opt, keras.mixed_precision.LossScaleOptimizer)
    for _ in range(2):
        assert (float(opt.beta_1), float(opt.learning_rate), float(opt.lr)) == (0.5, 0.25, 0.25)
        _step(opt, weights, 1.0)
    opt.beta_1, opt.lr = 0.75, 0.125
    assert (float(inner.beta_1), float(inner.learning_rate)) == (0.75, 0.125)
    with pytest.raises(AttributeError, match="beta_3"):
        _ = opt.beta_3
    assert opt.get_slot_names() == ["m", "v"]
    assert opt.get_slot(weights[0], "m") is inner.get_slot(weights[0], "m")
    assert [each.name for each in opt.variables()] == [each.name for each in opt.weights]
    opt.set_weights([array * 0 for array in opt.get_weights()])
    assert not any(array.any() for array in inner.get_weights())
    assert (opt.clipnorm, opt.clipvalue, opt.global_clipnorm) == (1.0, None, None)
    opt.clipnorm, opt.clipvalue, opt.global_clipnorm = None, 0.5, 2.0
    assert (inner.clipnorm, inner.clipvalue, inner.global_clipnorm) == (None, 0.5, 2.0)


@for_every_keras2
def test_further_arguments_reach_the_inner_optimizer_which_needs_none(keras: ModuleType) -> None:
    class Decaying(keras.optimizers.legacy.SGD):  # type: ignore[name-defined, misc] # one of two packages
        def apply_gradients(
            self, grads_and_vars: Any, name: Any = None, decay_var_list: Any = None, **kwargs: Any
        ) -> Any:
            seen.append((decay_var_list, kwargs))
            return super().apply_gradients(grads_and_vars, name=name, **kwargs)

    seen: list[Any] = []
    opt, weights = _wrap(Decaying(0.5)), _weights()
    _step(opt, weights, 1.0, decay_var_list=weights[:1])
    _step(opt, weights, math.inf, decay_var_list=weights[:1])
    _step(opt, weights, 1.0, experimental_aggregate_gradients=False)
    opt.minimize(lambda: tf.reduce_sum(weights[0]), weights[:1], decay_var_list=weights[1:])
    assert [kwargs for _, kwargs in seen] == [{}, {"experimental_aggregate_gradients": False}, {}]
    assert [decayed for decayed, _ in seen] == [weights[:1], None, weights[1:]]

    class Bare(keras.optimizers.legacy.SGD):  # type: ignore[name-defined, misc] # one of two packages
        def apply_gradients(self, grads_and_vars: Any) -> Any:
            return super().apply_gradients(grads_and_vars)

    opt, weights = _wrap(Bare(0.5)), _weights()
    _step(opt, weights, 1.0)
    assert [weight.numpy().tolist() for weight in weights] == [[0, 0], 0]


@for_every_keras2
def test_optimizer_around_the_wrapper_that_updates_variables_itself_is_refused(keras: ModuleType) -> None:
    """As Lookahead, SWA and MovingAverage of TensorFlow Addons do."""

    class Around(keras.optimizers.legacy.Optimizer):  # type: ignore[name-defined, misc] # one of two packages
        def __init__(self, inner: Any) -> None:
            super().__init__("Around")
            self._inner = inner

        def _create_hypers(self) -> None:
            self._inner._create_hypers()

        def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
            return self._inner._resource_apply_dense(grad, var)

    weight = tf.Variable(2.0)
    with pytest.raises(ValueError, match=r"must be the outermost wrapper.*write.*LossScaleOptimizer\(Lookahead\(SGD"):
        Around(_wrap(keras.optimizers.legacy.SGD())).apply_gradients([(tf.constant(1.0), weight)])
    assert float(weight) == 2


@for_every_keras2
def test_clipping_of_a_users_class_before_it_sums_is_kept(keras: ModuleType) -> None:
    """As AdamWeightDecay of TF-models clips; Keras' own wrapper sums first, and such a class then clips nothing."""

    class Clipping(keras.optimizers.legacy.SGD):  # type: ignore[name-defined, misc] # one of two packages
        def apply_gradients(
            self, grads_and_vars: Any, name: Any = None, experimental_aggregate_gradients: bool = True
        ) -> Any:
            grads, variables = zip(*grads_and_vars, strict=True)
            if experimental_aggregate_gradients:
                grads, _ = tf.clip_by_global_norm(grads, 1.0)
            return super().apply_gradients(zip(grads, variables, strict=True), name, experimental_aggregate_gradients)

    ends = []
    for opt in (Clipping(0.5), _wrap(Clipping(0.5)), keras.mixed_precision.LossScaleOptimizer(Clipping(0.5))):
        weights = _weights()
        for _ in range(2):
            _step(opt, weights, 1.0)
        ends.append(weights[0].numpy().tolist())
    assert ends[1] == ends[0] != ends[2]


@for_every_keras2
def test_checkpoints_go_to_and_from_keras_own_wrapper_and_the_bare_optimizer(keras: ModuleType, tmp_path: Path) -> None:
    makes: dict[str, Callable[[], Any]] = {
        "bare": lambda: keras.optimizers.legacy.Adam(0.125),
        "Keras'": lambda: keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.legacy.Adam(0.125), initial_scale=SCALE, dynamic_growth_steps=4
        ),
        "tfmp": lambda: _wrap(keras.optimizers.legacy.Adam(0.125), dynamic_growth_steps=4),
    }
    for saved, make in makes.items():
        opt, weights = make(), _weights()
        for factor in (1.0, 1.0) if saved == "bare" else (1.0, math.inf, 1.0):
            _step(opt, weights, factor)
        path = tf.train.Checkpoint(opt=opt, weights=weights).save(str(tmp_path / saved))
        for loaded, make_again in makes.items():
            again, others = make_again(), _weights()
            status = tf.train.Checkpoint(opt=again, weights=others).restore(path)
            _step(again, others, 0.0)
            if saved == loaded:
                status.assert_consumed()
            else:
                status.expect_partial()
            if loaded == "bare":
                _step(opt, weights, 0.0)
            np.testing.assert_array_equal(others[0].numpy(), weights[0].numpy())
            np.testing.assert_array_equal(again.get_slot(others[0], "v"), opt.get_slot(weights[0], "v"))
            if "bare" not in {saved, loaded}:
                assert float(again.loss_scale) == SCALE / 2
                counter = again.dynamic_counter if loaded == "Keras'" else again.manager.state_dict()["good_steps"]
                assert int(counter) == 2


@for_every_keras2
def test_only_another_fixed_scale_is_warned_of_when_a_checkpoint_is_restored(
    keras: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fixed(scale: float) -> tf.train.Checkpoint:
        inner = keras.optimizers.legacy.SGD()
        return tf.train.Checkpoint(opt=tfmp.LossScaleOptimizer(inner, tfmp.FixedLossScaleManager(scale)))

    path = fixed(8).save(str(tmp_path / "checkpoint"))
    for scale, warned in ((8, []), (16, [True])):
        fixed(scale).restore(path).expect_partial()
        assert ["the loss scale 8" in message for message in caplog.messages] == warned


@for_every_keras2
def test_h5_files_hold_the_state_of_the_inner_optimizer(keras: ModuleType, tmp_path: Path) -> None:
    x, y = np.ones((16, 3), np.float32), np.ones((16, 1), np.float32)
    for saved in (_wrap, keras.mixed_precision.LossScaleOptimizer):
        model = dense_model(keras, saved(keras.optimizers.legacy.Adam(0.125)))
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        path = str(tmp_path / f"{type(model.optimizer).__name__}.h5")
        model.save(path)
        loaded = keras.models.load_model(path)
        assert type(loaded.optimizer) is type(model.optimizer)
        for own, other in zip(model.optimizer.get_weights(), loaded.optimizer.get_weights(), strict=True):
            np.testing.assert_array_equal(own, other)
        assert int(loaded.optimizer.iterations) == 4
        loaded.fit(x, y, verbose=0)


@for_every_keras2
def test_configuration_of_a_users_optimizer_tells_that_it_is_legacy(keras: ModuleType) -> None:
    class Bare(keras.optimizers.legacy.Optimizer):  # type: ignore[name-defined, misc] # one of two packages
        """Has no settings but those of every legacy optimizer, as Lookahead of TensorFlow Addons."""

        def __init__(self, name: str = "Bare", **kwargs: Any) -> None:
            super().__init__(name, **kwargs)

        def get_config(self) -> dict[str, Any]:
            return super().get_config()

    for wrapper in (_wrap(Bare()), keras.mixed_precision.LossScaleOptimizer(Bare(), initial_scale=SCALE)):
        again = tfmp.LossScaleOptimizer.from_config(wrapper.get_config(), custom_objects={"Bare": Bare})
        assert isinstance(again, keras.optimizers.legacy.Optimizer)
        assert (type(again.inner_optimizer), float(again.loss_scale)) == (Bare, SCALE)


@for_every_keras2
def test_takes_the_place_of_keras_own_wrapper(keras: ModuleType) -> None:
    weights = _weights()
    own = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.legacy.Adam(), initial_scale=SCALE)
    for factor in (math.inf, 1.0):
        _step(own, weights, factor)
    opt = tfmp.LossScaleOptimizer.from_keras(own)
    assert (float(opt.loss_scale), opt.manager.state_dict()["good_steps"]) == (SCALE / 2, 1)
    _step(opt, weights, math.inf)
    assert (int(opt.iterations), float(opt.loss_scale)) == (3, SCALE / 4)
