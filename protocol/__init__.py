"""protocol: volumes and filesystems, their backends and tools, as a library.  Works without a mount."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from protocol import compiled as compiled  # finds the extensions from now on

if TYPE_CHECKING:
    from protocol.adapters.host import HostFilesystem as HostFilesystem
    from protocol.adapters.host import HostMount as HostMount
    from protocol.adapters.volume import VolumeFilesystem as VolumeFilesystem
    from protocol.backends.filesystems import InMemoryFilesystem as InMemoryFilesystem
    from protocol.filesystem import Filesystem as Filesystem
    from protocol.filesystem import SnapshotableFilesystem as SnapshotableFilesystem
    from protocol.portable.remote import RemoteFilesystem as RemoteFilesystem
    from protocol.snapshot_manager import SnapshotManager as SnapshotManager
    from protocol.types import READ_ENTIRE_FILE as READ_ENTIRE_FILE
    from protocol.types import FileEntry as FileEntry
    from protocol.types import FileStat as FileStat
    from protocol.types import FilesystemSnapshot as FilesystemSnapshot
    from protocol.types import GlobMatch as GlobMatch
    from protocol.types import GrepMatch as GrepMatch
    from protocol.types import ReadBytesResult as ReadBytesResult
    from protocol.types import ReadResult as ReadResult
    from protocol.types import WriteResult as WriteResult

# Imported on first use, so that a program that needs one contract does not load every backend.
_EXPORTS: Final = {
    "FileEntry": "protocol.types",
    "FileStat": "protocol.types",
    "Filesystem": "protocol.filesystem",
    "FilesystemSnapshot": "protocol.types",
    "GlobMatch": "protocol.types",
    "GrepMatch": "protocol.types",
    "HostFilesystem": "protocol.adapters.host",
    "HostMount": "protocol.adapters.host",
    "InMemoryFilesystem": "protocol.backends.filesystems",
    "READ_ENTIRE_FILE": "protocol.types",
    "ReadBytesResult": "protocol.types",
    "ReadResult": "protocol.types",
    "RemoteFilesystem": "protocol.portable.remote",
    "SnapshotManager": "protocol.snapshot_manager",
    "SnapshotableFilesystem": "protocol.filesystem",
    "VolumeFilesystem": "protocol.adapters.volume",
    "WriteResult": "protocol.types",
}

__all__ = [*_EXPORTS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
