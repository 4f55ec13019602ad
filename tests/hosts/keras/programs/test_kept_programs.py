"""Compiled programs: one for each trace of a function, and those that eager mode keeps."""

import copy
import gc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf

from tfmp.hosts.keras.programs.fingerprint import Fingerprint
from tfmp.hosts.keras.programs.kept_programs import KeptPrograms, run_compiled
from tfmp.types import Gradient, Gradients

pytestmark = pytest.mark.essential


def _sums_into(total: tf.Variable, traced: list[int]) -> Callable[[Gradient], None]:
    """Return a function that adds half of a gradient's sum to `total`; each trace of it appends to `traced`."""

    def update(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        traced.append(1)
        (grad,), (factor,) = grads, tensors
        total.assign_add(factor * tf.reduce_sum(tf.convert_to_tensor(grad)))

    return lambda grad: run_compiled(update, [grad], [0.5])


def test_sparse_gradients_of_unknown_size_are_summed_correctly() -> None:
    total, traced = tf.Variable(0.0), []
    run = _sums_into(total, traced)

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int32)])
    def step(values: tf.Tensor, indices: tf.Tensor) -> None:
        run(tf.IndexedSlices(values, indices, tf.constant([4, 2])))

    for count in (5, 6, 7, 2, 0):
        step(np.ones([count, 2], np.float32), np.full([count], 1, np.int32))
    assert float(total) == 20
    assert len(traced) == 1


def test_each_trace_of_a_function_compiles_its_own_program() -> None:
    total, traced = tf.Variable(0.0), []
    run = _sums_into(total, traced)
    step = tf.function(run)
    for length in (2, 2, 4):
        step(tf.ones([length]))
    assert float(total) == 4
    assert len(traced) == 2


def test_a_key_with_an_object_that_is_gone_is_not_valid() -> None:
    programs, total, setting = KeptPrograms(), tf.Variable(0.0), tf.Variable(1.0)

    def run(fingerprint: Fingerprint) -> None:
        programs.run(lambda grads, _: total.assign_add(grads[0]), lambda: fingerprint, [tf.constant(1.0)], [])

    run(Fingerprint([setting]))
    stale = Fingerprint([])
    (stale.key,) = programs._kept
    run(stale)
    assert len(programs) == 1
    del setting
    gc.collect()
    run(stale)
    assert len(programs) == 0
    assert float(total) == 3


def test_settings_that_an_update_changes_itself_are_never_compiled() -> None:
    programs, total, counter = KeptPrograms(), tf.Variable(0.0), [0]

    def update(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
        del tensors
        counter[0] += 1
        total.assign_add(counter[0] * grads[0])

    for _ in range(4):
        programs.run(update, lambda: Fingerprint([counter]), [tf.constant(1.0)], [])
    assert len(programs) == 0
    assert float(total) == 1 + 2 + 3 + 4


def test_settings_that_hold_an_object_that_may_change_unseen_are_never_compiled() -> None:
    programs, total = KeptPrograms(), tf.Variable(0.0)
    settings = Fingerprint([object()])
    for _ in range(3):
        programs.run(lambda grads, _: total.assign_add(grads[0]), lambda: settings, [tf.constant(1.0)], [])
    assert len(programs) == 0
    assert float(total) == 3


def test_the_programs_used_last_are_kept() -> None:
    programs, total = KeptPrograms(), tf.Variable(0.0)
    traced: list[int] = []

    def run(number: int) -> None:
        def update(grads: Gradients, tensors: Sequence[tf.Tensor]) -> None:
            traced.append(number)
            total.assign_add(number * grads[0])

        programs.run(update, lambda: Fingerprint([number]), [tf.constant(1.0)], [])

    for step in range(3000):
        run(step // 100)
        run(0)
    assert len(programs) == 16
    # Each was traced once; those of the first settings that came too early were also run without being compiled.
    assert len(set(traced)) == 30
    assert float(total) == 100 * sum(range(30))


def test_copies_are_empty() -> None:
    programs = KeptPrograms()
    for _ in range(2):
        programs.run(lambda *_: None, lambda: Fingerprint([]), [tf.constant(1.0)], [])
    assert len(programs) == 1
    assert len(copy.deepcopy(programs)) == 0
