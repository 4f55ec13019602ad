"""Each benchmark at its smallest: it ends well, and says on which machine, with which versions, by which command.

The tests do not look at what it measures. What a page states of a benchmark beside its figures has tests of its own.
"""

import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import python_process
import tensorflow as tf

import tfmp
from benchmarks import gradient_traces, spike_rules
from benchmarks.harness import peak_memory

_ROOT = Path(__file__).parents[2]
_KERAS = int(keras.__version__[0])

_STEPS = "--shapes tiny --rounds 2"
_NET = "--layers=1 --hidden=8 --vocabulary=30 --length=5 --batch=2 --rounds=2 --steps=3 --optimizer=SGD"
_BERT = "--vocab_size=200 --hidden_size=16 --num_layers=1 --num_heads=2 --seq_length=16 --batch_size=4 --dupe_factor=1"
_BERT_TURNS = "--precisions fp32 --rounds 1 --steps 3 --memory-turns 1"
_CONVOLUTIONAL = "--models convolutional --policies float32 --modes graph --contenders Recompute"
_CELL = "--nets branched --precisions float16-tfmp --states half --ways both"

#: Of each benchmark the runs, and what they need: a version of Keras, a package, or what is a mark.
_RUNS = {
    "accumulation": ["--windows 2 --micro-batches 3 --batch-size 2"],
    "autocast": [("--size tiny --rounds 1", 3)],
    "bert_speed": [(f"{_BERT_TURNS} -- {_BERT} --input {{text}}", "tokenizers", "estimator")],
    "chip_limits": ["--rows 16 --bytes 4096 --rounds 3"],
    "fit_speed": [(f"{_NET} --plot {{picture}}", 3, "matplotlib")],
    "gradient_traces": [("--steps 3", "sklearn")],
    # Both checkouts are this one.
    "graph_step_cost": [f"{_STEPS} --modes resource --optimizers SGD --outcomes good --pairs 1 --baseline {_ROOT}"],
    "half_state": [("--optimizers Adam --size 8 --rounds 2", 3)],
    "legacy_optimizers": ["--only AdamWeightDecay"],
    "many_replicas": ["--replicas 2 --rounds 1 --steps 1"],
    "memory": [(f"{_CONVOLUTIONAL} --size tiny --steps 2 --rounds 1 --plot {{picture}}", 3, "matplotlib")],
    "norm_cost": [(f"{_STEPS} --modes function --optimizers Adam --outcomes good", 3)],
    "range_looks": [("--values 4096 --rounds 2", 3)],
    "recipes": [(f"{_CELL} --size tiny --seeds 1 --plot {{picture}}", 3, "sklearn", "matplotlib")],
    "ring_sums": ["--gradients 8"],
    "spike_rules": ["--steps 300"],
    "start_cost": [("--uses import construction set_precision --repetitions 1", 3)],
    "step_cost": [
        (f"{_STEPS} --modes eager --optimizers Adam --dtypes float16 --plot {{picture}}", 3, "matplotlib"),
        (f"{_STEPS} --modes function replicas --optimizers legacy.Adam --outcomes good skipped", 2),
    ],
    "strategies": [("--steps 60 --window 20 --plot {picture}", "matplotlib")],
}

_MARKS = {"estimator": pytest.mark.estimator}

#: It measures what two processes of horovodrun send, and would leave Horovod running here.
_NOT_RUN = {"horovod_traffic"}


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let benchmarks measure here what they measure in new processes, each of which would import TensorFlow."""
    monkeypatch.setattr(peak_memory, "in_new_process", lambda measure, *args, **kwargs: measure(*args, **kwargs))
    before = keras.mixed_precision.global_policy() if _KERAS == 2 else keras.config.dtype_policy()
    yield
    keras.mixed_precision.set_global_policy(before)


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        pytest.param(
            name,
            options,
            needs,
            id=f"{name} {number}{' keras2' * (2 in needs)}",
            marks=[_MARKS[each] for each in needs if each in _MARKS],
        )
        for name, runs in _RUNS.items()
        for number, (options, *needs) in enumerate((each,) if isinstance(each, str) else each for each in runs)
    ],
)
@pytest.mark.usefixtures("_in_this_process")
def test_benchmark_ends_well_and_names_its_conditions(
    name: str, options: str, needs: list[int | str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for need in needs:
        if isinstance(need, int) and need != _KERAS:
            pytest.skip(f"is about Keras {need}")
        if isinstance(need, str) and need not in _MARKS and importlib.util.find_spec(need) is None:
            pytest.skip(f"needs {need}")
    text, picture, figures = tmp_path / "numbers.txt", tmp_path / "picture.png", tmp_path / "figures.json"
    text.write_text("\n".join(f"The square of {i} is {i * i}." for i in range(200)))
    package = (_ROOT / "benchmarks" / name).is_dir()
    benchmark = importlib.import_module(f"benchmarks.{name}{'.__main__' * package}")
    arguments = options.format(text=text, picture=picture).split()
    if name != "legacy_optimizers":
        arguments = ["--json", str(figures), *arguments]
    assert benchmark.main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{condition}:" in f"\n{printed}" for condition in ("machine", "versions", "command"))
    assert name == "legacy_optimizers" or json.loads(figures.read_text())
    assert "{picture}" not in options or picture.read_bytes().startswith(b"\x89PNG")


def test_every_benchmark_is_run() -> None:
    files = [*(_ROOT / "benchmarks").glob("*.py"), *(_ROOT / "benchmarks").glob("*/__main__.py")]
    commands = {path.parent.name if path.stem == "__main__" else path.stem for path in files}
    assert commands - {"__init__"} == _RUNS.keys() | _NOT_RUN


def test_tfmp_is_not_imported_before_its_import_is_measured() -> None:
    # The processes that measure the import load the module of the benchmark again.
    code = "import sys, benchmarks.start_cost; sys.exit('tfmp' in sys.modules)"
    assert python_process.run("-c", code).returncode == 0


def test_recording_of_digits_can_be_repeated() -> None:
    pytest.importorskip("sklearn")
    np.testing.assert_allclose(gradient_traces.record(3), gradient_traces.traces(3)["digits, recorded"], rtol=0.01)


def test_replayed_rule_of_spikes_is_that_of_the_detector() -> None:
    norms = spike_rules.recordings()["digits_sgd_high"][0][:400].copy()
    norms[::40] *= 300
    norms[300:] *= 1000
    detector = tfmp.SpikeDetector(64)
    stored = detector.state_of(0)

    @tf.function
    def is_skipped(norm: tf.Tensor) -> tf.Tensor:
        state = stored.read()
        is_above = norm > detector.bound(state)
        skipped = detector.is_skipped(state, is_above)
        stored.assign(detector.next_state(state, norm, tf.constant(True), is_above, skipped))
        return skipped

    found = [bool(is_skipped(tf.constant(norm, tf.float64))) for norm in norms]
    assert found == spike_rules.alarms(norms[:, np.newaxis], [*spike_rules.RULES.values()][-1], 64)[:, 0].tolist()
    assert sum(found[:300]) > 2
    # The lasting change is found, and accepted.
    assert 10 <= sum(found[300:]) < 50
