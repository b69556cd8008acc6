"""Backend strings, such as "memory" or "host:/srv/project": their parser, and the kinds of backend that exist.

Packages add a kind with an entry point in the group `vfsd.backends`; `vfsd.daemon.backends` loads and calls it.
"""

from __future__ import annotations

import os
from typing import Final, Literal

from msgspec.structs import replace

from protocol.values import Value
from vfsd.wire.entry_points import BACKENDS_GROUP, entry_point_names

# The built-in kinds, and how a user writes each of them.
BACKENDS: Final = {
    "memory": "memory",
    "overlay": "overlay:DIR",
    "host": "host:DIR",
    "container": "container:NAME",
    "image": "image:REF",
    "exec": "exec:COMMAND",
}
_ARGUMENTS: Final = {
    "overlay": "a directory, FILE.zip, snapshot:NAME or URL#NAME",
    "host": "a directory",
    "container": "a container's name",
    "image": "an image's name",
    "exec": "a command that starts a Python",
}
_SNAPSHOT: Final = "snapshot:"  # a directory of such a name is written "./snapshot:..."
_URLS: Final = ("s3://", "gs://", "az://", "file://")  # as above


class BackendSpec(Value):
    """A parsed backend string: `kind`, and the text after the colon.  `str()` gives the string again."""

    kind: str
    argument: str = ""

    @classmethod
    def split(cls, text: str) -> BackendSpec:
        """Split `text` at the first colon without checking it: for records, and for keys of workspaces in a store."""
        kind, _, argument = text.partition(":")
        return cls(kind, argument)

    @property
    def is_path(self) -> bool:
        """Whether `argument` is a path on this host."""
        return self.kind == "host" or self.lower_layer in {"archive", "directory"}

    @property
    def snapshot(self) -> tuple[str, str] | None:
        """The name and the directory ("" if there is none) in "overlay:snapshot:NAME@DIRECTORY"; else None.

        The last "@" before the first slash separates them, because a name may contain "@" and a path may, too.
        """
        if self.kind != "overlay" or not self.argument.startswith(_SNAPSHOT):
            return None
        text = self.argument.removeprefix(_SNAPSHOT)
        first, slash, rest = text.partition("/")
        name, _, directory = first.rpartition("@")
        return (name, directory + slash + rest) if name else (text, "")

    @property
    def remote(self) -> tuple[str, str] | None:
        """The URL and the name ("" if there is none) in "overlay:s3://BUCKET/PREFIX#NAME"; else None."""
        if self.kind != "overlay" or not self.argument.startswith(_URLS):
            return None
        url, _, name = self.argument.partition("#")
        scheme, _, place = url.partition("://")
        return f"{scheme}://{place.rstrip('/')}", name

    def with_snapshot(self, name: str, directory: str) -> BackendSpec:
        """Return this backend over a stored snapshot: the inverse of `snapshot`."""
        return replace(self, argument=f"{_SNAPSHOT}{name}@{directory}" if directory else f"{_SNAPSHOT}{name}")

    @property
    def lower_layer(self) -> Literal["directory", "archive", "snapshot", "remote"] | None:
        """What is below an overlay; None for other backends.  A directory may have a name that ends in ".zip"."""
        if self.kind != "overlay":
            return None
        if self.snapshot is not None:
            return "snapshot"
        if self.remote is not None:
            return "remote"
        is_archive = self.argument.lower().endswith(".zip") and not os.path.isdir(self.argument)
        return "archive" if is_archive else "directory"

    @property
    def form(self) -> str:
        """How a user writes a backend of this kind: "host:DIR"."""
        return BACKENDS.get(self.kind, f"{self.kind}:ARG")

    def __str__(self) -> str:
        return f"{self.kind}:{self.argument}" if self.argument else self.kind


MEMORY: Final = BackendSpec("memory")


def is_url(text: str) -> bool:
    """Return whether `text` names an object store, and not a path."""
    return text.startswith(_URLS)


def known_backends() -> list[str]:
    """Return how a user writes each kind of backend, those of installed packages included."""
    added = entry_point_names(BACKENDS_GROUP) - BACKENDS.keys()
    return [*BACKENDS.values(), *(f"{name}:ARG" for name in sorted(added))]


def parse_backend(text: str) -> BackendSpec:
    """Parse a backend string.  ValueError for an unknown kind, and where the kind's argument is missing or malformed.

    Installed packages are searched only for a kind that is not built in.  Their backends check their arguments
    themselves.
    """
    spec = BackendSpec.split(text)
    if spec.kind in _ARGUMENTS:
        if not spec.argument:
            raise ValueError(f"{text!r} lacks {_ARGUMENTS[spec.kind]} after the colon")
        if spec.snapshot is not None and not spec.snapshot[0]:
            raise ValueError(f"{text!r} lacks the snapshot's name: write overlay:snapshot:NAME[@DIRECTORY]")
        if spec.remote is not None and not spec.remote[0].partition("://")[2]:
            raise ValueError(f"{text!r} lacks the store's place: write overlay:s3://BUCKET/PREFIX#NAME")
        if spec.remote is not None and "@" in spec.remote[0].partition("://")[2].partition("/")[0]:
            # A URL is shown and recorded.
            raise ValueError("a store's URL cannot have a user or password: credentials come from the environment")
        if spec.kind == "exec":
            # Start-up: only this kind needs the parser of command lines.
            from protocol.backends.remote.command import RemoteCommand  # noqa: PLC0415

            RemoteCommand(spec.argument)
    elif text != "memory" and (spec.kind in BACKENDS or spec.kind not in entry_point_names(BACKENDS_GROUP)):
        raise ValueError(f"{text!r} is not one of {', '.join(known_backends())}")
    return spec
