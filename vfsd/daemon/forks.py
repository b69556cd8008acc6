"""Fork a daemon: the new process serves a copy of the volume at a mountpoint of its own, and shares its memory.

Threading: `Forks.fork` runs on the serving loop and blocks it while another thread calls fork(2), so no request changes
the state meanwhile.  That thread first takes the locks that threads of views and imports hold for moments
(`ForkableVolume.forking`).  It is the only thread of the new process, and runs a trio loop of its own there.

What the new process has of the old one:

- Descriptors.  Devices, sockets, pipes and the log are replaced by /dev/null, not closed: an object of the old process
  then closes that, and not a new descriptor of the same number.  That leaves about 13 more in each generation of
  forks of forks.  Files and directories below an overlay stay open.
- Tasks.  They are kept as they are, unreachable for the new loop.  If they were collected, their `finally` clauses
  would run, which remove the record of the old workspace and unmount it.
- Signal handlers and the variables of systemd, which are reset.
- Objects that the garbage collector does not examine any more (`gc.freeze`), because that would write to each of them.

The new process ends with `os._exit`: the interpreter's own end would collect the old tasks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import logging
import os
import secrets
import signal
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import trio
from msgspec.structs import replace

from protocol.errors import SnapshotNotFoundError
from protocol.values import Value
from protocol.volume_durability import journaled
from protocol.volume_extensions import ForkableVolume, SnapshotInfo, VolumeUsage, forkable, snapshotable
from vfsd.daemon.fork_family import ForkFamily, total
from vfsd.daemon.merging.lineage import Ancestor, Lineage, StateId
from vfsd.daemon.merging.needed import needed_states
from vfsd.daemon.snapshots.base import is_fork_base
from vfsd.daemon.started_fork import StartedFork
from vfsd.daemon.starting import serve_starter
from vfsd.machine.daemon_log import log_path, open_log
from vfsd.machine.logs import log_failure
from vfsd.machine.runtime import WorkspaceRecord, ensure_socket_dir, read_record, read_records
from vfsd.wire.handshake import Ready
from vfsd.wire.options import JournalOptions

if TYPE_CHECKING:
    from vfsd.daemon.backends import Backend
    from vfsd.daemon.merging.lineage import MergeLog
    from vfsd.daemon.snapshots.history import UndoHistory
    from vfsd.wire.options import MountOptions, PolicyOptions

_logger = logging.getLogger(__name__)
SYSTEMD: Final = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID")
_NATIVE: Final = "native"
_INSTANCE_NOTE: Final = "instance"
_DESCRIPTORS: Final = 512
_LAST_STANDARD: Final = 2
_MEMORY: Final = "/memfd:"  # before the names of files that are only in memory, in /proc
_PUBLISH_S: Final = 1.0
_old_tasks: list[object] = []  # of the processes that this one was forked from


class Origin(Value):
    """What a fork starts with.

    `base`: the snapshot of both workspaces that is their last common state.  `restores_base`: the source changed since
    that snapshot, or it is an older one.  `ancestors`: the workspaces that the fork descends from, the source last.
    `merges`: what was merged into each state.  `family`: None for a fork over a stored snapshot, which shares no
    memory.  `twin`: a snapshot of such a fork, or of its forks, and the stored snapshot that is the same state.
    """

    source: str
    base: str
    restores_base: bool
    backend: Backend
    history: UndoHistory
    ancestors: tuple[Ancestor, ...]
    merges: MergeLog
    family: ForkFamily | None
    source_pid: int
    twin: tuple[StateId, StateId] | None = None


class GivenForks(Value):
    """What the forks of a workspace were in the daemon that hands it over.

    `kept`: the bases to drop when no fork needs them any more.  `count`: how many forks it has made.
    """

    instance: str
    kept: tuple[str, ...]
    count: int
    family: ForkFamily | None


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
        given: GivenForks | None = None,
    ) -> None:
        """`given`: of a workspace that another daemon hands over."""
        self.source_options = options
        self._backend = backend
        self._engine = engine
        self.nursery = nursery
        self._run = run
        self.base = None if origin is None else origin.base
        self._source_pid = None if origin is None else origin.source_pid
        self.ancestors = () if origin is None else origin.ancestors
        self.stored = backend.stored
        self.instance = given.instance if given is not None else _instance(options.workspace.name, backend)
        self.count = 0 if given is None else given.count  # made since the mount
        self.starting: list[str] = []  # the bases in the store of forks that do not serve yet
        self.twin = None if origin is None else origin.twin
        self._family = None if origin is None else origin.family
        if given is not None and given.family is not None:
            self._family = given.family
            self.volume.share_limit(given.family)
        if self._family is not None:
            nursery.start_soon(self._publish_memory)
        self._bases: dict[str, int] = {}  # the running forks of each base that this process made
        self._kept: set[str] = set()  # the bases to drop when no fork needs them any more
        volume = journaled(backend.volume)
        if given is not None:
            self._kept.update(given.kept)
        elif volume is not None and origin is None:
            self._kept.update(info.name for info in volume.snapshots() if is_fork_base(info))

    @property
    def family_to_give(self) -> ForkFamily | None:
        """The table of the memory that this process shares with others, if there are any."""
        return self._family if self.others else None

    @property
    def kept_bases(self) -> tuple[str, ...]:
        """The bases to drop when no fork needs them any more."""
        return tuple(self._kept)

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
        found = needed_states(here, infos)
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
    def base_of_source(self) -> str | None:
        """The base, if this is a fork whose source runs: then what the fork started with is not only here."""
        if self.base is None or self._source_pid == os.getppid():
            return self.base
        source = self.ancestors[-1]
        record = read_record(source.name)  # the source may have been mounted again
        is_running = record is not None and record.alive and record.instance == source.instance
        return self.base if is_running else None

    def is_base(self, name: str) -> bool:
        """Whether snapshot `name` is the last common state of this workspace and a running fork, or of its source."""
        return name == self.base or self._bases.get(name, 0) > 0

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
        base: str,
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
        family.bases.add(base)
        options = self.options(name, mountpoint)
        source = self.source_options.workspace.name
        ancestor = Ancestor(self.instance, source, StateId.of(volume.snapshot(base)))
        ancestors = (*self.ancestors, ancestor)
        history, merges = steps
        origin = Origin(
            source,
            base,
            restores_base,
            self._backend,
            history,
            ancestors,
            merges,
            family,
            os.getpid(),
            self.twin,
        )
        log_fd, _ = open_log(log_path(name))
        try:
            report_fd, child_report_fd = os.pipe()
            try:
                child = functools.partial(self._become, options, origin, log_fd, child_report_fd)
                pid, pidfds = _fork(volume, child)
                self.count += 1
            except BaseException:
                os.close(report_fd)
                raise
            finally:
                os.close(child_report_fd)
        finally:
            os.close(log_fd)
        self._bases[base] = self._bases.get(base, 0) + 1
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

    async def _reap(self, name: str, pid: int, pidfd: int, base: str) -> None:
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

        async def drop_after(record: WorkspaceRecord) -> None:
            await _wait_ended(record, self.instance)
            await drop(self.starting)

        async with trio.open_nursery() as nursery:
            for record in read_records():
                if _is_below(record, self.instance):
                    nursery.start_soon(drop_after, record)

    async def attend_bases(self) -> None:
        """Drop the bases of forks that an earlier daemon of this workspace made, when these forks have ended."""
        if not self._kept:
            return
        self._drop_bases()
        async with trio.open_nursery() as nursery:
            for record in read_records():
                if _is_below(record, self.instance):
                    nursery.start_soon(self._drop_bases_after, record)

    async def _drop_bases_after(self, record: WorkspaceRecord) -> None:
        await _wait_ended(record, self.instance)
        self._drop_bases()

    def _drop_bases(self) -> None:
        """Drop the bases that no fork has any more, and no fork of such a fork."""
        volume = snapshotable(self._backend.volume)
        assert volume is not None, "it was forked"
        unused = [info for info in volume.snapshots() if info.name in self._kept and not self._bases.get(info.name)]
        needed = self.needed(unused)
        for info in unused:
            if info.name not in needed:
                self._kept.remove(info.name)
                try:
                    volume.drop_snapshot(info.name)
                except SnapshotNotFoundError:  # dropped or pruned meanwhile
                    continue
                except OSError as error:  # of the journal, which the next change reports to its caller
                    log_failure(_logger, "dropping the base of a fork", error, path=info.name, level=logging.WARNING)

    def _become(self, options: MountOptions, origin: Origin, log_fd: int, report_fd: int) -> int:
        """Run the fork's daemon in the new process; return the exit status."""
        os.setsid()
        _reset_signals()
        for standard in (1, 2):
            os.dup2(log_fd, standard)
        family = {origin.family.table} if origin.family is not None else set()
        _replace_descriptors({0, 1, 2, report_fd} | family, self.source_options.workspace.mountpoint)
        for name in SYSTEMD:
            os.environ.pop(name, None)
        sys.argv[1:] = []
        run = functools.partial(self._run, started_by=f"a fork of {origin.source}", origin=origin)
        return serve_starter(options, report_fd, run)


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


def _is_below(record: WorkspaceRecord, instance: str) -> bool:
    """Whether the workspace of a record runs, and descends from `instance`."""
    return record.alive and any(each.instance == instance for each in record.ancestors)


def _upgraded(name: str, pid: int, instance: str) -> WorkspaceRecord | None:
    """Return the record of the fork `name` of `instance` if its daemon `pid` ended in an upgrade."""
    record = read_record(name)
    return None if record is None or record.pid == pid or not _is_below(record, instance) else record


async def wait_upgraded(name: str, pid: int, instance: str) -> bool:
    """Wait for the end of the fork `name` of `instance` if its daemon `pid` ended in an upgrade; else return False."""
    record = _upgraded(name, pid, instance)
    if record is None:
        return False
    await _wait_ended(record, instance)
    return True


async def _wait_ended(record: WorkspaceRecord, instance: str) -> None:
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
        if record.alive:  # it is not another process with the same number
            await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)


def check_memory(what: str = "a fork may come to need as much memory as its source") -> None:
    """OSError (ENOMEM) if there is no memory for another process of this size.  `what` needs it: a clause."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo", encoding="ascii") as file:
        available = next((int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")), resident)
    if resident > available:
        raise OSError(
            errno.ENOMEM,
            f"{what}, {resident >> 20} MiB, and {available >> 20} MiB are available",
        )


def fork_writer(
    volume: ForkableVolume,
    write: Callable[[], None],
    mountpoint: str,
    started: Callable[[int], None] = lambda _: None,
    *,
    kept: Collection[int] = (),
) -> tuple[int, list[int]]:
    """Fork a process that calls `write` with the present state, after this process called `started` with its id.

    It keeps the descriptors `kept`.

    It ends with status 0 if that returns, with the errno of an OSError, and with 1 after another exception.

    Return its process id and two descriptors of the process.  The caller awaited nothing since it chose the state.
    """

    def run() -> int:
        gc.disable()
        _reset_signals()
        _replace_descriptors({0, 1, 2, *kept}, mountpoint)
        try:
            write()
        except OSError as error:
            return error.errno or 1
        return 0

    return _fork(volume, run, keeps_state=True, started=started)


def _fork(
    volume: ForkableVolume,
    child: Callable[[], int],
    *,
    keeps_state: bool = False,
    started: Callable[[int], None] = lambda _: None,
) -> tuple[int, list[int]]:
    """Call fork(2) in a thread while this one waits; run `child` in the new process.

    With `keeps_state` the new process only reads the volume, which keeps what belongs to the old one's kernel.

    Return its process id and two descriptors of the process.  The new process waits until they are open: if they
    cannot be opened (EMFILE), or this process dies before, it ends without a trace.
    """
    made: list[tuple[int, list[int]] | OSError] = []
    child_go_fd, go_fd = os.pipe()
    _old_tasks.append(trio.lowlevel.current_root_task())

    def run() -> None:
        try:
            with warnings.catch_warnings(), volume.forking():
                # Python 3.12: "This process is multi-threaded, use of fork() may lead to deadlocks in the child."
                warnings.simplefilter("ignore", DeprecationWarning)
                gc.freeze()
                pid = os.fork()
        except OSError as error:
            made.append(error)
            return
        if pid:
            started(pid)
            made.append(_let_go(pid, go_fd))
            return
        status = 1
        try:
            os.close(go_fd)
            if not os.read(child_go_fd, 1):
                return  # to `os._exit`
            os.close(child_go_fd)
            if not keeps_state:
                volume.forked()
            status = child()
        except BaseException:  # noqa: BLE001 (it must not return to the thread's end, which waits for other threads)
            traceback.print_exc()
        finally:
            os._exit(status)

    try:
        thread = threading.Thread(target=run, name="vfsd-fork")
        thread.start()
        thread.join()
    finally:
        os.close(child_go_fd)
        os.close(go_fd)
        _old_tasks.pop()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _let_go(pid: int, go_fd: int) -> tuple[int, list[int]] | OSError:
    """Open two descriptors of the new process and let it run; if that fails, end it and return the error."""
    pidfds: list[int] = []
    try:
        pidfds.append(os.pidfd_open(pid))
        pidfds.append(os.pidfd_open(pid))
    except OSError as error:
        for each in pidfds:
            os.close(each)
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        os.waitpid(pid, 0)
        return OSError(error.errno or errno.EIO, f"no fork was made, for lack of a descriptor: {error.strerror}")
    with contextlib.suppress(BrokenPipeError):  # it was killed: its report will be missing
        os.write(go_fd, b"\0")
    return pid, pidfds


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _replace_descriptors(kept: set[int], mountpoint: str) -> None:
    """Replace by /dev/null what belongs to the old process: all but regular files and directories of other places."""
    belongs = tuple(path.rstrip("/") + "/" for path in (mountpoint, ensure_socket_dir(), "/proc"))
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    # The kernel enlarges a table of descriptors here at once, but waits 10 to 15 ms (synchronize_rcu) if threads share
    # it, and this process has only one thread yet.
    with contextlib.suppress(OSError):  # a lower RLIMIT_NOFILE
        os.close(os.dup2(null, _DESCRIPTORS - 1, inheritable=False))
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        if descriptor in kept or descriptor == null:
            continue
        if _is_spare(descriptor):
            os.close(descriptor)  # a number without an object
            continue
        try:
            kind = stat.S_IFMT(os.stat(descriptor).st_mode) if not _is_in(descriptor, belongs) else 0
        except OSError:
            continue  # the descriptor of the listing
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _is_in(descriptor: int, places: tuple[str, ...]) -> bool:
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    return (path + "/").startswith(places) or path.startswith(_MEMORY)


def _is_spare(descriptor: int) -> bool:
    """Whether this is a descriptor of `SpareDescriptors`: /dev/null, and other than a replaced one only for reading."""
    with contextlib.suppress(OSError):
        opened = os.stat(descriptor).st_rdev, fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        return descriptor > _LAST_STANDARD and opened == (os.stat(os.devnull).st_rdev, os.O_RDONLY)
    return False
