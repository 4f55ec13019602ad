"""Blocks of a page are found, and become modules."""

from pathlib import Path

from tools.typed_blocks import blocks_of, module_of

_PAGE = """# A page

```python
>>> import tfmp
>>> for scale in (1, 2):
...     print(tfmp.FixedLossScaleManager(scale))
something printed
>>> wrapped = wrap(optimizer)

```

```
no Python
```
```python
# torch
def train(model):
    return model(batch)
```
"""


def test_blocks_keep_the_lines_of_their_page_and_declare_their_free_names(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(_PAGE)
    of_doctest, of_torch = blocks_of(page)
    lines = _PAGE.splitlines()
    for block, code in ((of_doctest, "wrapped = wrap(optimizer)"), (of_torch, "    return model(batch)")):
        assert code in lines[block.line - 1 + block.source.splitlines().index(code)]
    assert "something printed" not in of_doctest.source
    assert module_of(of_doctest).splitlines()[1] == "from typing import Any; optimizer: Any; wrap: Any"
    # Neither the parameter `model` nor the function `train` is declared.
    assert module_of(of_torch).splitlines()[:2] == [
        "# mypy: allow-untyped-defs, allow-untyped-calls",
        "from typing import Any; batch: Any",
    ]
