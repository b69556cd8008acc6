"""Decode text from the wire.  InvalidParamsError for text that is malformed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from protocol.paths import decode, normalise
from vfsd.daemon.snapshots.threads import in_thread
from vfsd.wire.messages import InvalidParamsError, from_wire_path

_DECODED_AT_ONCE: Final = 256  # more paths are decoded in a worker thread


def _decoded(wire: str) -> bytes:
    try:
        return from_wire_path(wire)
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None


def host_text(wire: str) -> str:
    """Decode a path, or other text, of this host."""
    return os.fsdecode(_decoded(wire))


def host_environment(wire: Mapping[str, str] | None) -> dict[str, str] | None:
    """Decode the caller's environment."""
    return None if wire is None else {host_text(name): host_text(value) for name, value in wire.items()}


def absolute_path(wire: str) -> str:
    """Decode an absolute path of this host."""
    path = host_text(wire)
    if not os.path.isabs(path):
        raise InvalidParamsError(f"not an absolute path: {wire!r}")
    return path


def filesystem_path(wire: str) -> str:
    """Decode a path in the workspace, in the form that `protocol.filesystem.Filesystem` takes."""
    try:
        return decode(_decoded(wire))
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None


def working_directory(wire: str) -> str:
    """Decode the directory of a command: a normalised path in the workspace."""
    try:
        return normalise(filesystem_path(wire))
    except ValueError as error:
        raise InvalidParamsError(str(error)) from None


async def tree_paths(wire: Sequence[str]) -> list[bytes]:
    """Decode paths in the workspace, in the form that `protocol.tree.Tree` takes."""
    return _tree_paths(wire) if len(wire) <= _DECODED_AT_ONCE else await in_thread(_tree_paths, wire)


def _tree_paths(wire: Sequence[str]) -> list[bytes]:
    paths = []
    for text in wire:
        parts = [part for part in _decoded(text).split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise InvalidParamsError(f"a path with '..': {text!r}")
        paths.append(b"/".join(parts))
    return paths
