"""What the tests of other libraries found: as data in tests/recordings, and as the tables of "Works with"."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
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


@functools.cache
def library(name: str) -> dict[str, Any]:
    """Return what `RECORDING` says of a library besides what was found, with the versions that are installed.

    It has the library's `distribution`, what it is tested `beside`, what a user must `write` to train its models in
    float16, and the known `limits`: what no test shows, or what a user must know. A new library is added there by hand.
    """
    known = recorded()[name]
    beside = [each.partition(" ")[0] for each in known["beside"]]
    versions = {"version": version(known["distribution"]), "beside": [f"{each} {version(each)}" for each in beside]}
    return {**known, **versions, "models": {}}


def arranged(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found of libraries, as `RECORDING` holds it: in its order."""
    return {
        name: {
            **library,
            "models": {
                model: {feature: cells[feature] for feature in FEATURES if feature in cells}
                for model, cells in sorted(library["models"].items())
            },
        }
        for name, library in sorted(found.items())
    }


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
    rows = []
    for name, library in libraries.items():
        limits = f"[below](#{_anchor(name)})" if library["limits"] else ""
        works = "; ".join(_features(library))
        rows.append([f"[{name}](#{_anchor(name)})", library["version"], works, library["write"], limits])
    sections = [_section(name, library) for name, library in libraries.items()]
    header = ["library", "version", "what works", "what to write", "known limits"]
    return "\n" + _table(header, rows) + "".join(sections)


def _anchor(name: str) -> str:
    return "".join(letter for letter in name.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


def _features(library: Mapping[str, Any]) -> list[str]:
    return [each for each in FEATURES if any(each in cells for cells in library["models"].values())]


def _section(name: str, library: Mapping[str, Any]) -> str:
    features = _features(library)
    rows = [[model, *(cells.get(each, "") for each in features)] for model, cells in library["models"].items()]
    about = f"\n### {name}\n\n{library['distribution']} {library['version']}, with {', '.join(library['beside'])}.\n\n"
    about += f"Known limits: {library['limits']}\n\n" if library["limits"] else ""
    return about + _table(["", *features], rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [header, ["---"] * len(header), *rows])
