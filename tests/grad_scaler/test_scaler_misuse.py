import functools
import importlib.util
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kerases
import pytest
import tensorflow as tf

import tfmp


def _sgd() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(1.0)


class _Training:
    def __init__(self) -> None:
        self.scaler, self.optimizer, self.weight = tfmp.GradScaler(8), _sgd(), tf.Variable(0.0)
        self._scaled = tf.constant(8.0)

    def unscale(self) -> None:
        self.scaler.unscale(self.optimizer, [self._scaled])

    def step(self) -> None:
        self.scaler.step(self.optimizer, [(tf.constant(8.0), self.weight)])

    def update(self) -> None:
        self.scaler.update()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    ("verbs", "message"),
    [
        (
            "unscale unscale",
            r"unscale was called already for this optimizer .* Unscale each gradient once, then step, then update",
        ),
        ("step unscale", r"step was called already .*: unscale comes before step; call update\(\) once"),
        ("step step", r"step was called already .*: call update\(\) once after all optimizers have stepped"),
        ("unscale step step", r"step was called already"),
    ],
)
def test_calls_out_of_order_are_refused(verbs: str, message: str, compiled: bool) -> None:
    training = _Training()

    def iterate() -> None:
        for verb in verbs.split():
            getattr(training, verb)()

    with pytest.raises(RuntimeError, match=message):
        (tf.function(iterate) if compiled else iterate)()
    if not compiled:
        # The refused call changed nothing.
        assert float(training.weight) == {"unscale unscale": 0, "unscale step step": -8}.get(verbs, -1)


def test_tensor_instead_of_a_list_of_gradients_is_refused() -> None:
    with pytest.raises(TypeError, match=r"grads must be a list of gradients, one for each variable"):
        tfmp.GradScaler(8).unscale(_sgd(), tf.constant([8.0]))


def test_disabled_scaler_takes_calls_in_any_order() -> None:
    scaler, optimizer, weight = tfmp.GradScaler(enabled=False), _sgd(), tf.Variable(0.0)
    scaler.update()
    for _ in range(2):
        scaler.unscale(optimizer, [tf.constant(1.0)])
        scaler.step(optimizer, [(tf.constant(1.0), weight)])
    scaler.unscale(optimizer, [tf.constant(1.0)])
    scaler.update(-1)
    assert (float(weight), float(scaler.loss_scale)) == (-2, 1)


def test_optimizer_is_not_stepped_twice_by_one_call() -> None:
    training = _Training()
    pairs = [(tf.constant(8.0), training.weight)]
    with pytest.raises(ValueError, match="pass each optimizer once"):
        training.scaler.step_all([(training.optimizer, pairs), (training.optimizer, pairs)])
    assert float(training.weight) == 0


def test_optimizer_with_variables_that_first_steps_in_a_later_trace_must_be_prepared() -> None:
    def optimizer(momentum: bool) -> Any:
        return tf.compat.v1.train.MomentumOptimizer(1.0, 0.5) if momentum else _sgd()

    for has_momentum, is_prepared in [(False, False), (True, True), (True, False)]:
        first, second = tf.Variable(0.0, name="first"), tf.Variable(0.0, name="second")
        scaler, optimizers = tfmp.GradScaler(8), [_sgd(), optimizer(has_momentum)]

        @tf.function
        def train_step(with_second: bool, scaler: Any = scaler, optimizers: Any = optimizers) -> None:
            scaler.step(optimizers[0], [(tf.constant(8.0), first)])  # noqa: B023 - called here
            if with_second:
                scaler.step(optimizers[1], [(tf.constant(8.0), second)])  # noqa: B023 - called here
            scaler.update()

        if is_prepared:
            scaler.prepare(optimizers[1], [second])
        train_step(False)
        if has_momentum and not is_prepared:
            with pytest.raises(ValueError, match="Creating variables on a non-first call"):
                train_step(True)
            continue
        train_step(True)
        assert (float(first), float(second)) == (-2, -1)


@kerases.for_every_keras("keras2", "tf_keras")
def test_error_names_the_variables_that_a_later_trace_cannot_make(keras: ModuleType) -> None:
    weights = [tf.Variable(0.0, name="first"), tf.Variable(0.0, name="second")]
    scaler, optimizers = tfmp.GradScaler(8), [keras.optimizers.SGD(1.0, momentum=0.5) for _ in range(2)]

    @tf.function
    def train_step(with_second: bool) -> None:
        grads = [tf.constant(8.0)] * 2
        scaler.step(optimizers[with_second], zip(grads, weights, strict=True))
        scaler.update()

    train_step(False)
    message = r"ValueError: SGD has no variables yet for first:0, second:0, and a tf\.function makes none when"
    with pytest.raises(ValueError, match=message):
        train_step(True)


def test_errors_of_an_optimizer_are_passed_on() -> None:
    class Refusing:
        built = False

        def build(self, variables: Any) -> None:
            raise ValueError("no variables today")

        def apply_gradients(self, grads_and_vars: Any) -> None:
            raise NotImplementedError

    with pytest.raises(ValueError, match=r"^no variables today"):
        tfmp.GradScaler(8).step(Refusing(), [(tf.constant(8.0), tf.Variable(0.0))])


def test_abandon_forgets_the_calls_of_the_iteration() -> None:
    for verbs in ("", "unscale", "step", "unscale step"):
        training = _Training()
        for verb in verbs.split():
            getattr(training, verb)()
        training.scaler.abandon()
        assert (float(training.scaler.loss_scale), int(training.scaler.attempted_steps)) == (8, 0)
        with pytest.raises(RuntimeError, match="no optimizer has stepped since the last update: call step first"):
            training.update()
        before = float(training.weight)
        training.unscale()
        training.step()
        training.update()
        # The last step follows a new `unscale`, so its gradient of 8 is not divided by the scale.
        assert float(training.weight) == before - 8
        assert int(training.scaler.applied_steps) == 1


def test_failed_trace_of_a_function_leaves_no_calls_behind() -> None:
    training, fails = _Training(), [True]

    def iterate() -> None:
        training.unscale()
        if fails:
            raise ValueError("this batch has no labels")
        training.step()
        training.update()

    with pytest.raises(ValueError, match="no labels"):
        tf.function(iterate)()
    fails.clear()
    tf.function(iterate)()
    assert float(training.weight) == -8


def test_update_before_any_step_is_an_error() -> None:
    training = _Training()
    with pytest.raises(RuntimeError, match=r"^update was called, and no optimizer has stepped since the last"):
        training.update()
    with pytest.raises(tf.errors.InvalidArgumentError, match="call step first"):
        tf.function(training.update)()
    step = tf.function(training.step)
    for _ in range(2):
        step()
        training.update()
    assert int(training.scaler.applied_steps) == 2
    with pytest.raises(RuntimeError, match="call step first"):
        training.update()


def test_step_in_a_function_refuses_gradients_unscaled_outside_of_it() -> None:
    training = _Training()
    training.unscale()
    with pytest.raises(RuntimeError, match=r"outside of the tf.function that step is called in: call both in the same"):
        tf.function(training.step)()
    # The same with `unscale` in a function and `step` in eager code.
    training = _Training()
    tf.function(training.unscale)()
    with pytest.raises(RuntimeError, match="unscale was called for this optimizer"):
        training.step()


def test_step_in_a_conditional_knows_the_calls_around_it() -> None:
    training = _Training()

    @tf.function
    def unscaled_around(flag: tf.Tensor) -> None:
        (grad,) = training.scaler.unscale(training.optimizer, [tf.constant(8.0)])
        if flag:
            training.scaler.step(training.optimizer, [(grad, training.weight)])
        training.update()

    for flag in (True, False):
        unscaled_around(tf.constant(flag))
        assert (float(training.weight), int(training.scaler.applied_steps)) == (-1, 1)

    @tf.function
    def stepped_around(flag: tf.Tensor) -> None:
        training.step()
        if flag:
            training.step()

    with pytest.raises(RuntimeError, match="step was called already"):
        stepped_around(tf.constant(True))


def test_gradients_are_divided_once_in_whichever_branch_steps() -> None:
    training = _Training()

    @tf.function
    def iterate(clips: tf.Tensor) -> None:
        (grad,) = training.scaler.unscale(training.optimizer, [tf.constant(8.0)])
        if clips:
            training.scaler.step(training.optimizer, [(tf.clip_by_value(grad, -0.5, 0.5), training.weight)])
        else:
            training.scaler.step(training.optimizer, [(grad, training.weight)])
        training.update()

    for clips, expected in ((True, -0.5), (False, -1.5)):
        iterate(tf.constant(clips))
        assert float(training.weight) == expected

    @tf.function
    def unscaled_in_one(flag: tf.Tensor) -> None:
        if flag:
            training.scaler.unscale(training.optimizer, [tf.constant(8.0)])
            training.scaler.step(training.optimizer, [(tf.constant(0.5), training.weight)])
        else:
            training.scaler.step(training.optimizer, [(tf.constant(8.0), training.weight)])
        training.update()

    for flag, expected in ((True, -2.0), (False, -3.0)):
        unscaled_in_one(tf.constant(flag))
        assert float(training.weight) == expected


def test_unscale_around_a_conditional_and_again_in_it_is_refused() -> None:
    training = _Training()

    @tf.function
    def iterate(flag: tf.Tensor) -> None:
        training.unscale()
        if flag:
            training.unscale()
            training.step()
        training.update()

    with pytest.raises(RuntimeError, match="unscale was called already"):
        iterate(tf.constant(True))


def test_update_in_a_function_keeps_the_unscale_of_eager_code() -> None:
    training, other = _Training(), _sgd()

    @tf.function
    def iterate() -> None:
        training.scaler.step(other, [(tf.constant(8.0), training.weight)])
        training.update()

    training.scaler.unscale(training.optimizer, [tf.constant(8.0)])
    iterate()
    training.scaler.step(training.optimizer, [(tf.constant(1.0), training.weight)])
    # Both steps subtract 1: the gradient of the second step is not divided again.
    assert float(training.weight) == -2


def test_replicas_may_unscale_and_step_in_different_runs(two_replicas: tf.distribute.MirroredStrategy) -> None:
    with two_replicas.scope():
        training = _Training()
    two_replicas.run(training.unscale)
    two_replicas.run(training.step)
    training.update()
    # The sum of both replicas' gradients, which are not divided by the scale again.
    assert float(training.weight.numpy()) == -16
    two_replicas.run(training.step)
    with pytest.raises(RuntimeError, match="step was called already"):
        two_replicas.run(training.step)


class _Fused:
    def apply_scaled_gradients(self, grads_and_vars: Any, loss_scale: tf.Tensor, finite: tf.Tensor) -> None:
        for grad, variable in grads_and_vars:
            variable.assign_sub(tf.where(finite, grad / loss_scale, tf.zeros_like(grad)))


def test_arguments_that_an_optimizer_does_not_take_are_refused_before_any_steps() -> None:
    keras = next(iter(kerases.installed().values()))
    for optimizers, message in [
        ([_sgd(), keras.optimizers.SGD(1.0)], "global_step would be passed to each optimizer, and SGD is not TF1's"),
        ([_Fused()], "_Fused.apply_scaled_gradients takes no global_step"),
    ]:
        weight, global_step = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)
        steps = [(optimizer, [(tf.constant(8.0), weight)]) for optimizer in optimizers]
        with pytest.raises(TypeError, match=message):
            tfmp.GradScaler(8).step_all(steps, global_step=global_step)
        assert (float(weight), int(global_step)) == (0, 0)


def _keras_wrapper() -> Any:
    keras = next(iter(kerases.installed().values()))
    return keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD())


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (lambda: "sgd", TypeError, "must be an optimizer of Keras or TF1, with apply_gradients, got 'sgd' of type str"),
        (lambda: tfmp.LossScaleOptimizer(_sgd(), tfmp.FixedLossScaleManager(8)), ValueError, "the optimizer inside it"),
        (_keras_wrapper, ValueError, "is a .*, which scales the loss itself"),
        (
            lambda: tf.compat.v1.train.SyncReplicasOptimizer(_sgd(), 1),
            TypeError,
            r"write SyncReplicasOptimizer\(tfmp\.LossScaleOptimizer\(opt, manager\), \.\.\.\)",
        ),
    ],
)
def test_unsuitable_optimizer_is_refused(optimizer: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tfmp.GradScaler(8).step(optimizer(), [(tf.constant(8.0), tf.Variable(0.0))])


@pytest.mark.horovod
def test_horovods_optimizer_is_refused() -> None:
    hvd = importlib.import_module("horovod.tensorflow")
    with pytest.raises(ValueError, match="averages gradients itself: step with the optimizer inside it"):
        tfmp.GradScaler(8).step(hvd.DistributedOptimizer(_sgd()), [(tf.constant(8.0), tf.Variable(0.0))])


def test_calls_without_gradients_are_refused() -> None:
    training = _Training()
    with pytest.raises(ValueError, match="there are no gradients to step with"):
        training.scaler.step(training.optimizer, [])
    with pytest.raises(ValueError, match="every gradient is None: the loss depends on none of the variables"):
        training.scaler.step(training.optimizer, [(None, training.weight)])
    for grads in ([], [None]):
        with pytest.raises(ValueError, match="every gradient is None: the loss depends on none of the variables"):
            training.scaler.unscale(training.optimizer, grads)
    with pytest.raises(ValueError, match="there is no optimizer to step: pass pairs"):
        training.scaler.step_all([])
    # The refused calls were not recorded.
    training.unscale()
    for grads in ([], [None]):
        with pytest.raises(ValueError, match="every gradient is None: the loss depends on none of the variables"):
            training.scaler.unscale(training.optimizer, grads)
    training.step()


def test_step_with_a_part_of_an_accumulators_mean_is_refused() -> None:
    training = _Training()
    accumulator = tfmp.GradientAccumulator([training.weight, tf.Variable(0.0)], 1)
    accumulator.add([tf.constant(8.0), None], 8.0)
    first, _ = training.scaler.unscale(training.optimizer, accumulator)
    with pytest.raises(ValueError, match=r"unscale returned 2 gradients of the accumulator, and step got 1: pass all"):
        training.scaler.step(training.optimizer, [(first, training.weight)])


@pytest.mark.parametrize("make", [lambda: 1, lambda: tf.constant(1), lambda: [1.0, tf.constant([1])]])
def test_loss_without_a_floating_point_dtype_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="float"):
        tfmp.GradScaler(8).scale(make())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"init_scale": 0.5}, ValueError, r"init_scale \(init_loss_scale\) must be a float32 number of at least 1"),
        ({"init_scale": math.inf}, ValueError, r"init_scale \(init_loss_scale\) must be finite"),
        ({"growth_factor": 1}, ValueError, r"growth_factor \(incr_ratio\) must be greater than 1, got 1"),
        ({"backoff_factor": 1.5}, ValueError, r"backoff_factor \(decr_ratio\) must lie between 0 and 1, got 1.5"),
        ({"growth_interval": 0}, ValueError, r"growth_interval \(incr_every_n_steps\) must be a whole number from 1"),
        ({"growth_interval": "often"}, TypeError, r"growth_interval \(incr_every_n_steps\) must be a number"),
        ({"enabled": 1}, TypeError, "^enabled must be True or False, got 1 of type int"),
        ({"is_distributed": 1}, TypeError, "^is_distributed must be True or False, got 1 of type int"),
        ({"manager": [8]}, TypeError, "a loss scale is described by a tfmp.LossScaleManager, a number"),
        (
            {"init_scale": 8, "manager": tfmp.FixedLossScaleManager},
            ValueError,
            "manager decides the scale by settings of its own: leave out init_scale",
        ),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    manager = arguments.get("manager")
    if isinstance(manager, type):
        arguments = arguments | {"manager": manager(8)}
    with pytest.raises(error, match=message):
        tfmp.GradScaler(**arguments)


def test_complex_gradient_is_refused_by_the_name_of_its_variable() -> None:
    training, phase = _Training(), tf.Variable(1j, name="phase")
    with pytest.raises(TypeError, match=r"^the gradient of phase:0 is of type complex128, and loss scaling is"):
        training.scaler.step(training.optimizer, [(tf.constant(1j), phase)])


def test_prepare_refuses_anything_but_variables() -> None:
    training = _Training()
    with pytest.raises(TypeError, match=r"^variables must be a list of variables"):
        training.scaler.prepare(training.optimizer, 1)


@pytest.mark.parametrize("verb", ["unscale", "step", "prepare"])
def test_class_in_place_of_an_optimizer_is_refused(verb: str) -> None:
    training = _Training()
    second = {
        "unscale": [tf.constant(8.0)],
        "step": [(tf.constant(8.0), training.weight)],
        "prepare": [training.weight],
    }
    with pytest.raises(
        TypeError, match=r"^optimizer is the class GradientDescentOptimizer: pass an object of it, Grad"
    ):
        getattr(training.scaler, verb)(type(training.optimizer), second[verb])


def test_class_in_place_of_a_manager_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"is the class FixedLossScaleManager: pass an object of it, FixedLossScaleManag"
    ):
        tfmp.GradScaler(manager=tfmp.FixedLossScaleManager)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (
            ("cuda",),
            {},
            r"^tfmp.GradScaler takes no device, got 'cuda', .* leave it out, and write tfmp.GradScaler\(init",
        ),
        (("cuda",), {"init_scale": 8.0}, "takes no device, got 'cuda'"),
        (("cuda", 8.0), {}, "takes no device, got 'cuda'"),
        ((), {"device": "cuda", "enabled": True}, "takes no device, got 'cuda', which is an argument of torch"),
        ((8.0, 2.0, 0.5, 2000), {}, "takes init_scale alone without a name, got 4 arguments: write the others with"),
    ],
)
def test_arguments_of_torch_are_refused(arguments: tuple[Any, ...], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        tfmp.GradScaler(*arguments, **keywords)


def test_subclass_may_have_arguments_like_those_of_torch() -> None:
    class OfSubclass(tfmp.GradScaler):
        def __init__(self, device: str, *scales: float, init_scale: float = 1.0) -> None:
            super().__init__(max([init_scale, *scales]))
            self.device = device

    for scaler in (OfSubclass("cuda", 2.0, 8.0), OfSubclass(device="cuda", init_scale=8.0)):
        assert (scaler.device, float(scaler.loss_scale)) == ("cuda", 8)
    with pytest.raises(TypeError, match="takes no device, got 'cuda'"):
        type("Plain", (tfmp.GradScaler,), {})("cuda")


@pytest.mark.parametrize("front_end", ["GradScaler", "tf1", *kerases.installed()])
def test_loss_that_is_scaled_outside_of_the_tape_is_named_as_a_cause(front_end: str) -> None:
    weight, sgd = tf.Variable(1.0), _sgd()
    if front_end == "GradScaler":
        scaler = tfmp.GradScaler(8)
        scale, apply = scaler.scale, functools.partial(scaler.step, sgd)
    elif front_end == "tf1":
        opt = tfmp.LossScaleOptimizer(sgd, 8)
        scale, apply = lambda loss: loss * 8.0, opt.apply_gradients
    else:
        opt = tfmp.LossScaleOptimizer(kerases.installed()[front_end].optimizers.SGD(0.5), initial_scale=8.0)
        scale, apply = opt.scale_loss, opt.apply_gradients
    with tf.GradientTape() as tape:
        loss = weight * 2.0
    pairs = [(tape.gradient(scale(loss), weight), weight)]
    message = (
        r"every gradient is None: .*, or was scaled outside of the tape: compute it, and scale it, within `with tf"
    )
    with pytest.raises(ValueError, match=message):
        apply(pairs)


def test_settings_of_the_rule_can_be_read_and_not_set() -> None:
    scaler = tfmp.GradScaler(8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    read = [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]
    assert (float(scaler.get_scale()), *read, scaler.is_enabled()) == (8.0, 4.0, 0.25, 7, True)
    for name in ("set_growth_factor", "set_backoff_factor", "set_growth_interval"):
        with pytest.raises(
            AttributeError, match=r"of a tfmp.GradScaler cannot be set, .* make a new scaler, tfmp.Grad"
        ):
            getattr(scaler, name)(2)
    assert scaler.get_growth_factor() == 4


def test_setting_that_the_managers_rule_has_not_is_refused() -> None:
    scaler = tfmp.GradScaler(manager=tfmp.LogMaxLossScaleManager(incr_every_n_steps=5))
    assert scaler.get_growth_interval() == 5
    with pytest.raises(AttributeError, match=r"^a LogMaxLossScaleManager has no growth_factor: ask the loss-scale man"):
        scaler.get_growth_factor()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@kerases.for_every_keras()
def test_variable_that_the_optimizer_was_not_built_with_is_refused_as_keras_does(
    keras: ModuleType, compiled: bool
) -> None:
    known, unknown = (tf.Variable([1.0], name=each) for each in ("known", "unknown"))
    scaler, optimizer = tfmp.GradScaler(8), keras.optimizers.Adam(0.5)
    optimizer.build([known])

    def step() -> None:
        scaler.step(optimizer, [(scaler.scale(tf.constant([1.0])), each) for each in (known, unknown)])
        scaler.update()

    with pytest.raises((KeyError, ValueError), match=r"unknown:0.*\. (This optimizer can only be|This usually means)"):
        (tf.function(step) if compiled else step)()
    assert [float(each[0]) for each in (known, unknown)] == [1, 1]
