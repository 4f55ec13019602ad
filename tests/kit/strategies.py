"""Hypothesis strategies: settings of managers, windows and spike detectors, and what steps are fed."""

import math

import numpy as np
from hypothesis import strategies as st

from kit.oracle import Rule, Spikes, Window

_FINITE = [-1.0, -0.25, 0.0, 0.5, 2.0]

#: Values of a gradient: mostly small ones on which float32 computes exactly; 2**100 overflows at high scales only.
VALUES = st.sampled_from([*_FINITE, *_FINITE, 2.0**100, math.inf, -math.inf, math.nan])

#: What a step of `TWO_VARIABLES` is fed.
FEDS = st.builds(
    lambda first, second: {"first": np.float32([0.5, first]), "second": np.float32([second])}, VALUES, VALUES
)

#: Settings of an exponential manager. Scales are powers of two, with which scaling is exact.
RULES = st.builds(
    Rule,
    st.integers(-10, 40).map(lambda exponent: 2.0**exponent),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([2.0, 4.0]),
    st.sampled_from([0.5, 0.25]),
    st.sampled_from([2.0**-10, 2.0**-12]),
    st.sampled_from([None, 2.0**40, 2.0**41]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.25, 0.5]),
)

#: Settings of accumulation. None is for none.
WINDOWS = st.none() | st.builds(
    Window, st.integers(2, 4), st.sampled_from(["window", "micro_batch"]), st.none() | st.integers(2, 7)
)

#: Settings of a spike detector. None is for none.
SPIKES = st.none() | st.builds(
    Spikes,
    st.none() | st.integers(2, 4),
    min_factor=st.just(1.25),
    max_norm=st.sampled_from([1.5, 2.25]),
    max_consecutive_skips=st.integers(1, 3),
)
