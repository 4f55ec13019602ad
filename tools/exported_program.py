"""Runs a program of XLA that `tools.program_export` wrote, with JAX and NumPy; TensorFlow is not needed."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jaxlib import xla_client


class Program:
    """A compiled program and the state of its variables on the first device that JAX finds.

    Args:
        folder: The folder of the programs.
        entry: What `programs.json` says of this one.
    """

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        self.name: str = entry["wrapper"]
        self.entry = entry
        started = time.perf_counter()
        self._executable = _compiled((folder / entry["file"]).read_bytes())
        self.compile_seconds = time.perf_counter() - started
        #: The values of the variables, in the order in which the program takes them.
        self.state: list[Any] = []
        self._outputs: list[Any] = []
        self.restart()

    @property
    def temporary_bytes(self) -> int:
        """The memory that a run needs in addition to its arguments, its results and the variables."""
        return int(self._executable.get_compiled_memory_stats().temp_size_in_bytes)

    @property
    def optimized_text(self) -> str:
        """The program as XLA optimized it for the device."""
        return "\n".join(module.to_string() for module in self._executable.hlo_modules())

    def restart(self) -> None:
        """Give the variables their first values."""
        self.state = [jax.device_put(_first_value(each)) for each in self.entry["variables"]]

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Run the program, without waiting until it is done, and return what it returns beside the variables."""
        self._outputs = self._executable.execute([*arguments, *self.state])
        # The memory of a variable that changes is given to its new value.
        updates = dict(self.entry["updates"])
        for output, variable in updates.items():
            self.state[variable] = self._outputs[output]
        return [output for place, output in enumerate(self._outputs) if place not in updates]

    def wait(self) -> None:
        """Wait until the last run is done."""
        jax.block_until_ready(self._outputs)

    def weights(self) -> list[Any]:
        """Return the weights that the optimizer trains, on the device. The next run takes their memory."""
        return [self.state[index] for index in self.entry["weights"]]


def _compiled(program: bytes) -> Any:  # noqa: ANN401 - JAX has no public type for it
    # JAX has no public function that runs a program of XLA as it is. These are in JAX 0.10.2 and 0.11.2.
    client = backend.get_backend()
    with mlir.make_ir_context():
        module = ir.Module.parse(xla_client._xla.mlir.hlo_to_stablehlo(program))
        module.operation.walk(_without_copy)
    devices = xla_client.DeviceList(tuple(client.local_devices()[:1]))
    return client.compile_and_load(module, devices, xla_client.CompileOptions())


def _without_copy(operation: Any) -> Any:  # noqa: ANN401 - JAX has no type stubs for MLIR
    # The programs of TensorFlow copy some results. StableHLO, in which a GPU's plugin takes programs, has no copies.
    if operation.name == "mhlo.copy":
        operation.results[0].replace_all_uses_with(operation.operands[0])
        operation.erase()
    return ir.WalkResult.ADVANCE


def _first_value(variable: dict[str, Any]) -> np.ndarray:
    if "value" in variable:
        return np.full(variable["shape"], variable["value"], variable["dtype"])
    rng = np.random.default_rng(variable["seed"])
    values = variable["stddev"] * rng.standard_normal(variable["shape"], np.float32)
    return values.astype(variable["dtype"])


def turns(runs: Mapping[str, Callable[[], Callable[[], None]]], rounds: int, in_a_row: int) -> dict[str, list[float]]:
    """Return the seconds of one run in each turn.

    Args:
        runs: What to run by its name; it returns a function that waits until the run is done.
        rounds: The number of turns of each.
        in_a_row: The number of runs in a turn. Only the last one is waited for, as in a training loop.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            for _ in range(in_a_row):
                wait = run()
            wait()
            seconds[name].append((time.perf_counter() - started) / in_a_row)
    return seconds


class DeviceWork(NamedTuple):
    """What a GPU does in one run, of which its profile tells."""

    kernels: float
    #: The time of all kernels and copies, without the time in which the GPU waits for the host.
    seconds: float
    #: The copies to the memory of the host, for which the host waits.
    reads_by_host: float


def device_work(run: Callable[[], Callable[[], None]], runs: int = 5) -> DeviceWork | None:
    """Profile runs; return the averages, or None where JAX has no GPU.

    Args:
        run: Starts a run, and returns a function that waits until it is done.
        runs: The number of runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                wait = run()
            wait()
        (profile,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(profile)).planes
        lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
        events = [
            (each.name, each.duration_ns) for line in lines if line.name.startswith("Stream") for each in line.events
        ]
    if not events:
        return None
    reads = sum(name.startswith("MemcpyD2H") for name, _ in events)
    kernels = sum(not name.startswith(("Memcpy", "Memset")) for name, _ in events)
    return DeviceWork(kernels / runs, sum(each for _, each in events) / 1e9 / runs, reads / runs)


#: The heads of the columns that `cells_of_device` fills.
HEADS_OF_DEVICE = ("kernels", "on the device, ms", "reads by the host")


def cells_of_device(run: Callable[[], Callable[[], None]]) -> list[str]:
    """Return the cells of a table's row about the work of the GPU; they are empty where JAX has none."""
    work = device_work(run)
    if work is None:
        return [""] * len(HEADS_OF_DEVICE)
    return [f"{work.kernels:.0f}", f"{1e3 * work.seconds:.3f}", f"{work.reads_by_host:.0f}"]


def ratio(own: Sequence[float], base: Sequence[float]) -> str:
    """Return the median of the ratios of each round, with the bounds of the middle half of them."""
    low, middle, high = np.percentile(np.array(own) / np.array(base), [25, 50, 75])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def copy_bandwidth(num_bytes: int) -> float:
    """Return the bytes per second, read and written, at which the device negates float32 values of `num_bytes`."""
    values = [jnp.asarray(np.random.default_rng(0).standard_normal(num_bytes // 4, np.float32))]
    negative = jax.jit(jnp.negative, donate_argnums=0)

    def run() -> Any:  # noqa: ANN401 - an array of JAX
        # The result takes the memory of the argument: nothing is allocated.
        values[0] = negative(values[0])
        return values[0]

    return 2 * values[0].nbytes / _seconds(run)


def product_rate(dtype: str, precision: str, size: int) -> float:
    """Return the operations per second of a product of two random square matrices."""
    rng = np.random.default_rng(0)
    one, other = (jnp.asarray(rng.standard_normal([size, size], np.float32), dtype) for _ in range(2))
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    return 2 * size**3 / _seconds(lambda: product(one, other))


def _seconds(function: Callable[[], Any]) -> float:
    def run() -> Callable[[], None]:
        return functools.partial(jax.block_until_ready, function())

    run()()
    return statistics.median(turns({"": run}, rounds=20, in_a_row=10)[""])


def write_optimized(programs: Sequence[Program], folder: Path | None) -> None:
    """Write the programs as XLA optimized them, if there is a folder."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for program in programs:
            (folder / program.entry["file"]).with_suffix(".txt").write_text(program.optimized_text)
