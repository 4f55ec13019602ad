"""Creates the unified diff of two texts."""

import difflib
import io
import os


def unified_diff(path: str, before: bytes, after: bytes) -> bytes:
    r"""Return a unified diff for `patch -p0` and `git apply -p0`.

    As in these programs, only a newline ends a line: carriage returns and a byte order mark are part of the lines. The
    diff is made of bytes in the file's own encoding, because these programs compare bytes.

    Examples:
        >>> print(unified_diff("./a.py", b"x = 1\ny = 2\n", b"x = 1\ny = 3").decode(), end="")
        --- a.py
        +++ a.py
        @@ -1,2 +1,2 @@
         x = 1
        -y = 2
        +y = 3
        \ No newline at end of file
    """
    # git refuses a path with `./` in front.
    name = os.fsencode(os.path.normpath(path))
    # In a diff header, a name with a space must end with a tab.
    name += b"\t" if b" " in name else b""
    # Unlike splitlines(), readlines() ends no line at a carriage return.
    old, new = io.BytesIO(before).readlines(), io.BytesIO(after).readlines()
    lines = difflib.diff_bytes(difflib.unified_diff, old, new, name, name)
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)
