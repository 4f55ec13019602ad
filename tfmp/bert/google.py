"""A replacement for the `optimization.py` of Google's BERT, with its signatures.

In the script, write `from tfmp.bert import google as optimization` in place of `import optimization`.
"""

import tensorflow as tf

from tfmp.bert.optimizers import AdamWeightDecayOptimizer
from tfmp.bert.training import build_training
from tfmp.core import settings

tf1 = tf.compat.v1

__all__ = ["AdamWeightDecayOptimizer", "create_optimizer"]


def create_optimizer(
    loss: tf.Tensor, init_lr: float, num_train_steps: int, num_warmup_steps: int | None, use_tpu: bool = False
) -> tf.Operation:
    """Build the op that trains all trainable variables of the graph, with the signature of Google's BERT.

    The learning rate decays linearly from `init_lr`, counted from step 0. At the end of the warm-up the rate therefore
    drops from `init_lr` to a lower value. NVIDIA's schedule, which `tfmp.bert.create_optimizer` uses, has no such drop.
    In all other respects the op is that of `tfmp.bert.create_optimizer` in float32. A step whose gradients are not
    finite is skipped.

    Args:
        loss: The unscaled loss, a floating-point scalar tensor.
        init_lr: The learning rate that the warm-up rises to, and that the decay starts from; at least 0.
        num_train_steps: The number of steps of the whole training, after which the rate is 0.
        num_warmup_steps: The number of steps of the warm-up; 0 or None for no warm-up.
        use_tpu: Must be False, because tfmp does not support TPUs.

    Returns:
        The op that trains. It increments the global step, so the script must not do that.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range, or the graph already holds an op that trains its variables.
        RuntimeError: TensorFlow executes eagerly.
        NotImplementedError: `use_tpu` is True.

    Examples:
        >>> with tf.Graph().as_default(), tf1.Session() as session:
        ...     w = tf1.get_variable("w", initializer=[1.0, 2.0])
        ...     train_op = create_optimizer(tf.reduce_sum(w), 0.5, 8, 0, use_tpu=False)
        ...     session.run(tf1.global_variables_initializer())
        ...     for _ in range(2):
        ...         _, rate = session.run([train_op, "learning_rate:0"])
        ...         float(rate)
        0.5
        0.4375

    Source: google-research/bert.
    """
    if settings.flag("use_tpu", use_tpu):
        raise NotImplementedError(
            "use_tpu=True: tfmp trains on CPUs and GPUs. Pass use_tpu=False, and for several devices use Horovod, "
            "tfmp.bert.create_optimizer(..., hvd=hvd), or a tf.distribute strategy."
        )
    return build_training(loss, init_lr, num_train_steps, num_warmup_steps, start_rate=init_lr).train_op
