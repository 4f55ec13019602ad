"""Measures of the generated digits, and of the share of the penalty's gradient that float16 loses."""

import numpy as np
import tensorflow as tf

import tfmp
from estimator_examples.digits_gan import training


def nearest_distance(images: np.ndarray, others: np.ndarray) -> float:
    """Return the mean Euclidean distance from an image to the nearest of the other images.

    Args:
        images: The images whose distances are averaged, [n, pixels].
        others: The images among which the nearest is searched, [m, pixels].

    Examples:
        >>> nearest_distance(np.array([[0.0, 1.0], [5.0, 0.0]]), np.array([[0.0, 0.0], [2.0, 0.0]]))
        2.0
    """
    distances = np.linalg.norm(images[:, np.newaxis] - others, axis=-1)
    return float(np.mean(np.min(distances, axis=1)))


def frechet_distance(images: np.ndarray, others: np.ndarray) -> float:
    """Return the squared distance between two normal distributions with the means and covariances of the images.

        |mean_1 - mean_2|^2 + trace(cov_1 + cov_2 - 2 (cov_1 cov_2)^(1/2))

    It is computed from raw pixels, not from the features of a net. Unlike `nearest_distance` it is large if all digits
    are alike.

    Args:
        images: One set of images, [n, pixels].
        others: The other set of images, [m, pixels].

    Returns:
        The distance; NaN if an image is not finite.

    Examples:
        >>> images = np.array([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 2.0]])
        >>> round(frechet_distance(images, images + 3), 6)
        18.0

    Source: Heusel et al., GANs Trained by a Two Time-Scale Update Rule, 2017.
    """
    if not (np.isfinite(images).all() and np.isfinite(others).all()):
        return float("nan")
    covariance, other_covariance = (np.cov(each, rowvar=False, dtype=np.float64) for each in (images, others))
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    # This symmetric matrix has the same eigenvalues as the product of the two covariances.
    product_values = np.linalg.eigvalsh(root @ other_covariance @ root)
    shift = np.sum(np.square(np.mean(images, axis=0) - np.mean(others, axis=0)))
    spread = np.trace(covariance) + np.trace(other_covariance) - 2 * np.sum(np.sqrt(np.maximum(product_values, 0)))
    return float(shift + spread)


def lost_share(gan: training.Gan, images: np.ndarray) -> float:
    """Return the share of the penalty's gradient that is lost to the precision of the critic.

    Among the entries of the gradients with respect to the kernels that are not zero in float32, this is the share of
    those that are zero in the critic's precision, at the same weights.
    """
    twin = training.Gan("float32", tfmp.GradScaler(enabled=False), learning_rate=1.0)
    twin.critic.set_weights(gan.critic.get_weights())
    own, exact = (penalty_gradients(each, images) for each in (gan, twin))
    zeros = sum(np.sum((grad == 0) & (true != 0)) for grad, true in zip(own, exact, strict=True))
    return float(zeros / sum(np.count_nonzero(true) for true in exact))


def penalty_gradients(gan: training.Gan, images: np.ndarray) -> list[np.ndarray]:
    """Return the unscaled gradients of the penalty with respect to the critic's kernels.

    These are second-order gradients, because the penalty depends on the critic's slopes.
    """
    # Biases are left out: the penalty does not depend on the last one, and depends on the others only through the kinks
    # of the activation.
    kernels = [weight for weight in gan.critic.trainable_variables if len(weight.shape) == 2]
    with tf.GradientTape() as tape:
        scaled = gan.scaler.scale(gan.penalty(tf.constant(images)))
    return [(grad / gan.scaler.loss_scale).numpy() for grad in tape.gradient(scaled, kernels)]
