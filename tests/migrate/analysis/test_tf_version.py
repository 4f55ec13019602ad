"""The TensorFlow version that a script was written for."""

import pytest

from tfmp.migrate.analysis.script import Script
from tfmp.migrate.analysis.tf_version import TfVersion, detect_version

_V1 = "import tensorflow as tf\n"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (_V1 + "tf.placeholder(tf.float32)\n", TfVersion.V1),
        (_V1 + "tf.compat.v1.placeholder(tf.float32)\n", TfVersion.COMPAT_V1),
        (_V1 + "tf.GradientTape()\n", TfVersion.V2),
        (_V1 + "tf.GradientTape()\ntf.placeholder(tf.float32)\n", TfVersion.MIXED),
        (_V1 + "tf.nn.dropout(x, 0.5)\n", TfVersion.AMBIGUOUS),
        (_V1 + "tf.math.exp(x)\n", TfVersion.NEUTRAL),
        (_V1 + "tf.reduce_sum(x, keep_dims=True)\n", TfVersion.V1),
    ],
)
def test_the_names_of_a_script_show_its_version(text: str, version: TfVersion) -> None:
    assert detect_version(Script(text)).version is version


@pytest.mark.parametrize(("told", "version"), [(1, TfVersion.V1), (2, TfVersion.NEUTRAL), (None, TfVersion.AMBIGUOUS)])
def test_scripts_around_it_decide_for_a_script_without_evidence(told: int | None, version: TfVersion) -> None:
    assert detect_version(Script(_V1 + "tf.nn.dropout(x, 0.5)\n", told)).version is version
