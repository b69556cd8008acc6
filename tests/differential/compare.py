"""Bench: one mount of vfsd and one tmpfs, episodes of calls on both, and the first difference between them."""

from __future__ import annotations

import contextlib
import errno
import json
import marshal
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.differential.calls import WORKERS, Call, random_calls
from tests.differential.executor import MARSHAL_VERSION, receive, send
from tests.differential.known import Difference, Known, avoided, avoided_call, reason
from tests.support.zygote import starting_interpreters
from vfsd.client.connection import ControlClient
from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace
from vfsd.wire.options import CacheChoice

__all__ = ["Bench", "Hung", "executors", "mount_flags"]

_REPOSITORY: Final = Path(__file__).parents[2]
MAX_BYTES: Final = 64 * 1024 * 1024
_ANSWER_S: Final = 60.0  # an executor that takes longer hangs
_ATTRIBUTES: Final = (
    "mode", "nlink", "uid", "gid", "size", "blocks", "rdev", "atime", "mtime", "ctime", "order of times",
)  # fmt: skip
_COMPLAINT: Final = re.compile(r" (warning|error) |Traceback")
_LINES_TOLD: Final = 40  # of the daemon's log, when something fails
_SETTLE_TRIES: Final = 30
_TREE_CALL: Final = ("tree", ())


class Hung(Exception):
    """An executor did not answer, or died: `call` is among what it was doing."""


class _Parted(Exception):
    """A known difference after which others follow from it: the episode ends."""


class Bench:
    """Both file systems, below `directory`, which must be empty.  A context manager; needs root."""

    def __init__(self, engine: str, directory: Path, runtime_dir: str, *, cache: CacheChoice = "writethrough") -> None:
        self.engine = engine
        self.cache: CacheChoice = cache
        self.without = avoided(engine)
        self.seen: dict[Known, int] = {}  # known differences, and how often
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._socket_dir = os.path.join(runtime_dir, "vfsd")
        self._episodes = 0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.tmpfs = self._mount_tmpfs(stack)
            self.mount = self._mount_vfsd(stack)
            self._nursery = stack.enter_context(executors(write_back=self.cache == "writeback"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            error.add_note("\n".join(self._complaints()[-_LINES_TOLD:]))
        self._stack.close()

    def _mount_tmpfs(self, stack: contextlib.ExitStack) -> str:
        place = self._directory / "tmpfs"
        place.mkdir()
        options = f"nosuid,nodev,mode=755,nr_inodes=1000000,size={MAX_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "oracle", str(place)], check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(place)], check=True)
        return str(place)

    def _mount_vfsd(self, stack: contextlib.ExitStack) -> str:
        place = self._directory / "vfsd"
        place.mkdir()
        self.workspace = stack.enter_context(
            Workspace.mount(
                place, engine=self.engine, name=f"diff-{self._directory.name}-{os.getpid()}",  # type: ignore[arg-type]
                max_bytes=MAX_BYTES, allow_other=True, cache=self.cache,
            )
        )  # fmt: skip
        return str(place)

    # -- runs ------------------------------------------------------------------------------------
    def calls(self, chance: random.Random, count: int) -> list[Call]:
        """About `count` calls for one episode; the same `chance` gives the same calls."""
        return self._offered(random_calls(chance, count, self.without))

    def _offered(self, calls: Iterable[Call]) -> list[Call]:
        return [call for call in calls if not avoided_call(self.cache, call)]

    def run(self, calls: Sequence[Call], tree_every: int | None = None) -> Difference | None:
        """Make `calls` in fresh directories of both; the first difference that is not a known one, if any.

        The trees are compared at the end, and after every `tree_every` calls.
        """
        try:
            with self._roots() as roots:
                return self._compare_in(roots, calls, tree_every)
        except _Parted:
            return None

    def _compare_in(self, roots: Sequence[str], calls: Sequence[Call], tree_every: int | None) -> Difference | None:
        with contextlib.ExitStack() as stack:
            teams = [stack.enter_context(self._nursery.team(root)) for root in roots]
            return self._compare(calls, teams, tree_every)

    def _make(self, root: str, calls: Sequence[Call]) -> None:
        """Make `calls` in `root`, whatever they answer."""
        with self._nursery.team(root) as team:
            for worker, group in groupby(calls, key=lambda call: call.worker):
                _ask([team], worker, [(call.operation, call.args) for call in group])

    @contextlib.contextmanager
    def _roots(self) -> Iterator[list[str]]:
        """Fresh directories, of tmpfs and of the mount."""
        self._episodes += 1
        roots = [os.path.join(root, f"run-{self._episodes}") for root in (self.tmpfs, self.mount)]
        try:
            for root in roots:
                os.mkdir(root)
                os.stat(root)  # else tmpfs takes the coarse clock for the next line, and its times do not differ
                os.chmod(root, 0o777)
            yield roots
        finally:
            for root in roots:
                shutil.rmtree(root)

    def check(self) -> None:
        """Have the daemon check its own state, and look for complaints in its log.  AssertionError."""
        with ControlClient(os.path.join(self._socket_dir, self.workspace.name + ".sock")) as client:
            client.call("check")
        complaints = [line for line in self._complaints() if _COMPLAINT.search(line)]
        assert not complaints, "\n".join(complaints)

    def _complaints(self) -> list[str]:
        """The lines of the daemon's log, without those that it always has."""
        with open(log_path(self.workspace.name), encoding="utf-8") as log:
            return [line for line in log.read().splitlines() if " info " not in line]

    def _compare(self, calls: Sequence[Call], teams: list[Team], tree_every: int | None) -> Difference | None:
        done = since = 0
        for worker, group in groupby(calls, key=lambda call: call.worker):
            batch = list(group)
            while batch:
                part = batch[: tree_every - since] if tree_every else batch
                batch = batch[len(part) :]
                found = self._compare_batch(done, worker, part, teams)
                if found:
                    return found
                done += len(part)
                since += len(part)
                if tree_every and since >= tree_every:
                    since = 0
                    if found := self._compare_trees(done - 1, teams):
                        return found
        return self._compare_trees(len(calls) - 1, teams)

    def _compare_batch(self, done: int, worker: int, batch: list[Call], teams: list[Team]) -> Difference | None:
        request = [(call.operation, call.args) for call in batch]
        expected, found = _ask(teams, worker, request)
        if expected == found:
            return None
        for number, (call, tmpfs, mount) in enumerate(
            zip(batch, marshal.loads(expected), marshal.loads(found), strict=True), done
        ):
            if tmpfs != mount:
                for difference in _differences(number, call, tmpfs, mount):
                    if self._unknown(call, difference):
                        return difference
        return None

    def _compare_trees(self, index: int, teams: list[Team]) -> Difference | None:
        for _ in range(_SETTLE_TRIES):
            expected, found = _ask(teams, 0, [_TREE_CALL])
            if expected == found:
                return None
            (tmpfs,), (mount,) = marshal.loads(expected), marshal.loads(found)
            # Its last entry is statfs: what is freed by a file's last close shows a moment later, in both.
            if tmpfs[:-1] != mount[:-1]:
                break
        call = Call(0, "tree", ())
        for difference in _tree_differences(index, dict(tmpfs), dict(mount)):
            if self._unknown(call, difference):
                return difference
        return None

    def _unknown(self, call: Call, difference: Difference) -> bool:
        known = reason(self.engine, self.cache, call, difference)
        if known is not None:
            self.seen[known] = self.seen.get(known, 0) + 1
            if known.ends_episode:
                raise _Parted
        return known is None


def _ask(teams: list[Team], worker: int, request: list[Any]) -> list[bytes]:
    """What each team's `worker` answers, both working at the same time."""
    for team in teams:
        send(team[worker], request)
    try:
        return [receive(team[worker]) for team in teams]
    except (EOFError, OSError) as error:
        raise Hung(f"worker {worker} did not answer to {request!r}: {error!r}") from error


def _differences(number: int, call: Call, tmpfs: Any, mount: Any) -> Iterator[Difference]:
    (expected, places), (found, others) = tmpfs, mount
    kind = places[0][1][0][0] if places and not isinstance(places[0][1], str) else ""
    if expected != found:
        yield Difference(number, call.operation, "answer", expected, found, kind=kind)
    succeeded = expected[0] == found[0] == "ok"
    for (label, one), (_, other) in zip(places, others, strict=True):
        if one == other:
            continue
        if isinstance(one, str) or isinstance(other, str):
            yield Difference(number, call.operation, f"{label}: stat", one, other)
            continue
        for name, left, right in zip(_ATTRIBUTES, one, other, strict=True):
            if left != right:
                yield Difference(number, call.operation, f"{label}: {name}", left, right, succeeded, kind)


def _tree_differences(index: int, tmpfs: dict[bytes, Any], mount: dict[bytes, Any]) -> Iterator[Difference]:
    for path in sorted(tmpfs.keys() | mount.keys()):
        one, other = tmpfs.get(path), mount.get(path)
        if one == other:
            continue
        if one is None or other is None or path == b"statfs":
            yield Difference(index, "tree", f"{path!r}: presence" if path != b"statfs" else "statfs", one, other)
            continue
        for name, left, right in zip(_ATTRIBUTES, one[0], other[0], strict=True):
            if left != right:
                yield Difference(index, "tree", f"{path!r}: {name}", left, right)
        for name, left, right in zip(("same inode", "target", "xattrs", "content"), one[1:], other[1:], strict=True):
            if left != right:
                yield Difference(index, "tree", f"{path!r}: {name}", left, right)


# -- executors -----------------------------------------------------------------------------------
Team = list[socket.socket]


class _Nursery:
    """Starts executors (see `executor`)."""

    def __init__(self, channel: socket.socket, *, write_back: bool = False) -> None:
        self._channel = channel
        self._write_back = write_back

    @contextlib.contextmanager
    def team(self, root: str) -> Iterator[Team]:
        """An executor for each of WORKERS, in `root`."""
        with contextlib.ExitStack() as stack:
            team = []
            for uid, gid, groups in WORKERS:
                ours, theirs = socket.socketpair()
                with theirs:
                    role = {"root": root, "uid": uid, "gid": gid, "groups": groups, "write_back": self._write_back}
                    socket.send_fds(self._channel, [json.dumps(role).encode()], [theirs.fileno()])
                    self._channel.recv(1)
                ours.settimeout(_ANSWER_S)
                team.append(stack.enter_context(ours))
            yield team
            # Gone once their ends are closed; what they had open must be closed before directories are compared.
            for channel in team:
                channel.shutdown(socket.SHUT_WR)
            for channel in team:
                with contextlib.suppress(OSError):
                    channel.recv(1)


@contextlib.contextmanager
def executors(*, write_back: bool = False) -> Iterator[_Nursery]:
    """A nursery of executors.  `write_back`: see `Observer`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        # A fork of the zygote would give every executor the memory and the modules of all of vfsd.
        with theirs, starting_interpreters():
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.differential.executor", str(theirs.fileno())],
                cwd=_REPOSITORY, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            yield _Nursery(ours, write_back=write_back)
        finally:
            ours.close()
            process.wait(timeout=_ANSWER_S)


def mount_flags(path: str) -> set[str]:
    """The per-mount options that the kernel lists for the mount at `path`."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split()
            if fields[4] == path:
                return set(fields[5].split(","))
    raise OSError(errno.ENOENT, "not a mountpoint", path)


assert MARSHAL_VERSION == 2, "answers are compared as bytes"
