"""The learning rate of BERT's pre-training."""

import tensorflow as tf

from tfmp.core import settings


def warm_up_then_decay(
    global_step: tf.Tensor | tf.Variable,
    init_lr: float,
    num_train_steps: int,
    num_warmup_steps: int | None = 0,
    *,
    power: float = 1.0,
    start_rate: float | None = None,
) -> tf.Tensor:
    """Rise linearly to the peak in `num_warmup_steps`, then fall to 0.

    The rule, with steps counted from 0, so that after a warm-up the first step of all has the rate 0:

        step < num_warmup_steps    init_lr * step / num_warmup_steps
        else                       start_rate * (1 - min(step, num_train_steps) / num_train_steps) ** power

    The decay counts the steps of the warm-up too. So the published scripts differ in where it starts: NVIDIA's raise
    `start_rate` for Adam, so that there is no jump where the warm-up ends; Google's do not, and NVIDIA's do not for
    LAMB. A warm-up as long as the training or longer leaves nothing to decay; NVIDIA's script divides by 0 there.

    Args:
        global_step: Steps applied so far, an integer scalar.
        init_lr: The rate that the warm-up leads to; at least 0.
        num_train_steps: When the rate is 0.
        num_warmup_steps: When the warm-up ends; 0 or None for no warm-up.
        power: 1 for a linear decay, as with Adam; 0.5 with LAMB.
        start_rate: The rate that the decay starts from at step 0, at least 0; by default the one with which it meets
            the end of a linear warm-up, `init_lr / (1 - num_warmup_steps / num_train_steps) ** power`.

    Returns:
        The rate, a float32 scalar.

    Raises:
        TypeError: A setting is no number.
        ValueError: A setting is out of range.

    Example:
        >>> [float(warm_up_then_decay(tf.constant(step), 0.5, 8, 4)) for step in (0, 2, 4, 6, 8)]
        [0.0, 0.25, 0.5, 0.25, 0.0]
        >>> [float(warm_up_then_decay(tf.constant(step), 0.5, 8, 4, start_rate=0.5)) for step in (2, 4, 6)]
        [0.25, 0.25, 0.125]

    Source: google-research/bert; NVIDIA's DeepLearningExamples for the start that meets the warm-up.
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
    # Not an identity: a reference variable's read would share its memory.
    step = tf.cast(tf.convert_to_tensor(global_step), tf.float32)
    rate = start * tf.pow(1 - tf.minimum(step / total, 1.0), power)
    return tf.where(step < warmup, peak * step / warmup, rate) if warmup else rate
