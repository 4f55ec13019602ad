"""The norm of the last step, as it is kept between steps."""

import numpy as np
import pytest
import tensorflow as tf

from tfmp.core.monitors.gradient_norm import GradientNorm


def test_norm_is_nan_until_one_is_stored() -> None:
    norm = GradientNorm()
    assert np.isnan(norm.read())
    # Float32 could not hold it.
    norm.store(tf.constant(1e300, tf.float64))
    assert float(norm.read()) == 1e300


def test_norm_is_in_no_checkpoint() -> None:
    norm = GradientNorm()
    norm.store(tf.constant(1.0, tf.float64))
    assert norm._trackable_children() == {}


@pytest.mark.graph
def test_norm_in_a_graph_needs_no_initializer() -> None:
    norm = GradientNorm()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        stored, read = norm.store(tf.constant(2.0, tf.float64)), norm.read()
        assert np.isnan(session.run(read))
        session.run(stored)
        assert session.run(read) == 2
        assert tf.compat.v1.global_variables() == []
