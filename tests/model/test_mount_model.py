"""Random work on a real mount, with snapshots, restores and drops in between, against a plain model.

The system calls are made by this process, the daemon is another one; after every step the whole mount is
compared with the model (names, absent names, types, content, modes, link counts, attributes; inode numbers and
times of what was not touched), so are the files that are kept open, and the daemon checks its invariants.
"""

from __future__ import annotations

import copy
import errno
import itertools
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from protocol.errors import os_error
from tests.support.rights import needs_root
from vfsd.client.connection import ControlClient
from vfsd.client.results import Restored
from vfsd.client.workspace import Workspace
from vfsd.machine.runtime import socket_path

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

NAMES = ("a", "b", "c", "d")
SNAPSHOTS = ("s1", "s2", "s3")
SIZES = (0, 1, 4096, 10_000, 70_000)

at = st.integers(0, 63)  # one of what there is, whatever there is
names = st.sampled_from(NAMES)
fills = st.sampled_from([b"x", b"yz", b"0123456"])


@dataclass(eq=False)
class Node:
    """A file, directory or symlink; one object for all its hard links.

    `ident` stays over copies; `inode` and `mtime_ns` are what was seen, None where that may have changed.
    `is_older`: a restore put it there, and it may be one of before.
    """

    ident: int
    kind: int
    mode: int
    data: bytes = b""
    xattr: bytes | None = None
    entries: dict[str, Node] = field(default_factory=dict)
    inode: int | None = None
    mtime_ns: int | None = None
    is_older: bool = False
    mapped: bool = False  # written back when the kernel likes: then its time changes

    @property
    def is_dir(self) -> bool:
        return self.kind == stat.S_IFDIR


@dataclass(frozen=True, slots=True)
class State:
    """A snapshot of the model; `last_ident` is the newest that existed then."""

    root: Node
    last_ident: int


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    yield path, node
    for name, child in sorted(node.entries.items()):
        yield from walk(child, f"{path}/{name}" if path else name)


def shown(root: Node) -> dict[str, tuple[int, int, bytes, bytes | None]]:
    """What a user sees of a tree."""
    return {path: (node.kind, node.mode, node.data, node.xattr) for path, node in walk(root)}


def filled(pattern: bytes, size: int) -> bytes:
    return (pattern * (size // len(pattern) + 1))[:size]


class MountMachine(RuleBasedStateMachine):
    def __init__(self, workspace: Workspace, client: ControlClient) -> None:
        super().__init__()
        self.workspace = workspace
        self.client = client
        self.mount = workspace.path
        for name in os.listdir(self.mount):
            path = f"{self.mount}/{name}"
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        for info in workspace.snapshots(changes=False):
            workspace.drop(info.name)
        for name in os.listxattr(self.mount):
            os.removexattr(self.mount, name)
        os.chmod(self.mount, 0o755)
        self.idents = itertools.count(1)
        self.last_ident = 0
        self.root = Node(0, stat.S_IFDIR, 0o755)
        self.taken: dict[str, State] = {}
        # The states that undo and redo lead to; the one at `position` is the live one's, and is set when that is left.
        self.history: list[State | None] = [None]
        self.position = 0
        self.open: dict[int, Node] = {}
        self.mappings: list[mmap.mmap] = []

    def teardown(self) -> None:
        for mapping in self.mappings:
            mapping.close()
        for fd in self.open:
            os.close(fd)
        self.open.clear()

    # -- choosing ----------------------------------------------------------------------------------
    def paths(self, wanted: Callable[[Node], bool]) -> list[tuple[str, Node]]:
        return [(path, node) for path, node in walk(self.root) if wanted(node)]

    def one(self, number: int, wanted: Callable[[Node], bool]) -> tuple[str, Node] | None:
        found = self.paths(wanted)
        return found[number % len(found)] if found else None

    def directory(self, number: int) -> tuple[str, Node]:
        found = self.one(number, lambda node: node.is_dir)
        assert found is not None
        return found

    def real(self, path: str) -> str:
        return f"{self.mount}/{path}" if path else self.mount

    def new(self, kind: int, mode: int, data: bytes = b"") -> Node:
        self.last_ident = next(self.idents)
        return Node(self.last_ident, kind, mode, data)

    def agree(self, real: Callable[[], object], model: Callable[[], object]) -> bool:
        """Both succeed, or fail with the same errno; whether they did succeed."""
        expected = got = 0
        try:
            model()
        except OSError as error:
            expected = error.errno or 0
        try:
            real()
        except OSError as error:
            got = error.errno or 0
        assert errno.errorcode.get(got) == errno.errorcode.get(expected)
        return not expected

    # -- making --------------------------------------------------------------------------------------
    def enter(self, directory: Node, name: str, node: Node) -> None:
        if name in directory.entries:
            raise os_error(errno.EEXIST)
        directory.entries[name] = node
        directory.mtime_ns = None

    @rule(into=at, name=names, pattern=fills, size=st.sampled_from(SIZES), keep=st.booleans())
    def create(self, into: int, name: str, pattern: bytes, size: int, keep: bool) -> None:
        path, directory = self.directory(into)
        data = filled(pattern, size)
        node = self.new(stat.S_IFREG, 0o600, data)

        def real() -> None:
            fd = os.open(f"{self.real(path)}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            assert os.write(fd, data) == len(data)
            if keep and len(self.open) < 4:
                self.open[fd] = node
            else:
                os.close(fd)

        self.agree(real, lambda: self.enter(directory, name, node))

    @rule(into=at, name=names)
    def mkdir(self, into: int, name: str) -> None:
        path, directory = self.directory(into)
        if path.count("/") < 3:
            node = self.new(stat.S_IFDIR, 0o700)
            self.agree(lambda: os.mkdir(f"{self.real(path)}/{name}", 0o700), lambda: self.enter(directory, name, node))

    @rule(into=at, name=names, to=names)
    def symlink(self, into: int, name: str, to: str) -> None:
        path, directory = self.directory(into)
        node = self.new(stat.S_IFLNK, 0o777, to.encode())
        self.agree(lambda: os.symlink(to, f"{self.real(path)}/{name}"), lambda: self.enter(directory, name, node))

    @rule(which=at, into=at, name=names)
    def link(self, which: int, into: int, name: str) -> None:
        source = self.one(which, lambda node: not node.is_dir)
        path, directory = self.directory(into)
        if source is not None:
            self.agree(
                lambda: os.link(self.real(source[0]), f"{self.real(path)}/{name}", follow_symlinks=False),
                lambda: self.enter(directory, name, source[1]),
            )

    # -- changing --------------------------------------------------------------------------------------
    @rule(which=at, offset=st.sampled_from(SIZES), pattern=fills, size=st.sampled_from(SIZES))
    def write(self, which: int, offset: int, pattern: bytes, size: int) -> None:
        found = self.one(which, lambda node: node.kind == stat.S_IFREG)
        if found is not None:
            data = filled(pattern, size)
            fd = os.open(self.real(found[0]), os.O_WRONLY)
            try:
                os.pwrite(fd, data, offset)
            finally:
                os.close(fd)
            self.written(found[1], offset, data)

    def written(self, node: Node, offset: int, data: bytes) -> None:
        if data:
            node.data = node.data[:offset].ljust(offset, b"\0") + data + node.data[offset + len(data) :]
            node.mtime_ns = None

    @rule(which=at, size=st.sampled_from(SIZES))
    def truncate(self, which: int, size: int) -> None:
        found = self.one(which, lambda node: node.kind == stat.S_IFREG)
        if found is not None:
            os.truncate(self.real(found[0]), size)
            found[1].data = found[1].data[:size].ljust(size, b"\0")
            found[1].mtime_ns = None

    @rule(which=at, mode=st.sampled_from([0o600, 0o644, 0o755]))
    def chmod(self, which: int, mode: int) -> None:
        found = self.one(which, lambda node: node.kind != stat.S_IFLNK)
        if found is not None:
            os.chmod(self.real(found[0]), mode)
            found[1].mode = mode

    @rule(which=at, value=fills)
    def setxattr(self, which: int, value: bytes) -> None:
        found = self.one(which, lambda node: node.kind != stat.S_IFLNK)
        if found is not None:
            os.setxattr(self.real(found[0]), "user.test", value)
            found[1].xattr = value

    # -- removing and moving -----------------------------------------------------------------------------
    @rule(into=at, name=names, directory=st.booleans())
    def remove(self, into: int, name: str, directory: bool) -> None:
        path, parent = self.directory(into)

        def model() -> None:
            node = parent.entries.get(name)
            if node is None:
                raise os_error(errno.ENOENT)
            if directory != node.is_dir:
                raise os_error(errno.ENOTDIR if directory else errno.EISDIR)
            if node.entries:
                raise os_error(errno.ENOTEMPTY)
            del parent.entries[name]
            parent.mtime_ns = None

        self.agree(lambda: (os.rmdir if directory else os.unlink)(f"{self.real(path)}/{name}"), model)

    @rule(which=at)
    def remove_tree(self, which: int) -> None:
        found = self.one(which, lambda node: node.is_dir and node is not self.root)
        if found is not None:
            path, _ = found
            shutil.rmtree(self.real(path))
            above, name = self.parent_of(path)
            del above.entries[name]
            above.mtime_ns = None

    def parent_of(self, path: str) -> tuple[Node, str]:
        above, _, name = path.rpartition("/")
        return dict(walk(self.root))[above], name

    @rule(which=at, into=at, name=names)
    def rename(self, which: int, into: int, name: str) -> None:
        found = self.one(which, lambda node: node is not self.root)
        if found is None:
            return
        source, node = found
        path, target = self.directory(into)
        goal = f"{path}/{name}" if path else name

        def model() -> None:
            """The order of the checks is the kernel's (do_renameat2 and vfs_rename in fs/namei.c)."""
            above, old_name = self.parent_of(source)
            victim = target.entries.get(name)
            if node.is_dir and (path + "/").startswith(source + "/"):
                raise os_error(errno.EINVAL)
            if victim is not None and source.startswith(goal + "/"):
                raise os_error(errno.ENOTEMPTY)
            if victim is node:
                return
            if victim is not None and victim.is_dir != node.is_dir:
                raise os_error(errno.ENOTDIR if node.is_dir else errno.EISDIR)
            if victim is not None and victim.entries:
                raise os_error(errno.ENOTEMPTY)
            del above.entries[old_name]
            target.entries[name] = node
            above.mtime_ns = target.mtime_ns = None

        self.agree(lambda: os.rename(self.real(source), self.real(goal)), model)

    # -- open files ----------------------------------------------------------------------------------------
    @rule(which=at)
    def open_file(self, which: int) -> None:
        found = self.one(which, lambda node: node.kind == stat.S_IFREG)
        if found is not None and len(self.open) < 4:
            self.open[os.open(self.real(found[0]), os.O_RDWR)] = found[1]

    @precondition(lambda self: self.open)
    @rule(which=at, offset=st.sampled_from(SIZES), pattern=fills)
    def write_open(self, which: int, offset: int, pattern: bytes) -> None:
        fd, node = list(self.open.items())[which % len(self.open)]
        os.pwrite(fd, pattern, offset)
        self.written(node, offset, pattern)

    def write_mapped(self, which: int | None) -> None:
        """Never synced; to be called right before what has to find it all the same.

        The kernel writes pages back when a mapping, or any descriptor of the file, is closed: the mapping stays,
        and the comparison comes only after the step.
        """
        some = [(fd, node) for fd, node in self.open.items() if node.data]
        if which is None or not some:
            return
        fd, node = some[which % len(some)]
        pattern = b"%d" % which
        mapping = mmap.mmap(fd, 0)
        self.mappings.append(mapping)
        pattern = pattern[: len(mapping)]
        mapping[: len(pattern)] = pattern
        node.data = pattern + node.data[len(pattern) :]
        node.mapped = True

    @precondition(lambda self: self.open)
    @rule(which=at)
    def close(self, which: int) -> None:
        fd = list(self.open)[which % len(self.open)]
        del self.open[fd]
        os.close(fd)

    # -- snapshots -----------------------------------------------------------------------------------------
    def state(self) -> State:
        return State(copy.deepcopy(self.root), self.last_ident)

    @rule(name=st.sampled_from(SNAPSHOTS), dirty=st.none() | at)
    def snapshot(self, name: str, dirty: int | None) -> None:
        self.write_mapped(dirty)

        def model() -> None:
            if name in self.taken:
                raise os_error(errno.EEXIST)
            self.taken[name] = self.state()

        self.agree(lambda: self.workspace.snapshot(name), model)

    @rule(name=st.sampled_from(SNAPSHOTS))
    def drop(self, name: str) -> None:
        def model() -> None:
            if name not in self.taken:
                raise os_error(errno.ENOENT)
            del self.taken[name]

        self.agree(lambda: self.workspace.drop(name), model)

    @rule(name=st.sampled_from(SNAPSHOTS), dirty=st.none() | at)
    def restore(self, name: str, dirty: int | None) -> None:
        self.write_mapped(dirty)

        def model() -> None:
            if name not in self.taken:
                raise os_error(errno.ENOENT)
            self.become(self.taken[name])

        self.agree_on_a_step(lambda: self.workspace.restore(name), model)

    def agree_on_a_step(self, real: Callable[[], Restored], model: Callable[[], None]) -> None:
        """As `agree`; a step of the history, unless it changed nothing."""
        before = self.state()
        answers: list[Restored] = []
        if not self.agree(lambda: answers.append(real()), model):
            return
        if answers[0].safety_snapshot is None:
            assert answers[0].counts.total == 0
            assert shown(self.root) == shown(before.root)
        else:
            self.history = [*self.history[: self.position], before, None]
            self.position += 1

    @rule(by=st.sampled_from([-1, -1, +1]))
    def undo_or_redo(self, by: int) -> None:
        def model() -> None:
            if not 0 <= self.position + by < len(self.history):
                raise os_error(errno.ENOENT)
            self.history[self.position] = self.state()
            self.position += by
            state = self.history[self.position]
            assert state is not None
            self.become(state)

        self.agree(self.workspace.undo if by < 0 else self.workspace.redo, model)

    def become(self, state: State) -> None:
        self.root = copy.deepcopy(state.root)
        there = {node.ident: node for _, node in walk(self.root)}
        for fd, node in list(self.open.items()):
            if node.ident in there:
                self.open[fd] = there[node.ident]
            elif node.ident <= state.last_ident or node.is_older:
                # Without a name then, too: what it holds now is between the program and the kernel.  Or it has one.
                del self.open[fd]
                os.close(fd)

    @precondition(lambda self: self.taken)
    @rule(which=at, name=names)
    def restore_path(self, which: int, name: str) -> None:
        tag = list(self.taken)[which % len(self.taken)]
        then, now = self.taken[tag].root.entries.get(name), self.root.entries.get(name)
        if self.crosses(self.taken[tag].root, name) or self.crosses(self.root, name):
            return  # a hard link that leads out: which of both it belongs to is no question for this model
        for fd in self.open:
            os.close(fd)
        self.open.clear()

        def model() -> None:
            if then is None and now is None:
                raise os_error(errno.ENOENT)
            self.root.mtime_ns = None
            if then is None:
                del self.root.entries[name]
                return
            self.root.entries[name] = fresh = copy.deepcopy(then)
            for _, node in walk(fresh):
                # It may be another inode now, and so another one than an open file's of later.
                node.ident = next(self.idents)
                node.is_older = True
                node.inode = None
                if node.is_dir:
                    node.mtime_ns = None
            self.last_ident = next(self.idents)

        self.agree_on_a_step(lambda: self.workspace.restore(tag, [name]), model)

    def crosses(self, root: Node, name: str) -> bool:
        if name not in root.entries:
            return False
        inside = {node for _, node in walk(root.entries[name]) if not node.is_dir}
        return any(node in inside for other, top in root.entries.items() if other != name for _, node in walk(top))

    @rule(name=st.sampled_from(SNAPSHOTS))
    def diff_names_what_differs(self, name: str) -> None:
        if name not in self.taken:
            return
        then = {path: node for path, node in walk(self.taken[name].root) if path}
        now = {path: node for path, node in walk(self.root) if path}
        diff = self.workspace.diff(name)
        assert {c.path for c in diff.changes if c.change == "added"} == now.keys() - then.keys()
        assert {c.path for c in diff.changes if c.change == "removed"} == then.keys() - now.keys()
        changed = {c.path for c in diff.changes if c.change in ("modified", "type")}
        for path in now.keys() & then.keys():
            a, b = then[path], now[path]
            if a.kind != b.kind or a.data != b.data:
                assert path in changed

    # -- after every step ----------------------------------------------------------------------------------
    @invariant()
    def the_mount_is_as_the_model(self) -> None:
        links: dict[Node, int] = {}
        for _, node in walk(self.root):
            links[node] = links.get(node, 0) + 1
        for path, node in walk(self.root):
            self.compare(self.real(path), node, links[node])
        for fd, node in self.open.items():
            assert os.pread(fd, 200_000, 0) == node.data
            assert os.fstat(fd).st_nlink == links.get(node, 0)
            assert os.fstat(fd).st_size == len(node.data)

    def compare(self, path: str, node: Node, links: int) -> None:
        info = os.lstat(path)
        assert (stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode)) == (node.kind, node.mode), path
        if node.is_dir:
            assert sorted(os.listdir(path)) == sorted(node.entries), path
            for name in NAMES:
                assert os.path.lexists(f"{path}/{name}") == (name in node.entries), f"{path}/{name}"
            links = 2 + sum(child.is_dir for child in node.entries.values())
        elif node.kind == stat.S_IFLNK:
            assert os.readlink(path) == node.data.decode()
        else:
            with open(path, "rb") as file:
                assert file.read() == node.data, path
            assert info.st_size == len(node.data), path
        assert info.st_nlink == links, path
        if node.kind != stat.S_IFLNK:
            assert os.listxattr(path) == (["user.test"] if node.xattr is not None else []), path
            assert node.xattr is None or os.getxattr(path, "user.test") == node.xattr, path
        if node.inode is not None:
            assert info.st_ino == node.inode, path
        if node.mtime_ns is not None and not node.mapped:
            assert info.st_mtime_ns == node.mtime_ns, path
        node.inode, node.mtime_ns = info.st_ino, info.st_mtime_ns

    @invariant()
    def the_daemon_holds_together(self) -> None:
        self.client.call("check")
        names = [info.name for info in self.workspace.snapshots(changes=False) if info.kind == "user"]
        assert names == list(self.taken)


@needs_root  # the model has no permissions
@pytest.mark.parametrize("engine", ["native", "pyfuse3"])
def test_random_work_with_snapshots_and_restores_matches_a_plain_model(workdir: Path, engine: str) -> None:
    with Workspace.mount(workdir / "m", engine=engine) as workspace:
        with ControlClient(socket_path(workspace.name)) as client:
            run_state_machine_as_test(
                lambda: MountMachine(workspace, client),
                settings=settings(max_examples=max(10, settings().max_examples // 2), stateful_step_count=40),
            )
        workspace.unmount()
