"""The journal of a workspace in memory: begins it, or continues from it (`--persist`).

`GroupSync` waits until a journal is on disk, with one fdatasync(2) for all calls that wait at the same time.  A sync
writes everything that was appended before it began.  So a call that comes while one runs waits for the next one,
together with all others that come meanwhile: the more calls wait, the fewer syncs each of them costs.

Threading of `GroupSync`: the serving loop; the syncs run one at a time in a worker thread.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import trio

from protocol.journal.directory import (
    Journal,
    JournalFiles,
    JournalReport,
    has_journal,
    read_below,
    read_identity,
    write_below,
)
from protocol.journal.records import JournalDamagedError
from vfsd.machine.directories import journal_directory
from vfsd.machine.logs import log_failure
from vfsd.wire.messages import from_wire_path, wire_path

if TYPE_CHECKING:
    from protocol.backends.memory import MemoryVolume
    from protocol.journal.log import Log
    from protocol.volume import Volume
    from protocol.volume_durability import JournalEnd
    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)
_KIND: Final = "backend"
_WORKSPACE: Final = "workspace"
_BELOW: Final = "below"
_ARGUMENT: Final = "argument"
_ESCAPED: Final = "escaped"  # the argument is a wire path
_FILTER: Final = "filter"
_FILTERS: Final = ("include", "exclude")
_LOCK_S: Final = 5.0
_LOCK_POLL_S: Final = 0.01


def keep_journal(
    options: MountOptions, volume: MemoryVolume, begin: Callable[[], None], *, below: str = "", reopening: bytes = b""
) -> str | None:
    """Have `volume`, which is empty, continue from its journal, or call `begin` and begin a journal.

    `below` is the fingerprint of an overlay's lower layer, and `reopening` what `Recorded.reopening` is at the next
    mount.  Return a sentence about the state that was found.
    ValueError if the journal belongs to another backend, or to an overlay over another layer; OSError.
    """
    directory = options.journal.journal_dir or journal_directory(options.workspace.name)
    identity: dict[str, str | int] = {
        _KIND: options.workspace.backend.kind,
        _WORKSPACE: options.workspace.name,
    }
    if below:
        content = options.content
        identity |= {
            _BELOW: below,
            _ARGUMENT: options.workspace.backend.argument,
            _FILTER: json.dumps([content.include, content.exclude]),
        }
        if any("\udc80" <= character <= "\udcff" for character in options.workspace.backend.argument):  # not UTF-8
            identity |= {_ARGUMENT: wire_path(os.fsencode(options.workspace.backend.argument)), _ESCAPED: 1}
    with _naming_read_only(directory):
        if not has_journal(directory):
            begin()
            # The directories above are private, too, if they are made.
            os.makedirs(os.path.dirname(directory), mode=0o700, exist_ok=True)
            journal = Journal.create(directory, identity, options.journal.fsync, below=reopening)
            try:
                volume.keep_journal(journal, is_new=True)
            except BaseException:
                journal.detach()
                raise
            found = None
        else:
            files, journal = Journal.resume(directory, options.journal.fsync)
            try:
                _check_identity(files, identity)
                _keep_reopening(directory, reopening)
                _replay(files, volume)
                volume.keep_journal(journal, is_new=False)
            except BaseException:
                journal.detach()
                raise
            found = _describe(volume, files.report(), has_archive=options.content.archive is not None)
    volume.sync_with(GroupSync().wait)
    return found


@contextmanager
def _naming_read_only(directory: str) -> Iterator[None]:
    """Have EROFS say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        reason = "the journal is on a read-only file system: make that writable, and mount the workspace again"
        raise OSError(errno.EROFS, reason, directory) from None


def check_continued(options: MountOptions) -> None:
    """Raise FileNotFoundError if a daemon that continues a mount has no journal, and would serve an empty workspace."""
    directory = options.journal.journal_dir or journal_directory(options.workspace.name)
    if options.journal.persist and not has_journal(directory):
        reason = (
            "the journal of the workspace was removed or moved, so no daemon can continue the mount: put it back, and"
            " mount the workspace again; or unmount it first, to begin without its content"
        )
        raise FileNotFoundError(errno.ENOENT, reason, directory)


class Recorded(NamedTuple):
    """The record that an overlay which continues has of its lower layer.

    `argument` is that of the backend, and `reopening` that of the `Lower`.
    """

    fingerprint: str = ""
    argument: str = ""
    reopening: bytes = b""


def recorded_below(options: MountOptions) -> Recorded:
    """Return what an overlay that continues has of its lower layer; an empty `Recorded` if it does not continue."""
    if options.below is not None:
        return Recorded(options.below.fingerprint, options.workspace.backend.argument, options.below.reopening)
    directory = options.journal.journal_dir or journal_directory(options.workspace.name)
    if not options.journal.persist or not has_journal(directory):
        return Recorded()
    identity = read_identity(directory)
    try:
        reopening = read_below(directory)
    except OSError as error:
        log_failure(_logger, "reading how to open the layer below", error, path=directory, level=logging.WARNING)
        reopening = b""
    argument = str(identity.get(_ARGUMENT, ""))
    if identity.get(_ESCAPED):
        argument = os.fsdecode(from_wire_path(argument))
    return Recorded(str(identity.get(_BELOW, "")), argument, reopening)


def _keep_reopening(directory: str, reopening: bytes) -> None:
    """Keep `reopening` in a journal that lacks it, or has a damaged one; log what fails, because the mount works."""
    try:
        if reopening and read_below(directory) != reopening:
            write_below(directory, reopening)
    except OSError as error:
        log_failure(_logger, "keeping how to open the layer below", error, path=directory, level=logging.WARNING)


def _check_identity(files: JournalFiles, identity: Mapping[str, str | int]) -> None:
    """ValueError if the journal is that of another backend, or of an overlay over another layer."""
    of = files.identity
    another = "give this one another --name or --journal-dir"
    if of.get(_KIND) != identity[_KIND]:
        kind = of.get(_KIND)
        raise ValueError(
            f"the journal {files.directory} is of a workspace with the backend {kind}: "
            f"mount it with --backend {kind}{'' if kind == 'memory' else ':...'}, or {another}"
        )
    if of.get(_BELOW) != identity.get(_BELOW):
        raise ValueError(
            f"the journal {files.directory} is of an overlay over {of.get(_ARGUMENT)}, and {identity[_ARGUMENT]} is not"
            f" that one, or not the same any more: mount it over the one that it was made over, or {another}"
        )
    if of.get(_FILTER) != identity.get(_FILTER):
        was = json.loads(str(of.get(_FILTER)))
        options = [f"--{name} {shlex.quote(each)}" for name, some in zip(_FILTERS, was, strict=True) for each in some]
        given = " ".join(options) or "neither --include nor --exclude"
        raise ValueError(f"the journal {files.directory} is of an overlay with {given}: mount it so, or {another}")


def _replay(files: JournalFiles, volume: MemoryVolume) -> None:
    """Rebuild the state."""
    was_enabled = gc.isenabled()
    gc.disable()  # it would look at every object again and again
    try:
        volume.replay(files.batches())
    except (KeyError, AssertionError) as error:
        reason = f"the journal does not describe a state ({error!r}): see `vfsd persisted check`"
        raise JournalDamagedError(files.directory, reason) from error
    finally:
        gc.freeze()  # before `enable`, which collects at once
        if was_enabled:
            gc.enable()


def _describe(volume: MemoryVolume, report: JournalReport, *, has_archive: bool) -> str:
    usage = volume.usage()
    text = f"continued from the journal (files: {usage.files}, snapshots: {len(volume.snapshots())})"
    if not report.is_clean:
        text += "; its daemon had died"
    if report.cut_bytes:
        text += f", and an interrupted write of {report.cut_bytes} bytes at the end does not count"
    if has_archive:
        text += "; --from was not read, because the workspace has content"
    return text


def continue_journal(options: MountOptions, volume: Volume, directory: str, end: JournalEnd) -> ContinuedJournal:
    """Have `volume`, which has the state at `end`, continue a journal that the predecessor hands over.  OSError."""
    journaled = cast("MemoryVolume", volume)
    journal = Journal.continued(directory, end, options.journal.fsync)
    journaled.keep_journal(journal, is_new=False)
    journaled.sync_with(GroupSync().wait)
    return ContinuedJournal(journaled, journal)


class ContinuedJournal:
    """A journal that the predecessor hands over.  Until `begin` nothing is written to it."""

    def __init__(self, volume: MemoryVolume, journal: Journal) -> None:
        self._volume = volume
        self._journal = journal

    async def begin(self, lock_fd: int | None) -> None:
        """Hold the lock with `lock_fd`; None: take it from the daemon, which died.  OSError."""
        with trio.fail_after(_LOCK_S):
            while True:
                try:
                    return self._journal.take_lock(lock_fd)
                except BlockingIOError:  # the kernel closes the descriptors of a process one by one
                    await trio.sleep(_LOCK_POLL_S)

    def end(self) -> None:
        """Sync and close it; log what fails."""
        end_journal(self._volume)


def end_journal(volume: MemoryVolume) -> None:
    """Sync and close the journal; log what fails."""
    journal = volume.journal
    try:
        volume.end_journal()
    except OSError as error:
        log_failure(_logger, "closing the journal", error, path=None if journal is None else journal.directory)


class GroupSync:
    """The syncs of one workspace's journal."""

    def __init__(self) -> None:
        self._running: trio.Event | None = None  # set when the sync that runs has ended
        self._thread = trio.CapacityLimiter(1)  # its own: other work in threads may take all of the usual ones

    async def wait(self, log: Log, end: int) -> None:
        """Return when everything before the offset `end` of `log` is on disk.  OSError.  Is not cancelled."""
        with trio.CancelScope(shield=True):
            while log.synced < end or log.failure is not None:
                if self._running is not None:
                    await self._running.wait()
                    continue
                self._running = trio.Event()
                try:
                    await trio.to_thread.run_sync(log.sync, limiter=self._thread)
                finally:
                    self._running.set()
                    self._running = None
