"""Extended attributes of a file, for callers that copy or compare whole files."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

# The file system has no attributes, or its names may not be listed.
_NONE_TO_LIST: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODATA, errno.EACCES, errno.EPERM})


def read_xattrs(at: int | bytes) -> dict[bytes, bytes]:
    """Read all extended attributes of a descriptor or path that can be read.  OSError if they cannot be listed."""
    try:
        names = os.listxattr(at)
    except OSError as error:
        if error.errno in _NONE_TO_LIST:
            return {}
        raise
    found: dict[bytes, bytes] = {}
    for name in names:
        with contextlib.suppress(OSError):  # removed since, or not readable for this user (trusted., security.)
            found[os.fsencode(name)] = os.getxattr(at, name)
    return found
