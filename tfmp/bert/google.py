"""The names of Google's BERT `optimization.py`, with its signatures.

`from tfmp.bert import google as optimization` in place of `import optimization`.
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

    Its schedule falls linearly from `init_lr` at step 0, so it drops where the warm-up ends; NVIDIA's does not, which
    is that of `tfmp.bert.create_optimizer`. All else is as there, in float32: a step that is not finite is skipped.

    Args:
        loss: The loss, a floating-point scalar.
        init_lr: The learning rate that the warm-up leads to, and that the decay starts from; a number of at least 0.
        num_train_steps: Steps in the training, after which the rate is 0.
        num_warmup_steps: Steps of the warm-up; 0 or None for none.
        use_tpu: Must be False.

    Returns:
        The op; it counts the global step, so no line of the script is to assign it.

    Raises:
        TypeError: A setting is of the wrong type.
        ValueError: A setting is out of range, or the graph trains its variables already.
        RuntimeError: It is called eagerly.
        NotImplementedError: `use_tpu` is true.

    Example:
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
