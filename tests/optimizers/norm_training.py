"""Trains on several replicas by given gradients, some of which overflow or are spikes; returns the norms of the steps.

The norms are compared with those of NumPy: `assert_right` here.
"""

import contextlib
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kerases
import numpy as np
import pytest
import tensorflow as tf

import tfmp

tf1 = tf.compat.v1

#: The loss scale before the first step.
SCALE = 1024.0

#: A sum of gradients with a larger norm is a spike.
MAX_NORM = 50.0

_KERNEL = 3
_TABLE = 4


class Outcome(enum.Enum):
    """What becomes of a step: by how much the numbers of steps applied, skipped, and skipped as spikes rise."""

    APPLIED = (1, 0, 0)
    OVERFLOW = (0, 1, 0)
    SPIKE = (0, 1, 1)


class Step(NamedTuple):
    """The gradients of two replicas, a row for each, and what becomes of the step.

    The first values are the gradient of a kernel. The others are two rows of the sparse gradient of a table: the first
    replica has two for the same index, which the second has too.
    """

    fed: np.ndarray
    outcome: Outcome

    def norm(self) -> float:
        """Return the norm of the sum over the replicas."""
        return norm_of_sum(self.fed)


def norm_of_sum(fed: np.ndarray) -> float:
    """Return the norm of the sum of the replicas' gradients, in float64.

    Args:
        fed: The gradients of the replicas, a row for each.
    """
    wide = np.float64(np.float32(fed))
    table = np.zeros(_TABLE)
    for replica, row in enumerate(wide):
        np.add.at(table, _indices(replica), row[_KERNEL:])
    return float(np.linalg.norm([*wide[:, :_KERNEL].sum(axis=0), *table]))


def _indices(replica: Any) -> list[Any]:
    return [1, replica + 1]


def _steps() -> dict[str, Step]:
    rng = np.random.default_rng(0)
    usual = [rng.normal(size=[2, 5]) for _ in range(6)]
    # The norms of both replicas' gradients are below the bound, as is that of their mean.
    only_sum = np.full([2, 5], 12.0)
    second = usual[2] * [[1], [1000]]
    dense, sparse = usual[3].copy(), usual[4].copy()
    dense[1, 0], sparse[1, 4] = np.inf, np.nan
    # These are large on each replica, but not their sum.
    opposite = np.float64([[1000, -500, 250, 1, 2], [-1001, 502, -249, 1, 3]])
    return {
        "usual": Step(usual[0], Outcome.APPLIED),
        "dense overflow on the second": Step(dense, Outcome.OVERFLOW),
        "spike of the sum alone": Step(only_sum, Outcome.SPIKE),
        "opposite": Step(opposite, Outcome.APPLIED),
        "spike on the second": Step(second, Outcome.SPIKE),
        "sparse overflow on the second": Step(sparse, Outcome.OVERFLOW),
        "usual again": Step(usual[1], Outcome.APPLIED),
    }


STEPS = _steps()


class State(NamedTuple):
    """The state after a step; for values that each replica has, there is a list of them."""

    #: The norm of the step.
    norms: list[float]
    #: The values that only an applied step changes: weights, slots, and the count of steps.
    moving: list[Any]
    loss_scale: float
    #: The numbers of steps applied, skipped, and skipped as spikes.
    counts: list[int]


def assert_right(
    states: Sequence[State],
    steps: Iterable[Step] = STEPS.values(),
    *,
    divisor: float = 1.0,
    is_scale_constant: bool = False,
) -> None:
    """Assert that norms, skipped steps and counts are those that the steps ask for, on all replicas alike.

    Args:
        states: The states after the steps.
        steps: The steps.
        divisor: The number by which the sums of the gradients are divided.
        is_scale_constant: Whether the manager is one that does not halve the scale at an overflow.
    """
    counts, scale, before = np.zeros(3, int), SCALE, None
    for number, (state, step) in enumerate(zip(states, steps, strict=True)):
        where = f"step {number}: {step.outcome}"
        counts += step.outcome.value
        if step.outcome is Outcome.OVERFLOW:
            assert not np.isfinite(state.norms).any(), where
            scale /= 1 if is_scale_constant else 2
        else:
            np.testing.assert_allclose(state.norms, step.norm() / divisor, rtol=1e-5, err_msg=where)
        assert state.counts == counts.tolist(), where
        assert state.loss_scale == scale, where
        assert all(replica == state.moving[0] for replica in state.moving), where
        if before is not None:
            assert (state.moving == before) is (step.outcome is not Outcome.APPLIED), where
        before = state.moving


def manager() -> tfmp.LossScaleManager:
    """Return a manager that halves the scale at an overflow."""
    return tfmp.ExponentialUpdateLossScaleManager(SCALE, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)


def fixed_bound() -> tfmp.SpikeDetector:
    """Return a detector whose bound is `MAX_NORM`."""
    return tfmp.SpikeDetector(max_norm=MAX_NORM)


class Host(NamedTuple):
    """The kind of the optimizer, and how it is used."""

    #: The key of a Keras in `kerases.installed()`, or "v1".
    name: str
    #: Whether the optimizer is a legacy optimizer of Keras.
    is_legacy: bool = False
    #: Whether a `tfmp.GradScaler` steps it; otherwise there is a `tfmp.LossScaleOptimizer` around it.
    has_scaler: bool = False

    def __str__(self) -> str:
        """Return the name for a test."""
        return "_".join([self.name, *["legacy"] * self.is_legacy, *["scaler"] * self.has_scaler])

    def inner(self, options: Mapping[str, Any]) -> Any:
        """Return an optimizer with slots."""
        if self.name == "v1":
            return tf1.train.MomentumOptimizer(0.125, 0.5)
        optimizers = kerases.installed()[self.name].optimizers
        return (optimizers.legacy if self.is_legacy else optimizers).SGD(0.125, momentum=0.5, **options)


def hosts() -> list[Host]:
    """Return the kinds of optimizers that are installed."""
    legacy = [Host(name, is_legacy=True) for name in kerases.installed() if name != "keras3"]
    each = [Host("v1"), *map(Host, kerases.installed()), *legacy]
    return [*each, *(host._replace(has_scaler=True) for host in each)]


def for_hosts(found: Sequence[Host]) -> pytest.MarkDecorator:
    """Run a test with each of these hosts, as its parameter `host`."""
    return pytest.mark.parametrize("host", found, ids=map(str, found))


class NormTraining:
    """A kernel and a table, whose gradients are fed.

    Args:
        host: The kind of the optimizer.
        strategy: The strategy with the replicas; by default there is one device.
        mode: "function", "eager", or "graph" for a session of TF1.
        wrap: Puts the optimizer into tfmp's wrapper; takes the wrapper's arguments as keyword arguments.
        rank: The number of this process; by default the number of the replica decides what is fed.
        clips: Whether the gradients are clipped before they are applied.
        options: Options of the inner optimizer.
        settings: Arguments of the wrapper, or of the scaler, that differ from the defaults of this class. Without
            `skip_spikes` the norms are recorded.
    """

    def __init__(
        self,
        host: Host,
        strategy: tf.distribute.Strategy | None = None,
        *,
        mode: str = "function",
        wrap: Callable[..., Any] = tfmp.LossScaleOptimizer,
        rank: int | None = None,
        clips: bool = False,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._host, self._rank, self._clips = host, rank, clips
        self._strategy = strategy or tf.distribute.get_strategy()
        self._session = tf1.Session(graph=tf.Graph()) if mode == "graph" else None
        steps = settings.pop("accumulation_steps", 1)
        self._is_step_alone = steps == 1
        with self._scope():
            self.weights = self._variables()
            self.global_step = tf1.train.get_or_create_global_step() if mode == "graph" else _counter()
            self.inner = host.inner(options or {})
            settings = {"loss_scale_manager": manager(), "skip_spikes": fixed_bound()} | settings
            self.opt = self._wrapped(wrap, settings, steps)
            if hasattr(self.opt, "build"):
                self.opt.build(self.weights)
        if host.name != "v1" and not host.has_scaler:
            # Horovod copies optimizers of Keras.
            self.inner = self.opt.inner_optimizer
        #: What has the properties of the steps. Horovod's optimizer for TF1 does not forward them.
        self.ours = getattr(self.opt, "_optimizer", self.opt) if host.name == "v1" else self.opt
        if settings["skip_spikes"] is None:
            self.ours.record_gradient_norm()
        self._step = tf.function(self._run) if mode == "function" else self._run
        if self._session is not None:
            self._build()

    def _scope(self) -> Any:
        stack = contextlib.ExitStack()
        if self._session is not None:
            stack.enter_context(self._session.graph.as_default())
        stack.enter_context(self._strategy.scope())
        return stack

    def _variables(self) -> list[Any]:
        kernel, table = np.ones(_KERNEL, np.float32), np.ones([_TABLE, 1], np.float32)
        if self._session is not None:
            return [tf1.get_variable(name, initializer=value) for name, value in (("w", kernel), ("table", table))]
        if self._host.name == "keras3" and not self._host.has_scaler:
            keras = kerases.installed()["keras3"]
            return [kerases.variable(keras, value) for value in (kernel, table)]
        return [tf.Variable(kernel), tf.Variable(table)]

    def _wrapped(self, wrap: Callable[..., Any], settings: Mapping[str, Any], steps: int) -> Any:
        self._accumulator = None
        if not self._host.has_scaler:
            return wrap(self.inner, **settings, **({} if steps == 1 else {"accumulation_steps": steps}))
        if steps > 1:
            self._accumulator = tfmp.GradientAccumulator(self.weights, accumulation_steps=steps)
        renamed = {"loss_scale_manager": "manager"}
        return tfmp.GradScaler(**{renamed.get(name, name): value for name, value in settings.items()})

    def _build(self) -> None:
        with self._scope():
            self._fed = tf1.placeholder(tf.float32, [2, 5])
            done = self._strategy.run(self._on_replica, args=(self._fed,))
            train_op = tf.group(self._strategy.experimental_local_results(done))
            norm = self.ours.gradient_norm
            self._state = [self._moving(), self._rest()]
            # The step at the end of a window is in a conditional, so its norm is fetched after the step.
            self._fetches, self._later = ([train_op, norm], []) if self._is_step_alone else ([train_op], [norm])
            self._saver = tf1.train.Saver()
            self._session.run(tf1.global_variables_initializer())

    def train(self, *micro_batches: np.ndarray) -> State:
        """Take a step with the mean of micro-batches; return the state after it.

        Args:
            micro_batches: The gradients of the replicas in each micro-batch, a row for each replica.
        """
        for fed in np.float32(micro_batches):
            if self._session is not None:
                _, *norms = self._session.run(self._fetches, {self._fed: fed})
            else:
                self._step(tf.constant(fed))
        if self._accumulator is not None:
            self._strategy.run(self._take_step)
        if self._session is not None:
            later, moving, rest = self._session.run([self._later, *self._state])
            return _state([*norms, *later], moving, rest)
        norms = self._strategy.experimental_local_results(self._strategy.run(lambda: self.ours.gradient_norm))
        return _state(norms, *tf.nest.map_structure(lambda value: value.numpy(), [self._moving(), self._rest()]))

    def save(self, path: Path) -> str:
        """Save the training; return the path for `restore`."""
        if self._session is None:
            return self._checkpoint().save(path)
        with self._scope():
            return self._saver.save(self._session, str(path))

    def restore(self, path: str) -> None:
        """Restore the training, before or after its first step."""
        # Slots of TF1 optimizers are made here, so it must be in the scope.
        with self._scope():
            if self._session is None:
                self._checkpoint().restore(path)
            else:
                self._saver.restore(self._session, path)

    def _checkpoint(self) -> tf.train.Checkpoint:
        parts = {"opt": self.ours}
        if self._host.has_scaler:
            parts |= {"inner": self.inner}
        if self._host == Host("v1"):
            # A checkpoint cannot hold a wrapper of a TF1 optimizer.
            parts = {"inner": self.inner, "manager": self.ours.manager, "detector": self.ours.spike_detector}
        return tf.train.Checkpoint(weights=list(map(_of_tensorflow, self.weights)), step=self.global_step, **parts)

    def _moving(self) -> list[list[tf.Tensor]]:
        """Return the values on each replica that only an applied step changes."""
        if self._host.name == "v1" or self._host.is_legacy:
            slots = [self.inner.get_slot(weight, "momentum") for weight in self.weights]
            of_opt = [*slots, self.inner.iterations if self._host.is_legacy else self.global_step]
        else:
            of_opt = self.inner.variables
        parts = map(self._strategy.experimental_local_results, map(_of_tensorflow, [*self.weights, *of_opt]))
        return [[part.read_value() for part in replica] for replica in zip(*parts, strict=True)]

    def _rest(self) -> list[tf.Tensor]:
        ours = self.ours
        return [ours.loss_scale, ours.applied_steps, ours.skipped_steps, ours.skipped_spikes]

    def _run(self, fed: tf.Tensor) -> None:
        self._strategy.run(self._on_replica, args=(fed,))

    def _on_replica(self, fed: tf.Tensor) -> Any:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group if self._rank is None else self._rank
        own, weights = tf.gather(fed, replica), list(map(_of_tensorflow, self.weights))

        def loss() -> tf.Tensor:
            rows = tf.gather(weights[1], _indices(replica))
            # The reversal keeps TensorFlow's graph optimizer from cancelling the scale.
            products = tf.reverse(weights[0], [0]) * tf.reverse(own[:_KERNEL], [0])
            return tf.reduce_sum(products) + tf.reduce_sum(rows[:, 0] * own[_KERNEL:])

        if self._host.has_scaler:
            return self._by_scaler(loss)
        if self._host.name == "v1":
            pairs = self.opt.compute_gradients(loss if self._session is None else loss(), self.weights)
            grads = self._clipped([grad for grad, _ in pairs])
            return self.opt.apply_gradients(zip(grads, self.weights, strict=True), self.global_step)
        unscales = self._clips or self._host.is_legacy
        with tf.GradientTape() as tape:
            scaled = self.opt.get_scaled_loss(loss()) if unscales else self.opt.scale_loss(loss())
        grads = tape.gradient(scaled, weights)
        if unscales:
            grads = self._clipped(self.opt.get_unscaled_gradients(grads))
        self.opt.apply_gradients(zip(grads, self.weights, strict=True))
        return None

    def _by_scaler(self, loss: Callable[[], tf.Tensor]) -> Any:
        scaler = self.opt
        with tf.GradientTape() as tape:
            scaled = scaler.scale(loss())
        grads = tape.gradient(scaled, self.weights)
        if self._accumulator is not None:
            self._accumulator.add(grads, scaler.loss_scale)
            return None
        if self._clips:
            grads = self._clipped(scaler.unscale(self.inner, grads))
        return self._stepped(grads)

    def _take_step(self) -> None:
        self._stepped(self.opt.unscale(self.inner, self._accumulator))

    def _stepped(self, grads: Any) -> Any:
        done = self.opt.step(self.inner, zip(grads, self.weights, strict=True))
        with tf.control_dependencies([] if done is None else [done]):
            return self.opt.update()

    def _clipped(self, grads: Any) -> Any:
        return tfmp.clip_by_global_norm(grads, 0.5)[0] if self._clips else grads


def trained(training: NormTraining, steps: Iterable[Step] = STEPS.values()) -> list[State]:
    """Take steps, and return the states after them."""
    return [training.train(step.fed) for step in steps]


def _state(norms: Any, moving: Any, rest: Sequence[Any]) -> State:
    scale, *counts = rest
    lists = [[value.tolist() for value in replica] for replica in moving]
    return State(list(map(float, norms)), lists, float(scale), list(map(int, counts)))


def _counter() -> tf.Variable:
    only_first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(0, dtype=tf.int64, trainable=False, aggregation=only_first)


def _of_tensorflow(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` inside a variable of Keras 3; a `tf.Variable` is returned as it is."""
    return variable if isinstance(variable, tf.Variable) else variable.value
