"""What a library of C++ writes to the terminal by itself, stack traces and all, as one line of ours."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def hidden(library: str, unless: str) -> Iterator[None]:
    """Replace what comes to stderr meanwhile with its number of lines, unless that environment variable is set.

    By the number of the file, which C++ writes to: nothing else may write there meanwhile.
    """
    if unless in os.environ:
        yield
        return
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            if lines := sum(1 for _ in file):
                print(f"{library} wrote {lines} lines of its own, which are hidden; {unless}=0 shows them", file=sys.stderr)
