"""Libraries whose training steps never scale the loss: the warning names the user's line and the library's method."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import kerases
import numpy as np
import pytest
import tensorflow as tf

import tfmp

_LIBRARY = """
import functools
import tensorflow as tf


def not_documented(method):
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)
    return wrapper


def make_model(keras):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(1)

        def call(self, inputs):
            return self.head(inputs)

        @not_documented
        def train_step(self, data):
            features, targets = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(features, training=True) - targets) ** 2)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
            return {"loss": loss}

    return Model


def step(scaler, optimizer, weight):
    with tf.GradientTape() as tape:
        loss = weight * 2.0
    scaler.step(optimizer, [(tape.gradient(loss, weight), weight)])


def train_op(optimizer, weight):
    return optimizer.apply_gradients([(tf.gradients(weight * 2.0, [weight])[0], weight)])
"""


def _assert_named(caplog: pytest.LogCaptureFixture, caller: Any, method: str, line: str) -> None:
    """Assert that the one warning names the first line of a function here, and a method of the library by a line."""
    number = next(number for number, each in enumerate(_LIBRARY.splitlines(), 1) if line in each)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "tfmp"]
    script = f"test_library_train_steps.py:{caller.__code__.co_firstlineno + 1}"
    assert message.startswith(f"{script}, in model_zoo.modeling.{method} (modeling.py:{number}): ")


@pytest.fixture
def library(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    package = tmp_path / getattr(request, "param", "site-packages") / "model_zoo"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "modeling.py").write_text(_LIBRARY, "utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    yield importlib.import_module("model_zoo.modeling")
    for name in ("model_zoo.modeling", "model_zoo"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("is_subclass", "library"), [(False, "dist-packages"), (True, "site-packages")], indirect=["library"]
)
@pytest.mark.parametrize("host", kerases.installed())
def test_fit_with_a_train_step_of_a_library_names_both(
    host: str, library: Any, is_subclass: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keras = kerases.installed()[host]
    model_class = library.make_model(keras)
    model = type("Own", (model_class,), {})() if is_subclass else model_class()
    model.compile(tfmp.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    ones = np.ones([2, 1], np.float32)

    def fit() -> None:
        model.fit(ones, ones, verbose=0)

    fit()
    _assert_named(caplog, fit, "Model.train_step", "apply_gradients(zip")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_function_of_a_library_that_steps_a_scaler_is_named(
    compiled: bool, library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, weight = tf.compat.v1.train.GradientDescentOptimizer(0.5), tf.Variable(1.0)
    scaler = tfmp.GradScaler(8)

    def step() -> None:
        library.step(scaler, optimizer, weight)

    (tf.function(step, autograph=False) if compiled else step)()
    _assert_named(caplog, step, "step", "scaler.step")


@pytest.mark.graph
def test_train_op_that_a_library_builds_is_named(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    with tf.Graph().as_default():
        weight = tf.compat.v1.get_variable("w", initializer=1.0)
        opt = tfmp.LossScaleOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5), 8)

        def build() -> None:
            library.train_op(opt, weight)

        build()
    _assert_named(caplog, build, "train_op", "optimizer.apply_gradients([(tf")
