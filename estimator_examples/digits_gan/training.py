"""The training of a critic and a generator, with one GradScaler for both optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfmp
from estimator_examples.digits_gan import networks

PENALTY_WEIGHT = 10.0
# The betas of Adam, from the paper.
BETA_1, BETA_2 = 0.0, 0.9


class Batch(NamedTuple):
    """The random inputs of one iteration, all in float32.

    Attributes:
        images: Real digits, [n, 64].
        noise: The generator's noise in the critic's step, [n, 32].
        generator_noise: The generator's noise in the generator's step, [n, 32].
        mix: The share of the real digit in the mixed image at which the penalty is computed, [n, 1].
    """

    images: np.ndarray
    noise: np.ndarray
    generator_noise: np.ndarray
    mix: np.ndarray


class Record(NamedTuple):
    """The figures of one iteration.

    Attributes:
        estimate: The critic's estimate of the Wasserstein distance: its mean output for real digits, less its mean
            output for generated digits.
        penalty: The mean of (slope - 1)^2, not multiplied by the penalty's weight.
        loss_scale: The loss scale after the iteration.
        critic_steps: The number of steps that the critic's optimizer has applied so far.
        generator_steps: The number of steps that the generator's optimizer has applied so far.
        with_generator: Whether the generator was trained in this iteration.
    """

    estimate: tf.Tensor
    penalty: tf.Tensor
    loss_scale: tf.Tensor
    critic_steps: tf.Tensor
    generator_steps: tf.Tensor
    with_generator: bool


class Gan:
    """A Wasserstein GAN with gradient penalty.

        critic:     minimize  mean critic(fake) - mean critic(real) + 10 * mean (|d critic(mixed) / d mixed| - 1)^2
        generator:  minimize  -mean critic(generator(noise))

    Source: Gulrajani et al., Improved Training of Wasserstein GANs, 2017.

    Args:
        dtype: The Keras policy of the hidden layers, `float32` or `mixed_float16`.
        scaler: The scaler of all losses. A disabled scaler passes them through.
        learning_rate: The learning rate of both optimizers.
    """

    def __init__(self, dtype: str, scaler: tfmp.GradScaler, learning_rate: float) -> None:
        self.scaler = scaler
        self.critic = networks.critic(dtype)
        self.generator = networks.generator(dtype)
        self.critic_optimizer = keras.optimizers.Adam(learning_rate, BETA_1, BETA_2)
        self.generator_optimizer = keras.optimizers.Adam(learning_rate, BETA_1, BETA_2)
        # A `tf.function` may create variables in its first trace only, and the generator may not be part of that trace.
        # So the variables of both optimizers are created here.
        scaler.prepare(self.critic_optimizer, self.critic.trainable_variables)
        scaler.prepare(self.generator_optimizer, self.generator.trainable_variables)

    @tf.function
    def step(self, batch: Batch, with_generator: bool) -> Record:
        """Train the critic on a batch, and the generator too if `with_generator`; then update the loss scale once.

        Each optimizer applies or skips its own step: an overflow in one step does not skip the other.
        """
        estimate, penalty = self._step_critic(batch)
        if with_generator:
            self._step_generator(batch.generator_noise)
        self.scaler.update()
        return Record(
            estimate,
            penalty,
            self.scaler.loss_scale,
            tf.convert_to_tensor(self.critic_optimizer.iterations),
            tf.convert_to_tensor(self.generator_optimizer.iterations),
            with_generator,
        )

    def slopes(self, images: tf.Tensor) -> tf.Tensor:
        """Return the gradient of the critic's output for each image with respect to that image, float32 [n, 64].

        The gradient is computed from the scaled output, so that float16 layers do not lose it in the backward pass, and
        is unscaled by hand in float32. An outer tape records all these operations.
        """
        with tf.GradientTape() as inner:
            inner.watch(images)
            scaled = self.scaler.scale(tf.reduce_sum(self.critic(images)))
        return inner.gradient(scaled, images) / self.scaler.loss_scale

    def penalty(self, images: tf.Tensor) -> tf.Tensor:
        """Return the mean of (slope - 1)^2, where an image's slope is the norm of the critic's gradient at it."""
        # The added constant gives the root a derivative where the critic is flat: it has none at 0.
        slopes = tf.sqrt(tf.reduce_sum(tf.square(self.slopes(images)), axis=1) + 1e-12)
        return tf.reduce_mean(tf.square(slopes - 1))

    def _step_critic(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        fake = self.generator(batch.noise)
        mixed = batch.mix * batch.images + (1 - batch.mix) * fake
        with tf.GradientTape() as tape:
            estimate = tf.reduce_mean(self.critic(batch.images)) - tf.reduce_mean(self.critic(fake))
            penalty = self.penalty(mixed)
            scaled = self.scaler.scale(PENALTY_WEIGHT * penalty - estimate)
        self._apply(self.critic_optimizer, tape, scaled, self.critic.trainable_variables)
        return estimate, penalty

    def _step_generator(self, noise: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            scaled = self.scaler.scale(-tf.reduce_mean(self.critic(self.generator(noise))))
        self._apply(self.generator_optimizer, tape, scaled, self.generator.trainable_variables)

    def _apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        tape: tf.GradientTape,
        scaled_loss: tf.Tensor,
        variables: list[tf.Variable],
    ) -> None:
        grads = tape.gradient(scaled_loss, variables)
        self.scaler.step(optimizer, zip(grads, variables, strict=True))


@dataclasses.dataclass(frozen=True)
class Draws:
    """Draws the random inputs of a training; the same seed gives the same inputs."""

    images: np.ndarray
    batch_size: int
    seed: int

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without end."""
        rng = np.random.default_rng(self.seed)
        while True:
            yield Batch(
                self.images[rng.integers(len(self.images), size=self.batch_size)],
                noise(rng, self.batch_size),
                noise(rng, self.batch_size),
                rng.random([self.batch_size, 1], np.float32),
            )


def noise(rng: np.random.Generator, size: int) -> np.ndarray:
    """Draw the generator's input, float32 [size, 32]."""
    return rng.standard_normal([size, networks.NOISE], np.float32)


def train(gan: Gan, draws: Draws, iterations: int, generator_every: int) -> Iterator[Record]:
    """Train, and yield the record of each iteration, as Python numbers."""
    for iteration, batch in zip(range(iterations), draws, strict=False):
        record = gan.step(Batch(*map(tf.constant, batch)), with_generator=iteration % generator_every == 0)
        yield Record(*(value.numpy().item() for value in record))
