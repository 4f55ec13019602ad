"""Losses that a script scales, and gradients that it unscales."""

import libcst as cst
import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.training.manual_scaling import find_manual_scaling


@pytest.mark.parametrize(
    ("loss", "grads", "scale"),
    [
        ("loss * scale", "[g / scale for g in grads]", "scale"),
        ("tf.cast(loss * 128, tf.float32)", "[g / 128.0 for g in grads]", "128"),
        ("tf.multiply(loss, scale)", "[g * (1.0 / scale) for g in grads]", "scale"),
        ("loss * scale", "[g / 2 for g in grads]", None),
        ("loss * scale / scale", "[g / scale for g in grads]", None),
        ("loss", "grads", None),
    ],
)
def test_the_factor_of_the_loss_that_divides_the_gradients_is_found(loss: str, grads: str, scale: str | None) -> None:
    script = Script(f"import tensorflow as tf\ngrads = tf.gradients({loss}, w)\nunscaled = {grads}\n")
    call = next(call for call in script.nodes(cst.Call) if script.name_of(call.func) == "tensorflow.gradients")
    found = find_manual_scaling(script, call)
    assert (None if found is None else script.code(found[0])) == scale
