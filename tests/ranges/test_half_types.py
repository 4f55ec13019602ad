"""The ranges of the half-precision types are those that TensorFlow and NumPy know."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tfmp.ranges.half_types import BFLOAT16, FLOAT16, HalfType, half_type


@pytest.mark.parametrize("half", [FLOAT16, BFLOAT16], ids=lambda half: half.name)
def test_bounds_are_those_of_the_type(half: HalfType) -> None:
    dtype = tf.as_dtype(half.name)
    kind = dtype.as_numpy_dtype
    assert half_type(half.name) is half
    assert half.largest == float(dtype.max)
    assert half.highest == np.frexp(half.largest)[1] - 1
    # All bits of the mantissa are kept at the lowest normal number, and one less below it.
    next_one = float((np.ones([1], kind).view(np.uint16) + np.uint16(1)).view(kind)[0])
    for exponent, kept in ((half.lowest_normal, True), (half.lowest_normal - 1, False)):
        value = np.ldexp(next_one, exponent)
        assert bool(float(kind(value)) == value) is kept
    assert float(kind(2.0**half.lowest)) == 2.0**half.lowest
    assert float(kind(2.0 ** (half.lowest - 1))) == 0


@pytest.mark.parametrize("bad", ["float32", "half", "", tf.float16])
def test_other_types_have_no_range(bad: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f'dtype must be "float16" or "bfloat16", got {bad!r}.')):
        half_type(bad)
