"""Train a GAN with gradient penalty on scikit-learn's digits in float16: one GradScaler serves two optimizers.

Run `python -m estimator_examples.digits_gan`.
"""
