"""Runs and times the training steps that `tools.export_step` wrote, with JAX and NumPy; a GPU needs no TensorFlow.

    python run.py

It lies beside the programs, as `run.py`. It takes steps by each program on the first device that JAX finds, and checks
that all programs of the same kind end at the same weights, and that a skipped step leaves the weights as they are. Then
the programs of a kind take steps in turns. Its table has medians; the ratios are those of the same round, with the
bounds of the middle half of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import backend
from jaxlib import xla_client

#: The loss scale. Float32 represents the gradients times the scale exactly.
_SCALE = 2.0**15


class Program:
    """A compiled step and its state.

    Args:
        folder: The folder of the programs.
        entry: What `programs.json` says of this one.
    """

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        self.name: str = entry["wrapper"]
        self._entry = entry
        self._is_bare = entry["wrapper"] == "bare"
        started = time.perf_counter()
        self._executable = _compiled((folder / entry["file"]).read_bytes())
        self.compile_seconds = time.perf_counter() - started
        self._state = [
            jax.device_put(np.full(each["shape"], each["value"], each["dtype"])) for each in entry["variables"]
        ]

    def step(self, grads: Sequence[Any]) -> None:
        """Take a step, and wait until it is done.

        Args:
            grads: The gradients of the scaled loss, or those in true magnitude for a bare optimizer.
        """
        outputs = self._executable.execute([*grads, *self._state])
        # The memory of a variable that changes is given to its new value.
        for output, variable in self._entry["updates"]:
            self._state[variable] = outputs[output]
        jax.block_until_ready(outputs)

    def weights(self) -> list[np.ndarray]:
        """Return the weights that the optimizer trains."""
        return [np.asarray(self._state[index]) for index in self._entry["weights"]]

    def gradients(self, *, overflow: bool) -> list[Any]:
        """Return gradients for this program on the device, the same values for each.

        Args:
            overflow: Whether the last value is infinite.
        """
        rng = np.random.default_rng(0)
        values = [np.float32(rng.integers(-128, 128, shape, np.int8)) / 4096 for shape in self._entry["gradients"]]
        scaled = [each * np.float32(1 if self._is_bare else _SCALE) for each in values]
        if overflow:
            scaled[-1].flat[-1] = np.inf
        return list(map(jax.device_put, scaled))


def _compiled(module: bytes) -> Any:  # noqa: ANN401 - JAX has no public type for it
    # JAX has no public function that runs a program of XLA as it is.
    client, mlir = backend.get_backend(), xla_client._xla.mlir
    code = mlir.hlo_to_stablehlo(module)
    devices = xla_client.DeviceList(tuple(client.local_devices()[:1]))
    return client.compile_and_load(code, devices, xla_client.CompileOptions())


def _checked(programs: Sequence[Program], outcome: str, steps: int) -> list[str]:
    """Take steps, and return what is wrong with them."""
    overflow, wrong = outcome == "skipped", []
    for program in programs:
        grads, before = program.gradients(overflow=overflow), program.weights()
        for _ in range(steps):
            program.step(grads)
        expected = before if overflow else programs[0].weights()
        if not overflow and not all(map(np.any, expected)):
            wrong.append(f"{program.name}: the weights did not move")
        if not all(_are_close(one, other) for one, other in zip(program.weights(), expected, strict=True)):
            wrong.append(f"{program.name}: wrong weights after {steps} steps")
    return wrong


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.allclose(one, other, rtol=1e-3, atol=1e-3 * np.max(np.abs(other), initial=0.0)))


def _turns(programs: Sequence[Program], outcome: str, rounds: int) -> dict[str, list[float]]:
    turns: dict[str, list[float]] = {program.name: [] for program in programs}
    grads = [program.gradients(overflow=outcome == "skipped") for program in programs]
    for _ in range(rounds):
        for program, own in zip(programs, grads, strict=True):
            started = time.perf_counter()
            program.step(own)
            turns[program.name].append(time.perf_counter() - started)
    return turns


def _rows(kind: str, outcome: str, programs: Sequence[Program], turns: dict[str, list[float]]) -> Iterator[str]:
    base = np.array(turns["Keras 3" if "Keras 3" in turns else programs[0].name])
    for program in programs:
        own = np.array(turns[program.name])
        low, ratio, high = np.percentile(own / base, [25, 50, 75])
        cells = [
            f"{kind}, {outcome}",
            program.name,
            f"{1e3 * np.median(own):.3f}",
            f"{ratio:.2f} ({low:.2f} to {high:.2f})",
            f"{program.compile_seconds:.1f}",
        ]
        yield f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, check and time the programs.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit status: 1 if a program took wrong steps.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="(default: that of this file)")
    parser.add_argument("--steps", type=int, default=3, help="steps before the weights are compared (%(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="measured steps of each program (%(default)s)")
    options = parser.parse_args(argv)

    # Counts of steps are 64-bit integers.
    jax.config.update("jax_enable_x64", True)
    entries = json.loads((options.folder / "programs.json").read_text())
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    print("| step | optimizer | ms | / Keras 3's wrapper | compilation, s |\n|---|---|---|---|---|")
    wrong = []
    for kind in dict.fromkeys(entry["kind"] for entry in entries):
        for outcome in ("applied", "skipped"):
            # A bare optimizer would apply what overflowed.
            programs = [
                Program(options.folder, entry)
                for entry in entries
                if entry["kind"] == kind and not (outcome == "skipped" and entry["wrapper"] == "bare")
            ]
            wrong += [f"{kind}, {outcome}, {each}" for each in _checked(programs, outcome, options.steps)]
            turns = _turns(programs, outcome, options.rounds)
            print("\n".join(_rows(kind, outcome, programs, turns)), flush=True)
    print("\n".join(f"WRONG: {each}" for each in wrong) or "all programs took the right steps")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
