"""The difference of two texts, as `diff -u` shows it."""

import difflib
import os


def unified_diff(path: str, before: bytes, after: bytes) -> bytes:
    r"""Return what `patch -p0` and `git apply -p0` take.

    As for these programs a line ends at a newline only: carriage returns are part of the lines, and so is a byte order
    mark. Bytes that are not rewritten are in the file's encoding, whatever it is, or no program would find them.

    Args:
        path: The file; without `./` in front, which git refuses.
        before: What it says.
        after: What it would say.

    Returns:
        The lines, each with its end; empty if the bytes are the same.

    Example:
        >>> print(unified_diff("./a.py", b"x = 1\ny = 2\n", b"x = 1\ny = 3").decode(), end="")
        --- a.py
        +++ a.py
        @@ -1,2 +1,2 @@
         x = 1
        -y = 2
        +y = 3
        \ No newline at end of file
    """
    name = os.fsencode(os.path.normpath(path))
    # A name ends at a space, unless a tab ends it.
    name += b"\t" if b" " in name else b""
    lines = difflib.diff_bytes(difflib.unified_diff, _lines(before), _lines(after), name, name)
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def _lines(content: bytes) -> list[bytes]:
    # Not splitlines, for which carriage returns end lines too.
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]
