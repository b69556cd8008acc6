"""One hash of a directory tree: names, types, modes, sizes, times, content and targets."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path


def tree_hash(root: Path) -> str:
    """The hash of what is below `root`; the root's own attributes do not count."""
    digest = hashlib.sha256()
    for directory, names, files in os.walk(root):
        names.sort()
        for name in sorted([*names, *files]):
            path = os.path.join(directory, name)
            found = os.lstat(path)
            digest.update(f"{os.path.relpath(path, root)}\0{found.st_mode:o} {found.st_mtime_ns}\0".encode())
            if stat.S_ISLNK(found.st_mode):
                digest.update(os.readlink(path).encode())
            elif stat.S_ISREG(found.st_mode):
                digest.update(f"{found.st_size}\0".encode() + Path(path).read_bytes())
    return digest.hexdigest()
