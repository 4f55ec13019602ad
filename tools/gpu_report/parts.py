"""The parts of the report: the commands that are run."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """A command whose output becomes a section of the report.

    Attributes:
        name: The name, also that of the file with the output.
        about: What the command shows.
        arguments: The arguments of Python, without those of `writes`.
        writes: The option that takes the path of a file or folder to write, and its name in the folder of the report.
        gpus: The number of GPUs that the command needs.
        environment: What the command needs in its environment.
    """

    name: str
    about: str
    arguments: Sequence[str]
    writes: tuple[str, str] | None = None
    gpus: int = 0
    environment: Mapping[str, str] = {}

    def arguments_in(self, folder: Path) -> list[str]:
        """Return all arguments of Python.

        Args:
            folder: The folder of the report.
        """
        written = [] if self.writes is None else [self.writes[0], str(folder / self.writes[1])]
        return [*self.arguments, *written]

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        settings = (f"{name}={value}" for name, value in self.environment.items())
        return " ".join([*settings, shlex.join(["python", *self.arguments_in(Path())])])


# On some CPUs, oneDNN computes a float16 layer 200 times slower than TensorFlow's own kernels do.
_WITHOUT_ONEDNN = {"TF_ENABLE_ONEDNN_OPTS": "0"}


def parts(gpus: int, *, tiny: bool) -> list[Part]:
    """Return the parts, in their order.

    Args:
        gpus: The number of GPUs that TensorFlow sees.
        tiny: Whether each part is as short as possible, for trying the command out.
    """
    tests = ["tests/optimizers/test_on_devices.py"] if tiny else ["--lane", "gpu"]
    digits = ["-m", "estimator_examples.digits_keras", "--compare", "--inject-overflow"]
    digits += ["--epochs", "1"] if tiny else []
    ranges = ["-m", "estimator_examples.digits_ranges", *(["--seeds", "1", "--steps", "25"] if tiny else [])]
    sizes = ["--shapes", "tiny" if tiny else "bert", "--optimizers", "SGD", *([] if tiny else ["Adam"])]
    sizes += ["--rounds", "2"] if tiny else []
    steps = ["-m", "benchmarks.step_cost"]
    return [
        Part("versions", "what is installed", ["-m", "tfmp"]),
        Part(
            "chip_limits",
            "the speed of the chip in products of matrices and in copies",
            ["-m", "benchmarks.chip_limits", *(["--rows", "64", "--bytes", "4096"] if tiny else [])],
            writes=("--json", "chip_limits.json"),
        ),
        Part(
            "tests",
            "the tests that run with every version of TensorFlow, and those of devices",
            ["-m", "pytest", "-n", "2", *tests],
        ),
        Part(
            "digits",
            "a training in mixed_float16 with a step that overflows, by Keras' own wrapper and by tfmp's",
            [*digits, "--device", "gpu" if gpus else "cpu"],
            writes=("--plot", "digits.png"),
            environment=_WITHOUT_ONEDNN,
        ),
        Part(
            "ranges",
            "a net that learns in float16 only with a loss scale",
            ranges,
            writes=("--plots", "ranges"),
            environment=_WITHOUT_ONEDNN,
        ),
        Part(
            "step_cost",
            "the time of an optimizer's step in a tf.function and eagerly",
            [*steps, *([*sizes, "--modes", "function", "eager"] if tiny else ["--short"])],
            writes=("--json", "step_cost.json"),
        ),
        Part(
            "step_cost_xla",
            "the time of an optimizer's step within XLA, by which Keras 3 trains on a GPU",
            [*steps, *sizes, "--modes", "xla"],
            writes=("--json", "step_cost_xla.json"),
        ),
        Part(
            "memory",
            "the memory and the time of whole steps, also with recomputation, and whether it changes the weights",
            ["-m", "benchmarks.memory", *_nets(tiny)],
            writes=("--json", "memory.json"),
        ),
        Part(
            "digits_on_two",
            "the training of the part digits on two GPUs, of which the last one overflows",
            [*digits, "--device", "gpu", "--replicas", "2"],
            writes=("--plot", "digits_on_two.png"),
            gpus=2,
        ),
        Part(
            "step_cost_on_two",
            "the time of an optimizer's step on two GPUs",
            [*steps, *sizes, "--modes", "replicas"],
            writes=("--json", "step_cost_on_two.json"),
            gpus=2,
        ),
    ]


def _nets(tiny: bool) -> list[str]:
    if not tiny:
        return ["--policies", "float32", "mixed_float16", "--contenders", "plain, again", "Recompute"]
    case = ["--models", "convolutional", "--policies", "mixed_float16", "--modes", "graph", "--contenders", "Recompute"]
    return [*case, "--size", "tiny", "--steps", "2", "--rounds", "2"]
