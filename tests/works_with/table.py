"""What the tests of other libraries found: as data in tests/recordings, and as the tables of "Works with"."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
RECORDING = _ROOT / "tests" / "recordings" / "works_with.json"
PAGE = _ROOT / "docs" / "reference" / "works_with.md"

#: What is between these lines of the page is written by `write`.
_BEGIN, _END = "<!-- begin: written by the tests -->\n", "<!-- end: written by the tests -->\n"

#: The columns of the tables, and the argument of the mark `feature`.
FEATURES = {
    "float32's curve": "training in float16 with a scaled loss follows training in float32",
    "Keras' wrapper": "and training with Keras' own wrapper, where that is right",
    "overflow": "a step with an overflow changes nothing but the scale",
    "O1, O2": "`tfmp.set_precision`",
    "check": "`tfmp.check_precision` finishes, and what it suggests trains",
    "recompute": "`tfmp.recompute_layers`, or `tfmp.recompute` in the model's code",
    "half state": "`tfmp.half_state`",
    "resume": "saved, loaded in a new process or a new model, and trained on, in every bit",
    "two replicas": "`MirroredStrategy`",
    "LoRA": "LoRA, with recomputation",
    "callbacks": "tfmp's callbacks together with those of the library",
}

#: What the table says of a test that passed.
_WORKS = "yes"


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library as its users know it; the argument of the mark `works_with`.

    Attributes:
        name: What people call it.
        distribution: What one installs.
        beside: The distributions that it is tested with.
        write: What a user writes to train its models in float16, in Markdown.
        limits: What no test shows, or what a user must know: sentences in Markdown.
    """

    name: str
    distribution: str
    beside: Sequence[str]
    write: str
    limits: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the installed versions, as JSON can hold them."""
        versions = [f"{each} {version(each)}" for each in self.beside]
        return {**asdict(self), "version": version(self.distribution), "beside": versions}


class Findings:
    """The outcomes of the tests of a run."""

    def __init__(self) -> None:
        self._libraries: dict[str, dict[str, Any]] = {}
        self._cells: dict[str, dict[str, dict[str, list[str]]]] = {}

    def add(self, library: Mapping[str, Any], model: str, feature: str, outcome: str) -> None:
        """Add the outcome of a test: "yes", or why it does not work."""
        self._libraries[library["name"]] = dict(library)
        cells = self._cells.setdefault(library["name"], {})
        cells.setdefault(model, {}).setdefault(feature, []).append(outcome)

    def recording(self) -> dict[str, Any]:
        """Return what was found, as `RECORDING` holds it."""
        return {
            name: {
                **library,
                "models": {
                    model: {feature: _together(found[feature]) for feature in FEATURES if feature in found}
                    for model, found in sorted(self._cells[name].items())
                },
            }
            for name, library in sorted(self._libraries.items())
        }


def _together(outcomes: Iterable[str]) -> str:
    """Return what to say of a cell that several tests are about."""
    limits = sorted({outcome for outcome in outcomes if outcome != _WORKS})
    return " ".join(limits) or _WORKS


def recorded() -> dict[str, Any]:
    """Return what the last run that was recorded found."""
    return json.loads(RECORDING.read_text("utf-8")) if RECORDING.exists() else {}


def write(found: Mapping[str, Any]) -> None:
    """Record what a run found of some libraries, and write the tables of all."""
    everything = dict(sorted({**recorded(), **found}.items(), key=lambda item: item[0].lower()))
    RECORDING.write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n", "utf-8")
    before, _, rest = PAGE.read_text("utf-8").partition(_BEGIN)
    PAGE.write_text(before + _BEGIN + tables(everything) + _END + rest.partition(_END)[2], "utf-8")


def tables_of_page() -> str:
    """Return the tables that the page has."""
    return PAGE.read_text("utf-8").partition(_BEGIN)[2].partition(_END)[0]


def tables(libraries: Mapping[str, Any]) -> str:
    """Return a table of the libraries, then for each of them a table of its models."""
    rows = [
        [
            f"[{name}](#{_anchor(name)})",
            library["version"],
            _works(library),
            library["write"],
            f"[below](#{_anchor(name)})" if library["limits"] else "",
        ]
        for name, library in libraries.items()
    ]
    sections = [_section(name, library) for name, library in libraries.items()]
    return (
        "\n" + _table(["library", "version", "what works", "what to write", "known limits"], rows) + "".join(sections)
    )


def _anchor(name: str) -> str:
    return "".join(letter for letter in name.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def _works(library: Mapping[str, Any]) -> str:
    """Return the features that work with all models that they were tried with; others with what they fail for."""
    words = []
    for feature in FEATURES:
        found = {model: cells[feature] for model, cells in library["models"].items() if feature in cells}
        fails = [model for model, outcome in found.items() if outcome != _WORKS]
        if found and len(fails) < len(found):
            words.append(f"{feature} (not {', '.join(fails)})" if fails else feature)
    return "; ".join(words)


def _section(name: str, library: Mapping[str, Any]) -> str:
    features = [each for each in FEATURES if any(each in cells for cells in library["models"].values())]
    notes = list(dict.fromkeys(text for cells in library["models"].values() for text in cells.values()))
    numbers = {text: number for number, text in enumerate((text for text in notes if text != _WORKS), start=1)}

    def cell(outcome: str | None) -> str:
        return "" if outcome is None else f"no ({numbers[outcome]})" if outcome in numbers else outcome

    rows = [[model, *(cell(cells.get(each)) for each in features)] for model, cells in library["models"].items()]
    lines = [f"{number}. {text}" for text, number in numbers.items()]
    about = f"\n### {name}\n\n{library['distribution']} {library['version']}, with {', '.join(library['beside'])}.\n\n"
    about += f"Known limits: {library['limits']}\n\n" if library["limits"] else ""
    return about + _table(["", *features], rows) + ("\n" + "\n".join(lines) + "\n" if lines else "")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [header, ["---"] * len(header), *rows])
