"""The first uses of tfmp whose times `benchmarks.start_cost` measures, each beside the same use of Keras."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

#: A function without arguments that is timed.
_Action: TypeAlias = Callable[[], object]
#: The classes of the two Keras have no common base class.
_Optimizer: TypeAlias = Any

# Nothing here imports tfmp or Keras before an action does, or before it is made: importing is a part of what is timed.


def _import_tfmp() -> None:
    import tfmp  # noqa: F401 - the import is what is timed


def _import_keras() -> None:
    import keras  # noqa: F401 - the import is what is timed


def _import(contender: str) -> _Action:
    """Import tfmp alone."""
    del contender
    _import_keras()
    return _import_tfmp


def _construction(contender: str) -> _Action:
    """Make the optimizer: Adam, bare or in a wrapper."""
    _import_both()
    return functools.partial(_optimizer, contender)


def _scaler_construction(contender: str) -> _Action:
    """Make the optimizer and a `tfmp.GradScaler` beside it."""
    _import_both()
    return functools.partial(_scaler, "Adam") if contender == "tfmp" else functools.partial(_optimizer, contender)


def _eager_step(contender: str) -> _Action:
    """Take a step of a small model in eager code, with an optimizer that is not built."""
    return _step(contender)


def _traced_step(contender: str) -> _Action:
    """Take the same step in a `tf.function`."""
    return tf.function(_step(contender))


def _eager_scaler_step(contender: str) -> _Action:
    """Take a step in eager code, with a `tfmp.GradScaler`."""
    return _scaler_step(contender) if contender == "tfmp" else _step(contender)


def _traced_scaler_step(contender: str) -> _Action:
    """Take a step in a `tf.function`, with a `tfmp.GradScaler`."""
    return tf.function(_eager_scaler_step(contender))


def _fit(contender: str) -> _Action:
    """Fit a small model for 4 steps; tfmp with a callback."""
    import keras
    import numpy as np

    model = _model(keras)
    model.compile(_optimizer(contender), "mse")
    data = np.ones([32, 8], np.float32)

    def fit() -> None:
        callbacks = []
        if contender == "tfmp":
            import tfmp

            callbacks = [tfmp.LossScaleCallback()]
        model.fit(data, data, batch_size=8, verbose=0, callbacks=callbacks)

    return fit


def _precision(contender: str) -> _Action:
    """Make a model that computes in float16: by its own policy in Keras, by `tfmp.set_precision` in tfmp."""
    import keras

    _import_both()

    def make() -> None:
        if contender == "tfmp":
            import tfmp

            tfmp.set_precision(_model(keras), "O2")
        else:
            _model(keras, *(["mixed_float16"] if contender == "Keras" else []))

    return make


#: The optimizer without a wrapper, in Keras' own wrapper, and in tfmp's.
CONTENDERS = ("bare", "Keras", "tfmp")

#: The uses: for each, the function that prepares it for a contender ("bare", "Keras" or "tfmp"), and how often the
#: action is then called. In eager code tfmp may compile its update in the second call.
USES: dict[str, tuple[Callable[[str], _Action], int]] = {
    "import": (_import, 1),
    "construction": (_construction, 2),
    "GradScaler, construction": (_scaler_construction, 2),
    "step, eager": (_eager_step, 3),
    "step, tf.function": (_traced_step, 2),
    "GradScaler, step, eager": (_eager_scaler_step, 3),
    "GradScaler, step, tf.function": (_traced_scaler_step, 2),
    "fit with LossScaleCallback": (_fit, 2),
    "set_precision": (_precision, 2),
}


def _import_both() -> None:
    _import_keras()
    _import_tfmp()


def _optimizer(contender: str) -> _Optimizer:
    import keras

    import tfmp

    inner = keras.optimizers.Adam(1e-3)
    if contender == "bare":
        return inner
    # Keras 3 has the wrapper there too, for code that was written for Keras 2.
    return (keras.mixed_precision if contender == "Keras" else tfmp).LossScaleOptimizer(inner)


def _scaler(_: str) -> tuple[_Optimizer, Any]:
    import tfmp

    return _optimizer("bare"), tfmp.GradScaler()


def _model(keras: Any, policy: str = "float32") -> Any:  # noqa: ANN401 - the module and a model of it
    return keras.Sequential([keras.Input([8]), keras.layers.Dense(8, dtype=policy)])


def _weights() -> list[Any]:
    import keras

    return [keras.Variable(tf.ones([8, 8])), keras.Variable(tf.zeros([8]))]


def _loss(weights: list[Any]) -> tf.Tensor:
    kernel, bias = weights
    return tf.reduce_sum(tf.linalg.matvec(kernel.value, bias.value + 1.0))


def _gradients(weights: list[Any], scale: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        scaled = scale(_loss(weights))
    return tape.gradient(scaled, [weight.value for weight in weights])


def _step(contender: str) -> _Action:
    weights = _weights()
    opt = _optimizer(contender)
    scale = (lambda loss: loss) if contender == "bare" else opt.scale_loss

    def step() -> None:
        opt.apply(_gradients(weights, scale), weights)

    return step


def _scaler_step(contender: str) -> _Action:
    weights = _weights()
    opt, scaler = _scaler(contender)

    def step() -> None:
        grads = _gradients(weights, scaler.scale)
        scaler.step(opt, list(zip(grads, weights, strict=True)))
        scaler.update()

    return step
