"""Tests of the GAN with gradient penalty on digits."""

import contextlib
import io
import pathlib
import re
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import tfmp
from estimator_examples import digits_session
from estimator_examples.digits_gan import __main__ as program
from estimator_examples.digits_gan import networks, options, quality, report, training

ITERATIONS, EVERY = 60, 2
IMAGES = np.random.default_rng(0).random([16, networks.PIXELS], np.float32)


class _Run(NamedTuple):
    """The result of a run of the program, which has trained in both precisions."""

    float32: report.Outcome
    float16: report.Outcome
    printed: str
    directory: pathlib.Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> _Run:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    directory = tmp_path_factory.mktemp("run") / "made" / "for_it"
    sizes = [f"--iterations={ITERATIONS}", f"--generator-every={EVERY}", "--batch-size=32", "--learning-rate=0.003"]
    asked = ["--init-scale=2**12", "--precision", "float32", "float16", f"--output-dir={directory}"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        outcomes = program.run(options.parse_options([*sizes, *asked]))
    return _Run(*outcomes, printed.getvalue(), directory)


def _gan(dtype: str, scaler: tfmp.GradScaler, flatter: float = 1.0) -> training.Gan:
    """Make a GAN whose critic is the same every time, except that its kernels are multiplied by a factor."""
    gan = training.Gan(dtype, scaler, learning_rate=0.1)
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=weight.shape, scale=weight.shape[0] ** -0.5) for weight in gan.critic.weights]
    gan.critic.set_weights([weight * (flatter if weight.ndim == 2 else 0.1) for weight in weights])
    return gan


def _float32(flatter: float = 1.0) -> training.Gan:
    return _gan("float32", tfmp.GradScaler(enabled=False), flatter)


def _error(values: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(values - exact) / np.linalg.norm(exact))


def test_a_run_ends_with_a_summary_and_pictures(run: _Run) -> None:
    assert f"float16 {ITERATIONS}: Wasserstein estimate " in run.printed
    lines, *pictures = run.printed.split("\nSummary\n")[1].split("  picture: ")
    summary = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines.splitlines()[1:])
    assert summary["loss scale"].split() == ["1", "2^12"]
    assert summary["critic steps"].split("  ")[0] == f"{ITERATIONS}, 0 skipped"
    assert summary["generator steps"].split("  ")[0] == f"{ITERATIONS // EVERY}, 0 skipped"
    *generated, real = map(float, summary["Frechet distance"].split())
    assert min(generated) > real > 0
    for picture, precision in zip(pictures, ["float32", "float16"], strict=True):
        assert picture.strip() == str(run.directory / f"{precision}.png")
        assert (run.directory / f"{precision}.png").stat().st_size > 10_000


def test_the_generator_learns_in_float16_as_in_float32(run: _Run) -> None:
    _, digits = digits_session.load_digits(1, batch_size=32)
    untrained = _float32().generator(training.noise(np.random.default_rng(0), 300)).numpy()
    at_first = quality.frechet_distance(untrained, digits.images.reshape(-1, networks.PIXELS))
    assert run.float32.frechet < at_first / 2
    assert run.float16.frechet < at_first / 2
    assert 1 / 1.5 < run.float16.frechet / run.float32.frechet < 1.5


def test_an_overflow_of_the_critic_skips_only_its_step(run: _Run) -> None:
    gan = run.float16.gan
    batch = next(iter(training.Draws(IMAGES, batch_size=32, seed=0)))
    broken = batch._replace(images=np.full_like(batch.images, 1e5))  # infinite in float16
    before = [net.get_weights() for net in (gan.critic, gan.generator)]
    record = gan.step(training.Batch(*map(tf.constant, broken)), True)
    critic, generator = (net.get_weights() for net in (gan.critic, gan.generator))
    assert all(map(np.array_equal, critic, before[0]))
    assert not any(map(np.array_equal, generator, before[1]))
    assert np.isfinite(generator[0]).all()
    generator_steps = ITERATIONS // EVERY + 1
    assert (int(record.critic_steps), int(record.generator_steps)) == (ITERATIONS, generator_steps)
    assert float(record.loss_scale) == 2.0**11
    record = gan.step(training.Batch(*map(tf.constant, batch)), False)
    assert (int(record.critic_steps), int(record.generator_steps)) == (ITERATIONS + 1, generator_steps)
    assert float(record.loss_scale) == 2.0**11


def test_the_slopes_of_a_flat_critic_need_the_loss_scale() -> None:
    flatter = 2.0**-8
    scaled = _gan("mixed_float16", tfmp.GradScaler(2.0**16), flatter)
    unscaled = _gan("mixed_float16", tfmp.GradScaler(enabled=False), flatter)
    exact = _float32(flatter).slopes(tf.constant(IMAGES)).numpy()
    assert _error(scaled.slopes(tf.constant(IMAGES)).numpy(), exact) < 0.01
    assert not unscaled.slopes(tf.constant(IMAGES)).numpy().any()
    assert quality.lost_share(scaled, IMAGES) < 0.02
    assert quality.lost_share(unscaled, IMAGES) == 1


def test_only_the_frechet_distance_is_large_for_digits_that_are_all_alike() -> None:
    assert quality.frechet_distance(IMAGES, IMAGES) == pytest.approx(0, abs=1e-5)
    alike = np.repeat(IMAGES[:1], 16, axis=0)
    assert quality.nearest_distance(alike, IMAGES) == 0
    assert quality.frechet_distance(alike, IMAGES) > 1
