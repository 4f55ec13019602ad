"""A hook of MkDocs: makes each public name in the text a link to its place in the reference.

The plugin autorefs resolves the links. A name that the reference does not have is a warning, which ends a strict build.
"""

import re
from typing import Any

#: Packages without a section of their own: the pages of the reference show their names.
_PACKAGES = ("bert.google", "checkpoints", "grad_scaler", "mixed_precision", "optimizers", "ranges")

#: Names of earlier versions, of which the changelog speaks.
_REMOVED = ("AutocastLists", "RangeHistogram", "autocast_lists", "exponent_counts", "probe")

#: What texts name that has no place in the reference: a command, a placeholder, packages, and removed names.
NOT_IN_REFERENCE = {"tfmp.migrate", "tfmp.X", *(f"tfmp.{name}" for name in (*_PACKAGES, *_REMOVED))}

# Names in links, headings and code blocks stay as they are.
_NAME = re.compile(
    r"(?P<kept><a [^>]*>.*?</a>|<h(?P<level>\d).*?</h(?P=level)>|<pre.*?</pre>)|<code>(?P<name>tfmp(\.\w+)+)</code>",
    re.DOTALL,
)


def on_page_content(html: str, **_: Any) -> str:  # noqa: ANN401 - further arguments of MkDocs
    """Link the names on a page."""
    return with_links(html)


def with_links(html: str) -> str:
    """Return the HTML of a page, in which public names are references that autorefs resolves.

    Args:
        html: The HTML of a page without the frame of the site.

    Examples:
        >>> with_links("<p>Use <code>tfmp.GradScaler</code>.</p>")
        '<p>Use <autoref identifier="tfmp.GradScaler"><code>tfmp.GradScaler</code></autoref>.</p>'
        >>> with_links("<p>Run <code>tfmp.migrate</code>.</p>")
        '<p>Run <code>tfmp.migrate</code>.</p>'
    """
    return _NAME.sub(_linked, html)


def _linked(match: re.Match[str]) -> str:
    name = match["name"]
    if name is None or name in NOT_IN_REFERENCE:
        return match[0]
    return f'<autoref identifier="{name}">{match[0]}</autoref>'
