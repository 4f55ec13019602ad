"""The learning-rate schedule of BERT."""

import tensorflow as tf

from tfmp.core import settings


def warm_up_then_decay(
    global_step: tf.Tensor | tf.Variable,
    init_lr: float,
    *,
    num_train_steps: int,
    num_warmup_steps: int | None = 0,
    power: float = 1.0,
    start_rate: float | None = None,
) -> tf.Tensor:
    """Return a learning rate that rises linearly during a warm-up and then decays to 0.

    The steps are counted from 0, so with a warm-up the rate of the very first step is 0:

        step < num_warmup_steps    init_lr * step / num_warmup_steps
        else                       start_rate * (1 - min(step, num_train_steps) / num_train_steps) ** power

    The decay is counted from step 0, not from the end of the warm-up. The published scripts differ in `start_rate`.
    NVIDIA's scripts raise it for Adam, so that the rate does not jump at the end of the warm-up. Google's scripts, and
    NVIDIA's for LAMB, do not raise it. If the warm-up is as long as the training or longer, there is no decay; NVIDIA's
    script divides by 0 in this case.

    Args:
        global_step: The number of steps applied so far, an integer scalar.
        init_lr: The rate that the warm-up rises to; at least 0.
        num_train_steps: The step at which the rate reaches 0.
        num_warmup_steps: The step at which the warm-up ends; 0 or None for no warm-up.
        power: The power of the decay: 1 (linear) is used with Adam, 0.5 with LAMB.
        start_rate: The rate from which the decay starts at step 0; at least 0. By default the decay meets the end of
            the warm-up: `init_lr / (1 - num_warmup_steps / num_train_steps) ** power`.

    Returns:
        The learning rate, a float32 scalar.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Examples:
        >>> settings = {"num_train_steps": 8, "num_warmup_steps": 4}
        >>> [float(warm_up_then_decay(tf.constant(step), 0.5, **settings)) for step in (0, 2, 4, 6, 8)]
        [0.0, 0.25, 0.5, 0.25, 0.0]
        >>> [float(warm_up_then_decay(tf.constant(step), 0.5, start_rate=0.5, **settings)) for step in (2, 4, 6)]
        [0.25, 0.25, 0.125]

    Source: google-research/bert; NVIDIA's DeepLearningExamples for the default `start_rate`.
    """
    peak = settings.at_least_0("init_lr", init_lr)
    total = settings.count("num_train_steps", num_train_steps)
    warmup = settings.count("num_warmup_steps", num_warmup_steps or 0, least=0)
    power = settings.positive("power", power)
    left = 1 - warmup / total
    if start_rate is not None:
        start = settings.at_least_0("start_rate", start_rate)
    else:
        start = peak / left**power if left > 0 else peak
    # A cast, which makes a copy: a plain read of a reference variable would share the variable's memory.
    step = tf.cast(tf.convert_to_tensor(global_step), tf.float32)
    rate = start * tf.pow(1 - tf.minimum(step / total, 1.0), power)
    return tf.where(step < warmup, peak * step / warmup, rate) if warmup else rate
