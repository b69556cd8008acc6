"""The messages of the control socket's `fs.` methods: the agent's tools on a running workspace.

Paths are wire paths (see `vfsd.wire.messages`), relative to the workspace's root; "" is the root.  What is
read comes in "output" notifications, so that no message is large.  Content to write is at most what fits in a
request; more is named by `source`, a file of the host.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from protocol.tool_messages import EditFileParams, EditFileResult, RmParams, RmResult, WriteFileResult

__all__ = [
    "FS_METHODS",
    "EditFileParams",
    "EditFileResult",
    "FsEntry",
    "FsExecParams",
    "FsExecResult",
    "FsGlobParams",
    "FsGlobResult",
    "FsGrepParams",
    "FsGrepResult",
    "FsLsParams",
    "FsLsResult",
    "FsMatch",
    "FsReadParams",
    "FsReadResult",
    "FsStatParams",
    "FsWriteParams",
    "RmParams",
    "RmResult",
    "WriteFileResult",
]

NotNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]

DEFAULT_MATCHES: Final = 200
DEFAULT_PATHS: Final = 100
DEFAULT_ENTRIES: Final = 10_000


class _Params(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class FsEntry(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What there is at a path.  Symlinks are followed: "symlink" is one that leads nowhere in the workspace.

    `mode` is the permission bits, octal: "0755".
    """

    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    mode: str
    modified_at: str | None = None
    is_symlink: bool = False


class FsLsParams(_Params):
    path: str = ""
    limit: Positive = DEFAULT_ENTRIES


class FsLsResult(msgspec.Struct):
    path: str
    entries: list[FsEntry]
    truncated: bool = False


class FsStatParams(_Params):
    path: str


class FsReadParams(_Params):
    """fs.read: a page of lines, or with `as_bytes` of bytes; `limit` None is 2,000 lines, or all bytes.

    Content that is no text is given as bytes, whole, where no page was asked for.
    """

    path: str
    offset: NotNegative = 0
    limit: Positive | None = None
    as_bytes: bool = False


class FsReadResult(msgspec.Struct, omit_defaults=True):
    """What the "output" before it is: `unit` says what `offset`, `limit` and `total` count."""

    path: str
    unit: Literal["lines", "bytes"]
    offset: int
    limit: int
    total: int
    truncated: bool = False


class FsWriteParams(_Params):
    """fs.write: `content`, or that of the file `source` (absolute) of the host."""

    path: str
    content: bytes | None = None
    source: str | None = None
    mode: Literal["create", "overwrite", "append"] = "overwrite"
    create_parents: bool = True


class FsGlobParams(_Params):
    """fs.glob: hidden directories, node_modules and their like are skipped unless `everything`."""

    pattern: str
    path: str = ""
    limit: Positive = DEFAULT_PATHS
    everything: bool = False


class FsGlobResult(msgspec.Struct):
    paths: list[str]
    truncated: bool = False


class FsGrepParams(_Params):
    """fs.grep: as `fs.glob`; `glob` chooses among the files."""

    pattern: str
    path: str = ""
    glob: str | None = None
    limit: Positive = DEFAULT_MATCHES
    ignore_case: bool = False
    everything: bool = False


class FsMatch(msgspec.Struct):
    """A line (the first is 1) and its first match; of a long line a part around it, in which `match_start` counts."""

    path: str
    line_number: int
    line: str
    match_start: int
    match_end: int


class FsUnreadable(msgspec.Struct):
    """A file that could not be read, or a directory that could not be listed."""

    path: str
    reason: str


class FsGrepResult(msgspec.Struct):
    """`unreadable` are the first 1,000 files and directories that could not be searched, of `unreadable_count`."""

    matches: list[FsMatch]
    truncated: bool = False
    unreadable: list[FsUnreadable] = []
    unreadable_count: int = 0


class FsExecParams(_Params):
    """fs.exec: the words of `argv` are written as paths are; `cwd` is in the workspace; `env` is added to the daemon's
    environment."""

    argv: Annotated[list[str], Meta(min_length=1)]
    cwd: str = ""
    env: dict[str, str] = {}
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    output_limit_bytes: Annotated[int, Meta(ge=0, le=16 * 1024 * 1024)] = 256 * 1024
    stdin: bytes = b""


class FsExecResult(msgspec.Struct):
    """How a command ended; `exit_status` is negative for what a signal killed.  `snapshot` was taken after it."""

    exit_status: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    snapshot: str | None = None


FS_METHODS: Final[dict[str, tuple[type[Any], type[Any]]]] = {
    "fs.ls": (FsLsParams, FsLsResult),
    "fs.stat": (FsStatParams, FsEntry),
    "fs.read": (FsReadParams, FsReadResult),
    "fs.write": (FsWriteParams, WriteFileResult),
    "fs.edit": (EditFileParams, EditFileResult),
    "fs.glob": (FsGlobParams, FsGlobResult),
    "fs.grep": (FsGrepParams, FsGrepResult),
    "fs.rm": (RmParams, RmResult),
    "fs.exec": (FsExecParams, FsExecResult),
}
