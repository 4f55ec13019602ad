"""The formulas in BERT's public scripts, in NumPy and float64."""

import numpy as np


def rate(step: int, peak: float, total: int, warmup: int, kind: str) -> float:
    """Return the learning rate of a step from 0 on, by NVIDIA's "adam" or "lamb", or by "google"."""
    if step < warmup:
        return peak * step / warmup
    start = peak / (1 - warmup / total) if kind == "adam" else peak
    return start * (1 - min(step, total) / total) ** (0.5 if kind == "lamb" else 1.0)


def clipped(grads: list[np.ndarray], norm: float = 1.0) -> list[np.ndarray]:
    """Return gradients clipped to a global norm."""
    own = np.sqrt(sum(np.sum(np.square(grad, dtype=np.float64)) for grad in grads))
    return [grad * min(1.0, norm / own) if own else grad for grad in grads]


class Adam:
    """The update of one variable by AdamWeightDecayOptimizer."""

    def __init__(self, value: np.ndarray, decay: float = 0.0) -> None:
        self.value = np.asarray(value, np.float64)
        self.m = np.zeros_like(self.value)
        self.v = np.zeros_like(self.value)
        self.steps = 0
        self._decay = decay

    def step(self, grad: np.ndarray, rate: float) -> None:
        """Take a step."""
        self.steps += 1
        self.m = 0.9 * self.m + 0.1 * np.asarray(grad)
        self.v = 0.999 * self.v + 0.001 * np.square(grad)
        self._move(self.direction() + self._decay * self.value, rate)

    def direction(self) -> np.ndarray:
        """Return the update without the weight decay."""
        return self.m / (np.sqrt(self.v) + 1e-6)

    def _move(self, update: np.ndarray, rate: float) -> None:
        self.value = self.value - rate * update


class Lamb(Adam):
    """The update of one variable by LAMB, which corrects the bias."""

    def direction(self) -> np.ndarray:
        """Return the update without the weight decay."""
        m, v = self.m / (1 - 0.9**self.steps), self.v / (1 - 0.999**self.steps)
        return m / (np.sqrt(v) + 1e-6)

    def _move(self, update: np.ndarray, rate: float) -> None:
        norms = np.linalg.norm(self.value), np.linalg.norm(update)
        self.value = self.value - rate * (norms[0] / norms[1] if all(norms) else 1.0) * update


RULES = {"adam": Adam, "lamb": Lamb}
