"""A temporary file for content that does not fit into a request: the daemon reads it as the `source` of `fs.write`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

# Fits in a request (1 MiB) as base64, with room for the path.  Longer content is passed in a file.
INLINE_BYTES: Final = 512 * 1024


@contextmanager
def readable_by_daemon(socket_path: str | None) -> Iterator[Any]:
    """Yield an empty temporary file that the user of the daemon at `socket_path` can read, too.

    None stands for this process's user.
    """
    with tempfile.NamedTemporaryFile(prefix="vfsd-fs-") as file:
        owner = os.stat(socket_path).st_uid if socket_path is not None else 0
        if os.geteuid() == 0 and owner:
            os.fchown(file.fileno(), owner, -1)
        yield file
