"""What `tests/lanes.toml` says: which tests a lane runs, and which of them begin."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parent.parent
_TABLE = tomllib.loads((ROOT / "tests" / "lanes.toml").read_text("utf-8"))
#: The kinds of tests that each lane runs.
LANES: dict[str, list[str]] = _TABLE["lanes"]
#: The kinds of tests, by what the names of these tests begin with.
KINDS: dict[str, str] = {start: kind for kind, starts in _TABLE["kinds"].items() for start in starts}
FIRST: list[str] = _TABLE["first"]


def kind_of(nodeid: str, *, old: bool = False) -> str:
    """Return the kind of a test by its name; an old one is about Keras 2, tf_keras, Estimator or Horovod."""
    start = max((start for start in KINDS if nodeid.startswith(start)), key=len, default="")
    kind = KINDS.get(start, "both")
    return f"{kind}_old" if old and kind in ("once", "every") else kind


def may_run(path: str, lane: str) -> bool:
    """Return whether a lane runs a test of a file."""
    kinds = {kind_of(path), *(kind for start, kind in KINDS.items() if start.startswith(f"{path}::"))}
    if Path(path).name.startswith("test_"):
        kinds |= {kind_of(path, old=True)}
    return not kinds.isdisjoint(LANES[lane])


def place(nodeid: str) -> int:
    """Return the place of a test in the order of a lane: what takes long begins, so that nobody waits for it."""
    return next((place for place, start in enumerate(FIRST) if nodeid.startswith(start)), len(FIRST))
