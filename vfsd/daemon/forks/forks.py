"""Fork a daemon: the new process serves a copy of the volume at a mountpoint of its own, and shares its memory.

Threading: the serving loop.  `Forks.start` blocks it until the new process exists (`vfsd.daemon.forks.process`).

A fork that is upgraded has not ended: a successor serves it, under the same name and with the same ancestors.

The new process runs a trio loop of its own, without the variables of systemd: the old process's unit is not its own.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import trio
from msgspec.structs import replace

from protocol.errors import SnapshotNotFoundError, shown
from protocol.values import Value
from protocol.volume_durability import journaled
from protocol.volume_extensions import ForkableVolume, SnapshotInfo, VolumeUsage, forkable, snapshotable
from vfsd.daemon.forks.family import ForkFamily, total
from vfsd.daemon.forks.process import SYSTEMD_VARIABLES, check_memory, detach, fork_process
from vfsd.daemon.merging.lineage import fork_point
from vfsd.daemon.resume import Resume
from vfsd.daemon.snapshots.base import MERGED_TAG, is_fork_base, is_merge_base
from vfsd.daemon.starting import serve_starter
from vfsd.machine import mounts
from vfsd.machine.logs import log_failure, log_path, open_log
from vfsd.machine.mountinfo import mount_at
from vfsd.machine.mounts import is_dead
from vfsd.machine.runtime import WorkspaceRecord, read_record, read_records, remove_record
from vfsd.operations.forks import Ancestor, Lineage, StateId
from vfsd.wire.options import Failed, JournalOptions, Ready, decode_report

if TYPE_CHECKING:
    from protocol.volume import Volume
    from vfsd.daemon.backends.registry import Backend
    from vfsd.daemon.merging.lineage import MergeLog
    from vfsd.daemon.snapshots.history import UndoHistory
    from vfsd.wire.options import MountOptions, PolicyOptions

_logger = logging.getLogger(__name__)
_NATIVE: Final = "native"
_INSTANCE_NOTE: Final = "instance"
_PUBLISH_S: Final = 1.0
START_TIMEOUT_S: Final = 60.0
_REPORT_BYTES: Final = 1 << 20


class Origin(Value):
    """The state that a fork starts with.

    `resume`: what its source hands on.  `restores_base`: the source changed since the base, or that is an older
    snapshot.  `family`: None for a fork over a stored snapshot, which shares no memory.
    """

    resume: Resume
    backend: Backend
    family: ForkFamily | None
    source_pid: int
    restores_base: bool = False

    @property
    def source(self) -> str:
        """The name of the workspace that it was made from."""
        return self.resume.source or ""

    @property
    def base(self) -> str:
        """The snapshot of both workspaces that is their last common state."""
        return self.resume.base


class Steps(NamedTuple):
    """The undo history of a workspace, and what was merged into each of its states."""

    history: UndoHistory
    merges: MergeLog


class RunFork(Protocol):
    """`vfsd.daemon.daemon.run_daemon`."""

    async def __call__(
        self, options: MountOptions, *, ready: Callable[[Ready], None], started_by: str, origin: Origin
    ) -> None: ...


class Forks:
    """Forks the daemon of the workspace that is mounted with `options`; the new process calls `run`."""

    def __init__(
        self,
        options: MountOptions,
        backend: Backend,
        engine: str,
        nursery: trio.Nursery,
        run: RunFork,
        origin: Origin | None,
        given: Resume | None = None,
        family: ForkFamily | None = None,
    ) -> None:
        """`given` and `family`: of a workspace that the predecessor hands over."""
        self.source_options = options
        self._backend = backend
        self._engine = engine
        self.nursery = nursery
        self._run = run
        self.base = None if origin is None else origin.resume.base_state
        self._source_pid = None if origin is None else origin.source_pid
        self.ancestors = () if origin is None else origin.resume.ancestors
        self.stored = backend.stored
        self.instance = given.instance if given is not None else _instance(options.workspace.name, backend)
        self.count = 0 if given is None else given.forks_made  # since the mount
        self.starting: list[str] = []  # the bases in the store of forks that do not serve yet
        self.twin = None if origin is None else origin.resume.twin
        self._family = family if origin is None else origin.family
        if given is not None and family is not None:
            self.volume.share_limit(family)
        if self._family is not None:
            nursery.start_soon(self._publish_memory)
        # By identity: after one of them was dropped, a user's snapshot may have its name.
        self._bases: Counter[StateId] = Counter()  # the running forks of each base that this process made
        self._kept: set[StateId] = set()  # the bases to drop when no fork needs them any more
        volume = snapshotable(backend.volume)
        if volume is not None and (given is not None or (origin is None and journaled(backend.volume) is not None)):
            bases = filter(is_fork_base, volume.snapshots())
            self._kept.update(StateId.of(info) for info in bases if given is None or info.name in given.kept_bases)

    @property
    def family_to_give(self) -> ForkFamily | None:
        """The table of the memory that this process shares with others, if there are any."""
        return self._family if self.others else None

    @property
    def kept_bases(self) -> tuple[str, ...]:
        """The names of the bases to drop when no fork needs them any more."""
        return tuple(each.name for each in self._kept if has_state(self._backend.volume, each))

    def use_policy(self, policy: PolicyOptions) -> None:
        """Give forks that are made from now on this policy."""
        self.source_options = replace(self.source_options, policy=policy)

    @property
    def is_possible(self) -> bool:
        """Whether a workspace with this backend can have forks."""
        return self.stored is not None or forkable(self._backend.volume) is not None

    @property
    def shares_memory(self) -> bool:
        """Whether this process shares memory with forks or with its source."""
        return self._family is not None

    @property
    def others(self) -> int:
        """The number of other processes that share memory with this one."""
        return 0 if self._family is None else self._family.others()

    def needed(self, infos: Sequence[SnapshotInfo]) -> Mapping[str, list[str]]:
        """Return the names of the workspaces that need a snapshot to be merged with this one, by the snapshot's name.

        `infos`: the snapshots to look at.  Any thread.
        """
        if not infos:
            return {}
        here = Lineage(self.instance, self.source_options.workspace.name, self.ancestors, (), ())
        found = _needed_states(here, infos)
        own = {StateId.of(info): info.name for info in infos}
        if self.twin is not None and self.twin[0] in own:
            own[self.twin[1]] = own[self.twin[0]]
        return {own[state]: names for state, names in found.items() if state in own}

    def temporary(self) -> str:
        """The directory for temporary files of a workspace whose snapshots are in a store."""
        assert self.stored is not None
        return self.stored.store.layout.tmp

    @property
    def volume(self) -> ForkableVolume:
        """The volume.  OSError (EOPNOTSUPP) if this workspace cannot be forked."""
        volume = forkable(self._backend.volume)
        if volume is None:
            kind = self.source_options.workspace.backend.kind
            advice = "export it, mount it with `vfsd mount MOUNTPOINT --backend overlay:FILE.zip`, and fork that"
            raise OSError(errno.EOPNOTSUPP, f"a workspace with the backend {kind} cannot be forked: {advice}")
        if self._engine != _NATIVE:
            raise OSError(
                errno.EOPNOTSUPP,
                f"the engine {self._engine} cannot be forked: mount the workspace with --engine {_NATIVE}",
            )
        return volume

    @property
    def base_of_source(self) -> StateId | None:
        """The base, if this is a fork whose source runs: then what the fork started with is not only here."""
        if self.base is None or self._source_pid == os.getppid():
            return self.base
        source = self.ancestors[-1]
        record = read_record(source.name)  # the source may have been mounted again
        is_running = record is not None and record.alive and record.instance == source.instance
        return self.base if is_running else None

    def is_base(self, info: SnapshotInfo) -> bool:
        """Whether a snapshot is the last common state of this workspace and a running fork, or of its source."""
        return StateId.of(info) == self.base or self._bases[StateId.of(info)] > 0

    def options(self, name: str, mountpoint: str) -> MountOptions:
        """The options of a fork: those of this workspace."""
        return replace(
            self.source_options,
            workspace=replace(self.source_options.workspace, name=name, mountpoint=mountpoint),
            content=replace(self.source_options.content, archive=None),
            journal=JournalOptions(),  # two daemons cannot append to one journal
        )

    def start(
        self,
        name: str,
        mountpoint: str,
        base: StateId,
        steps: Steps,
        *,
        restores_base: bool,
        keeps_base: bool,
    ) -> StartedFork:
        """Fork now.  With `keeps_base`, the snapshot `base` is dropped when the last fork that has this base has ended.

        The caller holds the workspace's `change_lock`, and awaited nothing since it looked at the state.

        OSError if the process cannot be made.
        """
        volume = self.volume
        self._drop_bases()
        check_memory()
        usage = volume.usage()
        family = self.family(volume, usage)
        family.check_fork(usage)
        family.bases.add(base.name)
        options = self.options(name, mountpoint)
        source = self.source_options.workspace.name
        ancestor = Ancestor(self.instance, source, base)
        ancestors = (*self.ancestors, ancestor)
        history, merges = steps
        resume = Resume(
            history=history,
            merges=merges.encoded().decode(),
            source=source,
            base=base.name,
            ancestors=ancestors,
            twin=self.twin,
        )
        origin = Origin(resume, self._backend, family, os.getpid(), restores_base)
        log_fd, _ = open_log(log_path(name))
        try:
            report_fd, child_report_fd = os.pipe()
            try:
                child = functools.partial(self._become, options, origin, log_fd, child_report_fd)
                pid, pidfds = fork_process(volume, child)
                self.count += 1
            except BaseException:
                os.close(report_fd)
                raise
            finally:
                os.close(child_report_fd)
        finally:
            os.close(log_fd)
        self._bases[base] += 1
        if keeps_base:
            self._kept.add(base)
        self.nursery.start_soon(self._reap, name, pid, pidfds[0], base)
        return StartedFork(report_fd, pidfds[1], pid, options.workspace.mountpoint, log_path(name))

    def family(self, volume: ForkableVolume, usage: VolumeUsage) -> ForkFamily:
        """Return the table of the memory that this process shares with others; the first call makes it."""
        if self._family is None:
            self._family = ForkFamily(usage.max_memory, total(usage))
            volume.share_limit(self._family)
            self.nursery.start_soon(self._publish_memory)
        return self._family

    def leave_family(self, volume: ForkableVolume) -> None:
        """Do without the table again if there was never a fork.  No process that writes an image is left."""
        if self._family is not None and self.base is None and not self.count:
            self._family = None
            volume.share_limit(None)

    async def _publish_memory(self) -> None:
        """Publish about once a second what this process takes of its family's memory."""
        family = self._family
        while family is not None and family is self._family:
            family.publish(total(self.volume.usage()))
            await trio.sleep(_PUBLISH_S)

    async def _reap(self, name: str, pid: int, pidfd: int, base: StateId) -> None:
        """Wait for a fork's end, so that it does not remain as a zombie; drop a base that no fork has any more."""
        try:
            await trio.lowlevel.wait_readable(pidfd)
            os.waitpid(pid, os.WNOHANG)
        finally:
            os.close(pidfd)
        self._bases[base] -= 1
        self._drop_bases()
        if await wait_upgraded(name, pid, self.instance):
            self._drop_bases()

    async def attend_stored(self, drop: Callable[[Collection[str]], Awaitable[None]]) -> None:
        """Drop the unused bases in the store now, and when a fork has ended that an earlier daemon made.

        `drop` does that; its argument has bases to keep.
        """
        await drop(())
        await self._at_each_end(lambda: drop(self.starting))

    async def attend_bases(self) -> None:
        """Drop the bases of forks that an earlier daemon of this workspace made, when these forks have ended."""

        async def drop() -> None:
            self._drop_bases()

        if self._kept:
            await drop()
            await self._at_each_end(drop)

    async def _at_each_end(self, act: Callable[[], Awaitable[None]]) -> None:
        """Call `act` when a fork ends that runs now; return when all have ended."""

        async def act_after(record: WorkspaceRecord) -> None:
            await wait_ended(record, self.instance)
            await act()

        async with trio.open_nursery() as nursery:
            for record in read_records():
                if is_below(record, self.instance):
                    nursery.start_soon(act_after, record)

    def _drop_bases(self) -> None:
        """Drop the bases that no fork has any more, and no fork of such a fork."""
        volume = snapshotable(self._backend.volume)
        assert volume is not None, "it was forked"
        infos = {StateId.of(info): info for info in volume.snapshots()}
        self._kept &= infos.keys()
        unused = [info for state, info in infos.items() if state in self._kept and not self._bases[state]]
        needed = self.needed(unused)
        for info in unused:
            if info.name not in needed:
                self._kept.remove(StateId.of(info))
                try:
                    volume.drop_snapshot(info.name)
                except SnapshotNotFoundError:  # dropped or pruned meanwhile
                    continue
                except OSError as error:  # of the journal, which the next change reports to its caller
                    log_failure(_logger, "dropping the base of a fork", error, path=info.name, level=logging.WARNING)

    def _become(self, options: MountOptions, origin: Origin, log_fd: int, report_fd: int) -> int:
        """Run the fork's daemon in the new process; return the exit status."""
        os.setsid()
        for standard in (1, 2):
            os.dup2(log_fd, standard)
        family = {origin.family.table} if origin.family is not None else set()
        detach({report_fd} | family, self.source_options.workspace.mountpoint)
        for name in SYSTEMD_VARIABLES:
            os.environ.pop(name, None)
        sys.argv[1:] = []
        run = functools.partial(self._run, started_by=f"a fork of {origin.source}", origin=origin)
        return serve_starter(options, report_fd, run)


def has_state(volume: Volume, state: StateId) -> bool:
    """Whether a snapshot of the volume is `state`, and not only has its name."""
    snapshots = snapshotable(volume)
    return snapshots is not None and any(StateId.of(info) == state for info in snapshots.snapshots())


def _instance(name: str, backend: Backend) -> str:
    """Return what identifies the workspace `name` in the lineage of its forks.

    One with a journal, or with its snapshots in a store, is the same when it is mounted again.
    """
    if backend.stored is not None:
        return backend.stored.store.layout.workspace_id(backend.stored.key)
    instance = secrets.token_hex(8)
    volume = journaled(backend.volume)
    if volume is not None:
        kept, _, of = volume.notes.get(_INSTANCE_NOTE, b"").decode().partition(" ")
        if of == name:  # a copy of a journal that is mounted under another name is another workspace
            return kept
        try:
            volume.note(_INSTANCE_NOTE, f"{instance} {name}".encode())
        except OSError as error:
            log_failure(_logger, "recording what identifies the workspace", error, level=logging.WARNING)
    return instance


# -- the start --------------------------------------------------------------------------------------
class StartedFork:
    """A process that does not serve yet.

    It reports on `report_fd` and logs to the file `log`; `pidfd` is a descriptor of it.
    """

    def __init__(self, report_fd: int, pidfd: int, pid: int, mountpoint: str, log: str) -> None:
        self._report_fd = report_fd
        self._pidfd = pidfd
        self._pid = pid
        self._mountpoint = mountpoint
        self._log = log

    async def ready(self) -> Ready:
        """Wait until the fork's mount answers.  If this is cancelled, the fork undoes its start and ends.

        OSError with the fork's message if it failed; EIO if it died; TimeoutError if it takes too long.
        """
        os.set_blocking(self._report_fd, False)
        received = b""
        try:
            with trio.move_on_after(START_TIMEOUT_S) as waiting:
                while not received.endswith(b"\n"):
                    await trio.lowlevel.wait_readable(self._report_fd)
                    piece = os.read(self._report_fd, _REPORT_BYTES)
                    if not piece:
                        await self._clear()
                        raise OSError(
                            errno.EIO, f"the fork's daemon died while starting: see {shown(os.fsencode(self._log))}"
                        )
                    received += piece
            if waiting.cancelled_caught:
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
                raise TimeoutError(errno.ETIMEDOUT, f"the fork did not start within {START_TIMEOUT_S:g} s")
        finally:
            os.close(self._report_fd)
            os.close(self._pidfd)
        report = decode_report(received)
        if isinstance(report, Failed):
            raise report.error()
        return report

    async def _clear(self) -> None:
        """Remove the mount and the record of a fork that died before it could undo its start."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(START_TIMEOUT_S):
                await trio.lowlevel.wait_readable(self._pidfd)  # it has closed all its descriptors
            await trio.to_thread.run_sync(_clear_dead, self._pid, self._mountpoint)


def _clear_dead(pid: int, mountpoint: str) -> None:
    mount = mount_at(mountpoint)
    if mount is not None and mount.is_vfsd and is_dead(mountpoint, timeout_s=START_TIMEOUT_S):
        mounts.clear_dead_mount(mountpoint, timeout_s=START_TIMEOUT_S)
    for record in read_records():
        if record.pid == pid and record.mountpoint == mountpoint and not record.alive:
            remove_record(record)


# -- the end ----------------------------------------------------------------------------------------
def is_below(record: WorkspaceRecord, instance: str) -> bool:
    """Whether the workspace of a record runs, and descends from `instance`."""
    return record.alive and any(each.instance == instance for each in record.ancestors)


def _upgraded(name: str, pid: int, instance: str) -> WorkspaceRecord | None:
    """Return the record of the fork `name` of `instance` if its daemon `pid` ended in an upgrade."""
    record = read_record(name)
    return None if record is None or record.pid == pid or not is_below(record, instance) else record


async def wait_upgraded(name: str, pid: int, instance: str) -> bool:
    """Wait for the end of the fork `name` of `instance` if its daemon `pid` ended in an upgrade; else return False."""
    record = _upgraded(name, pid, instance)
    if record is None:
        return False
    await wait_ended(record, instance)
    return True


async def wait_ended(record: WorkspaceRecord, instance: str) -> None:
    """Wait until the fork of a record has ended, which descends from `instance`, also if it is upgraded."""
    following: WorkspaceRecord | None = record
    while following is not None:
        record = following
        await _wait_daemon_ended(record)
        following = _upgraded(record.name, record.pid, instance)


async def _wait_daemon_ended(record: WorkspaceRecord) -> None:
    """Wait until the daemon of a record has ended."""
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if record.alive:  # and the number is still its own
            await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)


def _needed_states(here: Lineage, infos: Iterable[SnapshotInfo]) -> Mapping[StateId, list[str]]:
    """Return the names of the workspaces that need a state of `here`, by state.  `infos` are snapshots of `here`."""
    found: dict[StateId, list[str]] = {}
    running = [record for record in read_records() if record.alive]
    for record in running:
        state = None
        if record.instance not in ("", here.instance):
            state = fork_point(here, Lineage(record.instance, record.name, record.ancestors, (), ()))
        if state is not None:
            found.setdefault(state, []).append(record.name)
    names = {record.name for record in running}
    for info in infos:
        target = (info.tag or "").removeprefix(MERGED_TAG)
        if is_merge_base(info) and target in names:
            found.setdefault(StateId.of(info), []).append(target)
    return found
