"""Resume: the value that a daemon hands on, so that its successor goes on with its mount or its state.

There is one encoding, with one version number.  Who hands on to whom:

- a daemon with a keeper to the replacement of a daemon that died: the keeper's memory has it (`vfsd.daemon.keeper`);
- the daemon of an upgrade to the one of another version (`vfsd.daemon.upgrading`);
- a workspace to its forks (`vfsd.daemon.forks`).

Descriptors go beside it, with the message that says which they are.  The content of a volume in memory is in its
journal, in the process that was forked, or follows in an upgrade (`protocol.volume_durability.GivenState`).

A daemon that meets another version's encoding says so (EPROTONOSUPPORT) and changes nothing: a journal stays as it is,
and the old daemon of an upgrade serves on.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from typing import Final

import msgspec

import vfsd
from protocol.values import Value
from vfsd.daemon.audit.processes import GivenLabel
from vfsd.daemon.merging.lineage import MergeLog
from vfsd.daemon.snapshots.history import PrunedRecord, UndoHistory
from vfsd.operations.forks import Ancestor, StateId

FORMAT: Final = 4  # of `Resume`, of the messages of an upgrade, and of what these carry


class Resume(Value):
    """A part that the next daemon finds elsewhere is left out: most are in a journal, if there is one.

    `options`: of the mount, as they hold now (`handshake.encode_options`).  `negotiated`: by the engine with the kernel
    (`ResumableEngine.negotiated`).  `labels`: of processes.  `history`: the undo history.  `merges`: what was merged
    into each state (`MergeLog.encoded`).  `pruned`: snapshots that were removed for lack of memory.

    Of forks: `instance` identifies the workspace to them.  `kept_bases`: the bases to drop when no fork needs them any
    more.  `forks_made`: their number.  `family_limit` and `family_bases`: of the memory that the family shares
    (`vfsd.daemon.forks.family`).

    Of a fork: `source`: the workspace that it was made from.  `base`: the snapshot of both that is their last common
    state.  `ancestors`: the workspaces that it descends from, the source last.  `twin`: a snapshot of a fork over a
    stored snapshot, or of its forks, and the stored snapshot that is the same state.
    """

    format: int = FORMAT
    version: str = vfsd.__version__
    options: str = ""
    negotiated: str = ""
    labels: tuple[GivenLabel, ...] = ()
    history: UndoHistory | None = None
    merges: str | None = None
    pruned: tuple[PrunedRecord, ...] = ()
    instance: str = ""
    kept_bases: tuple[str, ...] = ()
    forks_made: int = 0
    family_limit: int | None = None
    family_bases: tuple[str, ...] = ()
    source: str | None = None
    base: str = ""
    ancestors: tuple[Ancestor, ...] = ()
    twin: tuple[StateId, StateId] | None = None

    @property
    def base_state(self) -> StateId | None:
        """The base of a fork, as this workspace has it."""
        if not self.ancestors:
            return None
        left_at = self.ancestors[-1].left_at
        return self.twin[0] if self.twin is not None and self.twin[1] == left_at else left_at

    @property
    def merge_log(self) -> MergeLog | None:
        """The merges into each state; None if the next daemon finds them elsewhere."""
        return None if self.merges is None else MergeLog(self.merges.encode())


def encoded(resume: Resume) -> bytes:
    """Encode what `decoded` returns."""
    # The standard library keeps the lone surrogates that represent bytes that are not UTF-8.
    return json.dumps(msgspec.to_builtins(resume)).encode()


def decoded(data: bytes) -> Resume:
    """Decode the result of `encoded`.  OSError (EPROTONOSUPPORT) for another version's."""
    found = json.loads(data)
    if found.get("format") != FORMAT:
        reason = (
            f"version {found.get('version')} of vfsd hands a workspace on in format {found.get('format')}, and version"
            f" {vfsd.__version__} reads format {FORMAT}: unmount it, and mount it again"
        )
        raise OSError(errno.EPROTONOSUPPORT, reason)
    return msgspec.convert(found, Resume)


_SLOT_BYTES: Final = 2 << 20  # more than all patterns and labels take
_HEADER: Final = "{:020} {:010} {:010}\n"  # the number of the change, and the length and the CRC of the text
_HEADER_BYTES: Final = 43


class Slots:
    """A `Resume` behind the first `offset` bytes of the file in memory `memory_fd`, whose writer may die at any moment.

    Invariant: the value of before a change, or that of after it, can be read at every moment.  There are two slots, and
    a change writes to the older one; the CRC shows whether it is complete.
    """

    def __init__(self, memory_fd: int, offset: int) -> None:
        self._memory_fd = memory_fd
        self._at = (offset, offset + _SLOT_BYTES)
        self._number, self._data = max(map(self._read, self._at), key=lambda found: found[0])

    def _read(self, slot: int) -> tuple[int, bytes]:
        words = os.pread(self._memory_fd, _HEADER_BYTES, slot).split()
        if len(words) == 3 and all(map(bytes.isdigit, words)):  # not zeros, or nothing
            number, length, crc = map(int, words)
            data = os.pread(self._memory_fd, length, slot + _HEADER_BYTES)
            if zlib.crc32(data) == crc:
                return number, data
        return 0, b""

    def read(self) -> Resume:
        """Return the value of this daemon, or the one before it; an empty one if there is none.  OSError."""
        return decoded(self._data) if self._data else Resume()

    def write(self, resume: Resume) -> None:
        """Replace the value.  OSError if there is no memory for it, or it is too large."""
        data = encoded(resume)
        if len(data) > _SLOT_BYTES - _HEADER_BYTES:
            raise OSError(errno.E2BIG, f"{len(data)} bytes are too many for what the next daemon is to know")
        number = self._number + 1
        header = _HEADER.format(number, len(data), zlib.crc32(data)).encode()
        os.pwrite(self._memory_fd, header + data, self._at[number % 2])
        self._number, self._data = number, data
