"""Checks the types of every Python block of the documentation, with the settings of a user's type checker.

    python -m tools.typed_blocks README.md docs

Each block becomes a module of its own, which mypy checks with --strict. Names that the page leaves to the reader (a
model, a loss) and names of earlier blocks are declared as `Any` at the start of the module. Names that a block takes
from tfmp have tfmp's own types.
"""

import argparse
import builtins
import doctest
import re
import subprocess
import symtable
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

#: The imports that a page shows once or not at all, by the name that blocks use.
_IMPORTS = {
    "Callable": "from collections.abc import Callable",
    "hvd": "import horovod.tensorflow as hvd",
    "keras": "import keras",
    "np": "import numpy as np",
    "tf": "import tensorflow as tf",
    "tfmp": "import tfmp",
    "torch": "import torch",
}

#: The settings of a user, not those of this project. TensorFlow, Keras and torch ship no types, so everything from them
#: is `Any`, including base classes and decorators. Errors inside tfmp are not reported here.
_OPTIONS = (
    *("--config-file=", "--strict", "--ignore-missing-imports", "--follow-imports=silent", "--no-pretty"),
    *("--allow-subclassing-any", "--allow-untyped-decorators"),
)


class Block(NamedTuple):
    """A Python block of a page.

    Attributes:
        page: The path of the page.
        line: The line of the page on which the block's code begins, counted from 1.
        source: The code. Its lines have the same distances from each other as on the page.
    """

    page: Path
    line: int
    source: str


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the Python blocks of a page; a block of doctests is reduced to the code after the prompts.

    Args:
        page: A Markdown file.
    """
    text = page.read_text()
    for fence in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        source = fence.group(1)
        if re.match(r"\s*>>>", source):
            source = _typed_at_the_prompt(source)
        yield Block(page, text.count("\n", 0, fence.start(1)) + 1, source)


def module_of(block: Block) -> str:
    """Return a module with a block after two lines: settings for mypy, and declarations of the block's free names.

    Args:
        block: A block of a page.

    Examples:
        >>> print(module_of(Block(Path("page.md"), 7, "tfmp.replay(step, scaler)")))
        # mypy:
        import tfmp; from typing import Any; scaler: Any; step: Any
        tfmp.replay(step, scaler)
    """
    module = symtable.symtable(block.source, str(block.page), "exec")
    bound = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    free = sorted(_read_from_module(module) - bound - set(dir(builtins)))
    imports = [_IMPORTS[name] for name in free if name in _IMPORTS]
    declared = [f"{name}: Any" for name in free if name not in _IMPORTS]
    # Examples of torch, which pages show for comparison, have no annotations: that is how torch's users write them.
    settings = "# mypy: allow-untyped-defs, allow-untyped-calls" if block.source.startswith("# torch\n") else "# mypy:"
    return "\n".join([settings, "; ".join([*imports, "from typing import Any", *declared]), block.source])


def main(argv: Sequence[str] | None = None) -> int:
    """Check the pages that the command line names, and print mypy's errors with the lines of the pages."""
    parser = argparse.ArgumentParser(prog="python -m tools.typed_blocks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, help="Markdown files, or directories with such files")
    paths = parser.parse_args(argv).paths
    pages = [page for path in paths for page in (sorted(path.rglob("*.md")) if path.is_dir() else [path])]
    blocks = {f"block_{index}": block for index, block in enumerate(b for page in pages for b in blocks_of(page))}
    with tempfile.TemporaryDirectory() as directory:
        for name, block in blocks.items():
            (Path(directory) / f"{name}.py").write_text(module_of(block))
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *_OPTIONS, directory], capture_output=True, text=True, check=False
        )
    print("\n".join(_on_the_page(line, blocks) for line in done.stdout.splitlines()))
    print(done.stderr, end="", file=sys.stderr)
    print(f"{len(blocks)} blocks of {len(pages)} pages")
    return done.returncode


def _read_from_module(scope: symtable.SymbolTable) -> set[str]:
    """Return the module's names that a scope, or a scope inside it, reads."""
    is_module = scope.get_type() == "module"
    read = {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global() or is_module}
    return read.union(*map(_read_from_module, scope.get_children()))


def _typed_at_the_prompt(source: str) -> str:
    lines = [""] * (source.count("\n") + 1)
    for example in doctest.DocTestParser().get_examples(source):
        if (example.exc_msg or "").startswith("ImportError"):
            continue  # a type checker reports the name too
        typed = example.source.splitlines()
        lines[example.lineno : example.lineno + len(typed)] = typed
    return "\n".join(lines)


def _on_the_page(line: str, blocks: dict[str, Block]) -> str:
    """Return a line of mypy's output; if it is about a block, with the place on the page."""
    match = re.match(r".*?(block_\d+)\.py:(\d+): (.*)", line)
    if match is None:
        return line
    block = blocks[match.group(1)]
    return f"{block.page}:{block.line + int(match.group(2)) - 3}: {match.group(3)}"


if __name__ == "__main__":
    sys.exit(main())
