"""Decode path parameters of the control socket."""

from __future__ import annotations

from vfsd.wire.messages import InvalidParamsError, from_wire_path

__all__ = ["wire_paths_within"]


def wire_paths_within(texts: list[str]) -> list[bytes]:
    """Decode wire paths to relative paths of a tree.  InvalidParamsError for a path with ".."."""
    paths = []
    for text in texts:
        try:
            parts = [part for part in from_wire_path(text).split(b"/") if part not in (b"", b".")]
        except ValueError as error:
            raise InvalidParamsError(str(error)) from None
        if b".." in parts:
            raise InvalidParamsError(f"a path with '..': {text!r}")
        paths.append(b"/".join(parts))
    return paths
