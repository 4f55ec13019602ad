"""A hook of MkDocs: takes pages that stand outside docs/ into the site, and turns the links between them and docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[2]

#: Paths in the repository, and where the site has these pages.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "estimator_examples/README.md": "howto/examples.md",
}


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401 - MkDocs ships no type for its configuration
    """Add the pages from outside docs/."""
    from mkdocs.structure.files import File

    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(_ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:  # noqa: ANN401 - further arguments of MkDocs
    """Turn each relative link of a page into the one that leads to the same file within the site."""
    return with_links_of_the_site(markdown, page.file.src_uri)


def with_links_of_the_site(markdown: str, page: str) -> str:
    """Return a page's text, its links written from where the page stands in the site.

    Args:
        markdown: The text, with links that hold in the repository.
        page: The path of the page in the site.

    Returns:
        The text, with links that hold in the site. What the site does not have stays as it is.

    Examples:
        >>> with_links_of_the_site("[ranges](docs/howto/ranges.md#the-example)", "index.md")
        '[ranges](howto/ranges.md#the-example)'
        >>> with_links_of_the_site("[examples](../../estimator_examples/README.md)", "howto/keras.md")
        '[examples](examples.md)'
    """
    source = next((path for path, of_site in OUTSIDE.items() if of_site == page), f"docs/{page}")

    def turned(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["path"]))
        of_site = OUTSIDE.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(of_site, posixpath.dirname(page) or '.')}{link['anchor'] or ''})"

    return re.sub(r"\]\((?P<path>[^)\s:#]+\.\w+)(?P<anchor>#[\w-]+)?\)", turned, markdown)
