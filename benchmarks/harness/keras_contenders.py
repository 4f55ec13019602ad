"""The contenders in Keras: the optimizers of the installed Keras and of tf_keras, bare and in several wrappers."""

import contextlib
import functools
import importlib.util
import operator
from collections.abc import Callable, Container, Iterator
from types import ModuleType
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

import tfmp
from benchmarks.harness import cells
from benchmarks.harness.cells import Cell
from benchmarks.harness.contest import Contender

_Grads: TypeAlias = list[tf.Tensor]
_Apply: TypeAlias = Callable[[_Grads], None]
# The classes of Keras 3 and tf_keras have no common base class.
_Optimizer: TypeAlias = Any
_Variable: TypeAlias = Any
_Wrap: TypeAlias = Callable[[_Optimizer], _Optimizer]

#: The modes of a step, each with the function that prepares an update to run in this mode. "replicas" is a
#: `tf.function` on two replicas of a `MirroredStrategy`, which have the same gradients: on two GPUs if there are as
#: many, otherwise on two logical CPUs.
MODES: dict[str, Callable[[_Apply], _Apply]] = {
    "function": tf.function,
    "xla": functools.partial(tf.function, jit_compile=True),
    "eager": lambda apply: apply,
    "replicas": lambda apply: tf.function(functools.partial(_on_replicas, apply)),
}


def _on_replicas(apply: _Apply, grads: _Grads) -> None:
    # As in a training, each replica has tensors of its own.
    tf.distribute.get_strategy().run(lambda: apply(list(map(tf.identity, grads))))


_REPLICAS = 2

_IS_KERAS_3 = keras.__version__.startswith("3.")

#: The optimizers by their names in `keras.optimizers`. Of Keras 2.15 the legacy ones are measured: the others are those
#: of tf_keras, which are measured beside Keras 3.
OPTIMIZERS = ("SGD", "Adam", "AdamW") if _IS_KERAS_3 else ("legacy.SGD", "legacy.Adam")

#: Contenders that are made only if their names are given: "tfmp" with steps whose norm is read after each of them, and
#: with a spike detector too.
NORM, SPIKES = "tfmp, norm", "tfmp, spikes"

#: The contender that is wrapped by the installed Keras' own wrapper.
KERAS = "Keras 3" if _IS_KERAS_3 else "Keras 2"


@contextlib.contextmanager
def contenders(cell: Cell, names: Container[str] | None = None) -> Iterator[list[Contender]]:
    """Make the contenders of a cell, for the duration of a `with`.

    "copy" and "read" are yardsticks: they copy all gradients, and read all gradients, in a `tf.function` in every mode.
    The bare optimizers take unscaled gradients. These are finite even in cells where the other contenders skip the
    step, because a bare optimizer cannot skip a step.

    Args:
        cell: The kind of step.
        names: The contenders to make; by default all that can take part.
    """
    if cell.mode == "replicas":
        kind = "gpu" if len(tf.config.list_logical_devices("GPU")) >= _REPLICAS else "cpu"
        devices = [f"{kind}:{replica}" for replica in range(_REPLICAS)]
        strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
    else:
        strategy = tf.distribute.get_strategy()
    arrays = cells.gradients(cell)
    true_grads = [tf.constant(grad) for grad in arrays]
    scaled = [grad * grad.dtype.type(cells.SCALE) for grad in arrays]
    if cell.outcome == "skipped":
        scaled[-1] = cells.overflowed(scaled[-1])
    grads = [tf.constant(grad) for grad in scaled]
    held: list[Callable[[], list[_Variable]]] = []
    try:
        yardsticks = _yardsticks(grads, names)
        with strategy.scope():
            yield [*yardsticks, *_optimizers(cell, names, grads, true_grads, held)]
    finally:
        for variables_of in held:
            for variable in variables_of():
                _empty(variable, strategy)
        for package in _packages():
            package.backend.clear_session()


def left_out(cell: Cell) -> dict[str, str]:
    """Return the contenders that cannot take part in a cell, with the reasons.

    Args:
        cell: The kind of step.
    """
    if not _IS_KERAS_3:
        return {}
    missing = {}
    if len(_packages()) == 1:
        missing = dict.fromkeys(("tf_keras", "tfmp, tf_keras"), "it is not installed")
    elif cell.mode == "replicas" and cell.clipping == "clipped":
        why = "its optimizers clip the sums over the replicas, those of Keras 3 the gradients of each replica"
        missing = dict.fromkeys(("tf_keras", "tfmp, tf_keras"), why)
    elif cell.dtype == "float16":
        missing = {"tf_keras": "its optimizers take no float16 gradients of float32 weights"}
    return missing


def make_devices() -> None:
    """Make the devices of the mode "replicas"; to be called before TensorFlow makes any."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is None:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * _REPLICAS)


def optimizer(cell: Cell, name: str) -> _Optimizer:
    """Return the optimizer of a contender, which is not built.

    Args:
        cell: The kind of step.
        name: The contender.
    """
    package, wrap = _entries(cell)[name]
    return wrap(_optimizer(package, cell, clips=name != "GradScaler"))


def _yardsticks(grads: _Grads, names: Container[str] | None) -> Iterator[Contender]:
    for name, function in {"copy": _copy, "read": _read}.items():
        if names is None or name in names:
            yield Contender(name, _waiting(tf.function(function), grads))


def _optimizers(
    cell: Cell,
    names: Container[str] | None,
    grads: _Grads,
    true_grads: _Grads,
    held: list[Callable[[], list[_Variable]]],
) -> Iterator[Contender]:
    run, entries = MODES[cell.mode], _entries(cell)
    for name, (package, _) in entries.items():
        if name in left_out(cell) or name not in (names or entries.keys() - {NORM, SPIKES}):
            continue
        variables = [_variable(package, shape) for shape in cells.SHAPES[cell.shapes]]
        opt = optimizer(cell, name)
        # Legacy optimizers make their variables in the first step.
        if hasattr(opt, "build"):
            opt.build(variables)
        held.append(functools.partial(_held, variables, opt))
        apply = _apply(opt, variables)
        if name == "bare, compiled":
            apply = _called(tf.function(apply, jit_compile=True))
        step = _waiting(run(apply), true_grads if name.startswith("bare") else grads)
        if name in {NORM, SPIKES}:
            step = functools.partial(_reading_norm, step, opt)
        yield Contender(name, step, functools.partial(_values, variables))


def _held(variables: list[_Variable], opt: _Optimizer) -> list[_Variable]:
    # The optimizers of Keras 2 have a method, or a list that can be called.
    return [*variables, *(opt.variables() if callable(opt.variables) else opt.variables)]


def _empty(variable: _Variable, strategy: tf.distribute.Strategy) -> None:
    """Free the memory of a variable, on each replica. Each contender with Adam has up to 600 MB in its variables."""
    # Without this the memory would never be freed: Keras' optimizers use tf.custom_gradient, which keeps every graph
    # that it was traced in until the process ends (TensorFlow 2.21), and the graphs keep the variables.
    of_tensorflow = variable if isinstance(variable, tf.Variable) else variable.value
    for each in strategy.experimental_local_results(of_tensorflow):
        tf.raw_ops.AssignVariableOp(resource=each.handle, value=tf.zeros([0], each.dtype))


def _packages() -> list[ModuleType]:
    found = [keras]
    if importlib.util.find_spec("tf_keras") is not None:
        import tf_keras

        found.append(tf_keras)
    return found


def _entries(cell: Cell) -> dict[str, tuple[ModuleType, _Wrap]]:
    """Return the Keras package of each contender, and the function that wraps its optimizer."""
    entries: dict[str, tuple[ModuleType, _Wrap]] = {"bare": (keras, lambda opt: opt)}
    if cell.mode == "function":
        entries["bare, compiled"] = entries["bare"]
    own = getattr(keras, "optimizers" if _IS_KERAS_3 else "mixed_precision").LossScaleOptimizer
    entries[KERAS] = (keras, functools.partial(own, initial_scale=cells.SCALE))
    entries["tfmp"] = (keras, _wrapped_by_tfmp)
    entries[NORM] = (keras, _with_norm)
    entries[SPIKES] = (keras, lambda opt: tfmp.LossScaleOptimizer(opt, _manager(), skip_spikes=tfmp.SpikeDetector()))
    entries["GradScaler"] = (keras, functools.partial(_WithGradScaler, clips=cell.clipping == "clipped"))
    for package in _packages()[1:]:
        wrapper = functools.partial(package.mixed_precision.LossScaleOptimizer, initial_scale=cells.SCALE)
        entries["tf_keras"] = (package, wrapper)
        entries["tfmp, tf_keras"] = (package, _wrapped_by_tfmp)
    return entries


def _wrapped_by_tfmp(opt: _Optimizer) -> tfmp.LossScaleOptimizer:
    return tfmp.LossScaleOptimizer(opt, _manager())


def _with_norm(opt: _Optimizer) -> tfmp.LossScaleOptimizer:
    wrapped = _wrapped_by_tfmp(opt)
    wrapped.record_gradient_norm()
    return wrapped


def _reading_norm(step: Callable[[], None], opt: tfmp.LossScaleOptimizer) -> None:
    step()
    float(opt.gradient_norm)


def _manager() -> tfmp.LossScaleManager:
    # These settings give the rule of Keras' own wrappers.
    return tfmp.ExponentialUpdateLossScaleManager(cells.SCALE, 2000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)


class _WithGradScaler:
    """An optimizer and a `tfmp.GradScaler`, with the methods of a wrapper that the benchmark calls.

    Args:
        opt: The optimizer, which does not clip.
        clips: Whether each step unscales the gradients and clips them before it applies them.
    """

    def __init__(self, opt: _Optimizer, *, clips: bool) -> None:
        self._opt = opt
        self._clips = clips
        self._scaler = tfmp.GradScaler(manager=_manager())
        self.variables: list[_Variable] = []

    def build(self, variables: list[_Variable]) -> None:
        self._scaler.prepare(self._opt, variables)
        self.variables = self._opt.variables

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        return self._scaler.scale(loss)

    def apply(self, grads: _Grads, variables: list[_Variable]) -> None:
        self._scaler.scale(tf.zeros([]))
        if self._clips:
            grads, _ = tfmp.clip_by_global_norm(self._scaler.unscale(self._opt, grads), cells.CLIP_NORM)
        self._scaler.step(self._opt, list(zip(grads, variables, strict=True)))
        self._scaler.update()


def _optimizer(package: ModuleType, cell: Cell, *, clips: bool) -> _Optimizer:
    # By default tf_keras compiles the update where there is a GPU.
    options = {} if package is keras else {"jit_compile": False}
    clip = cells.CLIP_NORM if cell.clipping == "clipped" and clips else None
    return operator.attrgetter(cell.optimizer)(package.optimizers)(1e-3, global_clipnorm=clip, **options)


def _variable(package: ModuleType, shape: tuple[int, ...]) -> _Variable:
    return getattr(package, "Variable", tf.Variable)(np.zeros(shape, np.float32))


def _apply(opt: _Optimizer, variables: list[_Variable]) -> _Apply:
    # Keras 2's wrapper and tfmp's warn if no loss was ever scaled, so a loss is scaled here.
    if hasattr(opt, "apply"):
        opt.scale_loss(tf.zeros([]))
        return lambda grads: opt.apply(grads, variables)
    if not hasattr(opt, "get_scaled_loss"):
        return lambda grads: _applied(opt, grads, variables)
    opt.get_scaled_loss(tf.zeros([]))
    return lambda grads: _applied(opt, opt.get_unscaled_gradients(grads), variables)


def _applied(opt: _Optimizer, grads: _Grads, variables: list[_Variable]) -> None:
    opt.apply_gradients(zip(grads, variables, strict=True))


def _called(function: _Apply) -> _Apply:
    def call(grads: _Grads) -> None:
        function(grads)

    return call


def _waiting(apply: _Apply, grads: _Grads) -> Callable[[], None]:
    def step() -> None:
        apply(grads)
        tf.test.experimental.sync_devices()

    return step


def _values(variables: list[_Variable]) -> list[np.ndarray]:
    return [variable.numpy() for variable in variables]


def _copy(grads: _Grads) -> list[tf.Tensor]:
    return [tf.raw_ops.DeepCopy(x=grad) for grad in grads]


def _read(grads: _Grads) -> tf.Tensor:
    return tf.add_n([tf.nn.l2_loss(grad) for grad in grads])
