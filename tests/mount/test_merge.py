"""Merges on real mounts: two daemons, the programs in their workspaces, and the ways in which they can fail."""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner

from tests.mount.conftest import Fork, check_invariants, forking, mounted, put, text
from tests.support.processes import is_running
from tests.support.unmounting import unmount_when_idle
from tests.support.waiting import wait_until
from vfsd import AsyncWorkspace, Workspace
from vfsd.cli.main import cli
from vfsd.client.connection import ControlClient
from vfsd.operations.declaration import Peer
from vfsd.operations.forks import MergeParams
from vfsd.wire.messages import wire_path


@pytest.fixture(params=["memory", "overlay", pytest.param("host", marks=pytest.mark.long)])
def target(request: pytest.FixtureRequest, workdir: Path) -> Iterator[Workspace]:
    """A workspace with some files; those of an overlay or a directory are below it, except for one."""
    below = workdir / "below"
    below.mkdir()
    if request.param != "memory":
        fill(below)
    with mounted(workdir / "target", backend=request.param, engine="native", name="target") as workspace:
        if request.param == "memory":
            fill(Path(workspace.path))
        put(workspace, "own", "own")
        yield workspace
        check_invariants(workspace)


def fill(place: Path) -> None:
    (place / "tree" / "deep").mkdir(parents=True)
    (place / "tree" / "file").write_text("first\n")
    (place / "tree" / "deep" / "file").write_text("deep\n")
    (place / "lines").write_text("".join(f"{number}\n" for number in range(40)))
    (place / "doomed").write_text("doomed\n")


@pytest.fixture
def fork(workdir: Path, target: Workspace) -> Iterator[Fork]:
    with forking(workdir, target) as fork:
        yield fork


def exists(workspace: Workspace, path: str) -> bool:
    return os.path.lexists(Path(workspace.path, path))


def listing(workspace: Workspace) -> dict[str, tuple[int, bytes]]:
    """Mode and content of everything in a workspace."""
    found = {}
    for directory, directories, names in os.walk(workspace.path):
        for name in (*directories, *names):
            path = os.path.join(directory, name)
            mode = os.lstat(path).st_mode
            content = os.fsencode(os.readlink(path)) if os.path.islink(path) else b""
            if os.path.isfile(path) and not os.path.islink(path):
                content = Path(path).read_bytes()
            found[os.path.relpath(path, workspace.path)] = (mode, content)
    return found


def names(workspace: Workspace) -> list[str]:
    return [info.name for info in workspace.snapshots()]


# -- what is merged ------------------------------------------------------------------------------------
def test_the_changes_of_both_are_in_the_target(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "tree/file", "of the fork\n")
    put(copy, "new", "new\n")
    os.unlink(Path(copy.path, "doomed"))
    os.rename(Path(copy.path, "tree", "deep"), Path(copy.path, "moved"))
    os.symlink("new", Path(copy.path, "link"))
    os.link(Path(copy.path, "new"), Path(copy.path, "again"))
    os.chmod(Path(copy.path, "tree"), 0o711)
    os.setxattr(Path(copy.path, "own"), "user.colour", b"red")
    put(target, "other", "of the target\n")
    fork_before = listing(copy)
    done = target.merge(copy)
    assert done.applied
    assert done.conflicts == {}
    assert done.fork == "copy"
    assert (text(target), text(target, "new"), text(target, "other")) == ("of the fork\n", "new\n", "of the target\n")
    assert not exists(target, "doomed")
    assert not exists(target, "tree/deep")
    assert text(target, "moved/file") == "deep\n"
    assert os.readlink(Path(target.path, "link")) == "new"
    assert os.stat(Path(target.path, "new")).st_ino == os.stat(Path(target.path, "again")).st_ino
    assert os.stat(Path(target.path, "tree")).st_mode & 0o777 == 0o711
    assert os.getxattr(Path(target.path, "own"), "user.colour") == b"red"
    times = [os.stat(Path(each.path, "tree", "file")).st_mtime_ns for each in (copy, target)]
    assert times[0] == times[1]
    assert listing(copy) == fork_before
    assert {each.path: each.change for each in done.changes}["doomed"] == "removed"


def test_a_merge_is_one_undo_step(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "tree/file", "changed\n")
    put(copy, "new", "new\n")
    before = listing(target)
    done = target.merge("copy")
    after = listing(target)
    assert done.undo_steps == 1
    assert target.undo().step == "merge copy"
    assert listing(target) == before
    assert target.redo().step == "merge copy"
    assert listing(target) == after


def test_a_dry_run_changes_neither_workspace(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    before, kept = listing(target), names(copy)
    done = target.merge(copy, dry_run=True)
    assert not done.applied
    assert [each.path for each in done.changes] == ["new"]
    assert listing(target) == before
    assert names(copy) == kept


def test_a_conflict_changes_nothing_unless_a_policy_is_given(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "tree/file", "theirs\n")
    put(copy, "new", "new\n")
    put(target, "tree/file", "ours\n")
    before, kept = listing(target), names(copy)
    done = target.merge(copy)
    assert not done.applied
    assert list(done.conflicts) == ["tree/file"]
    assert listing(target) == before
    assert names(copy) == kept
    assert target.merge(copy, conflicts="ours").applied
    assert (text(target), text(target, "new")) == ("ours\n", "new\n")
    target.undo()
    assert target.merge(copy, conflicts="theirs").applied
    assert text(target) == "theirs\n"


def test_only_the_given_paths_are_merged(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "tree/file", "changed\n")
    put(copy, "new", "new\n")
    assert [each.path for each in target.merge(copy, ["tree"]).changes] == ["tree/file"]
    assert not exists(target, "new")
    assert [each.path for each in target.merge(copy).changes] == ["new"]
    with pytest.raises(FileNotFoundError):
        target.merge(copy, ["missing"])


def test_a_whole_merge_compares_paths_again_that_were_merged_alone(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "tree/file", "changed\n")
    put(copy, "lines", "changed\n")
    put(copy, "new", "new\n")
    os.unlink(Path(copy.path, "doomed"))
    target.merge(copy, ["tree", "doomed", "lines"])
    assert not [name for name in names(copy) if name.startswith("merged-")]
    assert target.merge(copy, ["doomed"]).counts.total == 0, "repeated, also where it removed a file"
    put(target, "lines", "of the target\n")
    put(copy, "tree/deep/file", "later\n")
    trial = target.merge(copy, dry_run=True)
    assert (set(trial.conflicts), {each.path for each in trial.changes}) == ({"lines"}, {"new", "tree/deep/file"})
    done = target.merge(copy, conflicts="ours")
    assert (done.base, {each.path for each in done.changes}) == (trial.base, {"new", "tree/deep/file"})
    assert (text(target), text(target, "lines"), exists(target, "doomed")) == ("changed\n", "of the target\n", False)
    again = target.merge(copy)
    assert (again.base, again.counts.total, again.conflicts) == ("merged-1", 0, {})


# -- again -----------------------------------------------------------------------------------------------
def test_a_second_merge_brings_nothing_back(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    put(copy, "tree/file", "changed\n")
    target.merge(copy)
    os.unlink(Path(target.path, "new"))
    put(target, "tree/file", "of the target\n")
    put(copy, "later", "later\n")
    done = target.merge(copy)
    assert [each.path for each in done.changes] == ["later"]
    assert done.base == "merged-1"
    assert not exists(target, "new")
    assert text(target) == "of the target\n"
    again = target.merge(copy)
    assert (again.applied, again.counts.total, again.safety_snapshot) == (True, 0, None)
    merged = [name for name in names(copy) if name.startswith("merged-")]
    assert len(merged) <= 3


def test_an_undone_merge_is_offered_again(target: Workspace, fork: Fork) -> None:
    copy = fork()
    target.snapshot("before")
    put(copy, "new", "new\n")
    target.merge(copy)
    target.undo()
    assert not exists(target, "new")
    assert target.merge(copy).base != "merged-1"
    assert text(target, "new") == "new\n"
    target.restore("before")
    assert target.merge(copy).applied
    assert text(target, "new") == "new\n"
    target.undo()
    target.redo()
    os.unlink(Path(target.path, "new"))
    target.merge(copy)
    assert not exists(target, "new"), "the merge counts again after a redo"


def test_an_undone_merge_is_offered_again_after_a_merge_the_other_way(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    target.merge(copy)
    put(target, "of-target", "1\n")
    copy.merge(target)
    target.undo()
    assert not exists(target, "new")
    assert target.merge(copy).applied
    assert (text(target, "new"), text(target, "of-target")) == ("new\n", "1\n")


def test_siblings_and_forks_of_forks_are_merged(target: Workspace, fork: Fork) -> None:
    first = fork("first")
    put(target, "between", "between\n")
    second = fork("second")
    put(first, "of-first", "1\n")
    put(second, "of-second", "2\n")
    assert second.merge(first).conflicts == {}
    assert (text(second, "of-first"), text(second, "between")) == ("1\n", "between\n")
    assert first.merge(second).conflicts == {}
    assert (text(first, "of-second"), text(first, "between")) == ("2\n", "between\n")
    grandchild = fork("grandchild", of=second)
    put(grandchild, "of-grandchild", "3\n")
    assert target.merge(grandchild).conflicts == {}
    assert [text(target, f"of-{name}") for name in ("first", "second", "grandchild")] == ["1\n", "2\n", "3\n"]
    os.unlink(Path(target.path, "of-first"))
    target.merge(first)
    assert not exists(target, "of-first"), "what came with the grandchild is not offered again"


def test_a_fork_of_an_older_snapshot_does_not_revert_what_came_later(target: Workspace, fork: Fork) -> None:
    target.snapshot("old")
    put(target, "later", "later\n")
    target.snapshot("newer")
    copy = fork(snapshot="old")
    put(copy, "new", "new\n")
    assert [each.path for each in target.merge(copy).changes] == ["new"]
    assert text(target, "later") == "later\n"


def test_a_base_that_is_gone_is_an_error_that_says_so(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    target.merge(copy)
    copy.drop("merged-1", force=True)
    put(copy, "new", "newer\n")
    with pytest.raises(FileNotFoundError, match="'copy' that was merged last \\(merged-1\\) is not kept any more"):
        target.merge(copy)
    base = copy.status().base
    assert base is not None
    target.drop(base, force=True)
    with pytest.raises(FileNotFoundError, match=f"parted \\({base}\\) is not kept any more in 'target'"):
        target.merge(copy)
    assert text(target, "new") == "new\n"
    with pytest.raises(FileNotFoundError, match="adopt --force"):
        target.adopt(copy)
    os.link(Path(copy.path, "new"), Path(copy.path, "linked"))
    put(target, "only-here", "gone\n")
    done = target.adopt(copy, force=True)
    assert done.applied
    assert {each.path for each in done.changes} == {"linked", "new", "only-here"}
    assert listing(target) == listing(copy)
    target.undo()
    assert text(target, "only-here") == "gone\n"


def test_a_snapshot_that_a_fork_was_made_from_is_not_dropped_without_a_word(target: Workspace, fork: Fork) -> None:
    for name in ("base", "other"):
        target.snapshot(name)
    copy = fork(snapshot="base")
    grandchild = fork("grandchild", of=copy)
    before = names(target)
    for arguments in (("base",), ("other", "base")):
        with pytest.raises(
            OSError, match="base is the base of merges with the running workspace copy and 1 more"
        ) as raised:
            target.drop(*arguments)
        assert raised.value.errno == errno.EBUSY
        assert "--force" in str(raised.value)
    assert names(target) == before
    with pytest.raises(OSError, match="running workspace target"):
        copy.drop("base")
    with pytest.raises(OSError, match="running workspace grandchild"):
        copy.drop(str(grandchild.status().base))
    answer = CliRunner().invoke(cli, ["drop", "-w", "target", "base", "--force"])
    assert answer.exit_code == 0, answer.output
    unmount_when_idle(copy)
    unmount_when_idle(grandchild)
    target.drop("other")


@pytest.mark.extended
def test_a_fork_that_was_merged_completely_is_unmounted_without_a_question(target: Workspace, fork: Fork) -> None:
    def unmount(name: str) -> Any:
        return CliRunner().invoke(cli, ["unmount", name])

    changed = fork("changed")
    put(changed, "new", "new\n")
    put(changed, "tree/file", "changed\n")
    target.merge(changed, ["new"])
    assert unmount("changed").exit_code == 1, "a part is missing"
    target.merge(changed)
    put(changed, "new", "newer\n")
    assert unmount("changed").exit_code == 1, "it changed after the merge"
    target.merge(changed)
    target.undo()
    assert unmount("changed").exit_code == 1, "the merge was undone"
    target.redo()
    assert unmount("changed").exit_code == 0
    with_snapshot = fork("with-snapshot")
    put(with_snapshot, "new", "newest\n")
    with_snapshot.snapshot("named")
    target.merge(with_snapshot)
    assert unmount("with-snapshot").exit_code == 1, "nothing else has its snapshot"


def test_the_base_of_a_fork_of_a_fork_is_kept_when_the_fork_between_has_ended(target: Workspace, fork: Fork) -> None:
    copy = fork()
    grandchild = fork("grandchild", of=copy)
    put(grandchild, "new", "new\n")
    unmount_when_idle(copy)
    assert target.merge(grandchild).applied
    assert text(target, "new") == "new\n"


# -- adopt and diff ----------------------------------------------------------------------------------------
def test_adopt_makes_the_target_equal_to_the_fork(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    os.unlink(Path(copy.path, "doomed"))
    os.mkfifo(Path(copy.path, "fifo"))
    os.chmod(Path(copy.path, "tree"), 0o700)
    before = listing(target)
    assert target.adopt(copy).applied
    assert listing(target) == listing(copy)
    assert target.diff(against=copy).counts.total == 0
    target.undo()
    assert listing(target) == before


def test_adopt_refuses_to_lose_changes_of_the_target(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    put(target, "own-work", "precious\n")
    done = target.adopt(copy)
    assert not done.applied
    assert list(done.conflicts) == ["own-work"]
    assert text(target, "own-work") == "precious\n"
    assert target.adopt(copy, force=True).applied
    assert listing(target) == listing(copy)
    target.undo()
    assert text(target, "own-work") == "precious\n"


def test_a_diff_against_a_fork_leads_from_the_target_to_the_fork(target: Workspace, fork: Fork, workdir: Path) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    put(target, "lines", text(target, "lines").replace("7\n", "seven\n", 1))
    kept = names(copy)
    assert {each.path: each.change for each in target.diff(against="copy").changes} == {
        "new": "added", "lines": "modified",
    }  # fmt: skip
    patch = target.patch(against=copy)
    (workdir / "patch").write_bytes(patch)
    subprocess.run(["git", "apply", str(workdir / "patch")], cwd=target.path, check=True)
    assert {path: content for path, (_, content) in listing(target).items()} == {
        path: content for path, (_, content) in listing(copy).items()
    }
    assert names(copy) == kept


# -- programs that run meanwhile -------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["memory", "overlay"], indirect=True)  # of a directory, files are replaced
def test_open_files_mappings_and_watchers_follow_a_merge(target: Workspace, fork: Fork) -> None:
    put(target, "mapped", "old" * 2000)
    copy = fork()
    put(copy, "mapped", "new" * 2000)
    put(copy, "tree/created", "created\n")
    os.unlink(Path(copy.path, "doomed"))
    with (
        open(Path(target.path, "doomed")) as doomed,
        open(Path(target.path, "mapped"), "r+b") as file,
        mmap.mmap(file.fileno(), 0) as mapping,
        subprocess.Popen(
            [sys.executable, "-c", _WATCH, os.path.join(target.path, "tree")], stdout=subprocess.PIPE, text=True
        ) as watcher,
    ):
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "watching\n"
        assert mapping[:3] == b"old"
        target.merge(copy)
        assert mapping[:3] == b"new"
        assert doomed.read() == "doomed\n"
        assert watcher.stdout.readline() == "created\n"
        mapping[:3] = b"own"
        mapping.flush()
    assert text(target, "mapped").startswith("ownnew")


_WATCH = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
fd = libc.inotify_init()
libc.inotify_add_watch(fd, os.fsencode(sys.argv[1]), 0x100)
print("watching", flush=True)
data = os.read(fd, 4096)
print(data[16:].rstrip(b"\\0").decode(), flush=True)
"""


def test_dirty_pages_of_both_sides_are_merged(target: Workspace, fork: Fork) -> None:
    for path in ("a", "b"):
        put(target, path, "x" * 8192)
    copy = fork()
    with (
        open(Path(target.path, "a"), "r+b") as ours,
        open(Path(copy.path, "b"), "r+b") as theirs,
        mmap.mmap(ours.fileno(), 0) as here,
        mmap.mmap(theirs.fileno(), 0) as there,
    ):
        here[:4] = b"ours"
        there[:6] = b"theirs"
        target.merge(copy)
        assert text(target, "a").startswith("ours")
        assert text(target, "b").startswith("theirs")


def test_what_a_program_changes_during_a_merge_is_not_lost(target: Workspace, fork: Fork, relay: Relay) -> None:
    copy = fork()
    put(copy, "tree/file", "theirs\n")
    put(copy, "new", "new\n")

    def write(_: str) -> None:
        put(target, "tree/file", "written meanwhile\n")
        put(target, "unrelated", "written meanwhile\n")

    relay.at("state", write)
    done = relay.merge(target, copy)
    assert list(done.conflicts) == [wire_path(b"tree/file")] or [each.path for each in done.conflicts] == ["tree/file"]
    assert not done.applied
    assert text(target) == "written meanwhile\n"
    assert text(target, "unrelated") == "written meanwhile\n"


@pytest.mark.extended
def test_writers_in_both_workspaces_lose_nothing(target: Workspace, fork: Fork) -> None:
    copy = fork()
    stop = threading.Event()
    written = {"target": 0, "copy": 0}

    def count(workspace: Workspace) -> None:
        while not stop.is_set():
            number = written[workspace.name] + 1
            put(workspace, f"{workspace.name}-{number % 50}", str(number))
            written[workspace.name] = number

    threads = [threading.Thread(target=count, args=(each,)) for each in (target, copy)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: min(written.values()) > 60, "both write")
        for _ in range(4):
            assert target.merge(copy).applied
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert target.merge(copy).applied
    for name, number in written.items():
        assert text(target, f"{name}-{number % 50}") == str(number)


# -- refusals ------------------------------------------------------------------------------------------------
def test_what_cannot_be_merged_says_why(target: Workspace, fork: Fork, workdir: Path) -> None:
    with pytest.raises(OSError, match="cannot be merged into itself") as raised:
        target.merge(target)
    assert raised.value.errno == errno.EINVAL
    (workdir / "served").mkdir()
    with (
        mounted(workdir / "host", backend=f"host:{workdir}/served", name="hosted") as host,
        mounted(workdir / "stranger", engine="native", name="stranger") as stranger,
    ):
        for here, there in ((target, host), (host, target), (target, stranger)):
            with pytest.raises(OSError, match="no state in common") as raised:
                here.merge(there)
            assert raised.value.errno == errno.EINVAL
    with pytest.raises(FileNotFoundError, match="missing"):
        target.merge("missing")
    copy = fork()
    unmount_when_idle(copy)
    with pytest.raises(OSError, match="not running"):
        target.merge(copy)


def test_a_read_only_target_is_refused(workdir: Path) -> None:
    with (
        mounted(workdir / "source", engine="native", name="source", read_only=True) as source,
        source.fork(workdir / "copy", name="copy") as copy,
    ):
        with pytest.raises(OSError, match="read-only") as raised:
            source.merge(copy)
        assert raised.value.errno == errno.EROFS


def test_a_merge_that_does_not_fit_changes_nothing(workdir: Path) -> None:
    with mounted(workdir / "source", engine="native", name="source", max_memory=48 << 20) as source:
        put(source, "file", "file\n")
        with source.fork(workdir / "copy", name="copy") as copy:
            Path(source.path, "ours").write_bytes(os.urandom(25 << 20))
            Path(copy.path, "theirs").write_bytes(os.urandom(25 << 20))
            with pytest.raises(OSError, match="nothing was changed") as raised:
                source.merge(copy)
            assert raised.value.errno == errno.ENOSPC
            assert sorted(os.listdir(source.path)) == ["file", "ours"]
            assert [name for name in names(copy) if name.startswith("merged-")] == []
            os.unlink(Path(source.path, "ours"))
            for info in source.snapshots():
                if info.kind == "safety":
                    source.drop(info.name)
            check_invariants(source)
            check_invariants(copy)


# -- daemons that die, calls that are cancelled ----------------------------------------------------------------
class Relay:
    """A socket between the target's daemon and the fork's, which stops at steps of a merge.

    The steps: "lineage" and "changes", before that call is passed on; "middle", after a part of the changes; "state",
    before the answer that the changes are complete.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._actions: dict[str, Callable[[str], None]] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._upstream = ""
        threading.Thread(target=self._accept, daemon=True).start()

    def at(self, step: str, action: Callable[[str], None]) -> None:
        self._actions[step] = action

    def close(self) -> None:
        self._listener.close()

    def peer(self, fork: Workspace) -> Peer:
        self._upstream = fork.socket
        return Peer(fork.name, wire_path(os.fsencode(self.path)))

    def merge(self, target: Workspace, fork: Workspace) -> Any:
        with ControlClient(target.socket) as client:
            return client.call("merge", MergeParams(fork=self.peer(fork)))

    def _reach(self, step: str) -> None:
        action = self._actions.pop(step, None)
        if action is not None:
            action(step)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as requests, socket.socket(socket.AF_UNIX) as server:
            request = requests.readline()
            method = json.loads(request)["method"] if request else ""
            self._reach(method)
            try:
                server.connect(self._upstream)
                server.sendall(request)
                with server.makefile("rb") as answers:
                    outputs = 0
                    for line in answers:
                        if not line.endswith(b"\n"):
                            break  # the daemon died
                        message = json.loads(line)
                        outputs += message.get("method") == "output"
                        if outputs == 2:
                            self._reach("middle")
                        if "method" not in message and method == "changes":
                            self._reach("state")
                        client.sendall(line)
            except OSError:
                pass


@pytest.fixture
def relay(workdir: Path) -> Iterator[Relay]:
    made = Relay(str(workdir / "relay.sock"))
    yield made
    made.close()


STEPS = ("lineage", "changes", "middle", "state")


@pytest.mark.extended
@pytest.mark.parametrize("step", STEPS)
def test_the_end_of_the_forks_daemon_leaves_the_target_as_it_was(
    target: Workspace, fork: Fork, relay: Relay, step: str
) -> None:
    copy = fork()
    Path(copy.path, "large").write_bytes(os.urandom(2 << 20))
    before = listing(target)
    relay.at(step, lambda _: kill(copy))
    if step == "state":  # all changes have arrived
        relay.merge(target, copy)
        assert Path(target.path, "large").stat().st_size == 2 << 20
    else:
        with pytest.raises(OSError, match="copy"):
            relay.merge(target, copy)
        assert listing(target) == before
        wait_until(lambda: names(target) == [], "the target drops the base of the fork that ended")
    check_invariants(target)
    put(target, "still", "usable\n")
    forget(copy)


@pytest.mark.extended
@pytest.mark.parametrize("step", STEPS)
def test_the_end_of_the_targets_daemon_leaves_the_fork_as_it_was(workdir: Path, relay: Relay, step: str) -> None:
    source = Workspace.mount(workdir / "source", engine="native", name="source")
    put(source, "file", "file\n")
    with source.fork(workdir / "copy", name="copy") as copy, copy.fork(workdir / "third", name="third") as third:
        Path(copy.path, "large").write_bytes(os.urandom(2 << 20))
        before = listing(copy)
        relay.at(step, lambda _: kill(source))
        with pytest.raises(OSError, match="went away"):
            relay.merge(source, copy)
        assert listing(copy) == before
        check_invariants(copy)
        assert third.merge(copy).applied
        assert listing(third) == before
    source._not_left()
    forget(source)


@pytest.mark.extended
@pytest.mark.parametrize("step", STEPS)
def test_a_cancelled_merge_leaves_both_as_they_were(target: Workspace, fork: Fork, relay: Relay, step: str) -> None:
    copy = fork()
    Path(copy.path, "large").write_bytes(os.urandom(2 << 20))
    before, kept = listing(target), names(copy)
    with ControlClient(target.socket) as client:
        relay.at(step, lambda _: client.cancel())
        with pytest.raises(OSError, match="cancelled") as raised:
            client.call("merge", MergeParams(fork=relay.peer(copy)))
    assert raised.value.errno == errno.ECANCELED
    assert listing(target) == before
    wait_until(lambda: names(copy) == kept, "the fork drops the state that was not merged")
    assert target.merge(copy).applied


def kill(workspace: Workspace) -> None:
    os.kill(workspace.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(workspace.pid), "the daemon ended")


def forget(workspace: Workspace) -> None:
    """Remove the mount that a killed daemon left."""
    subprocess.run([sys.executable, "-m", "vfsd.cli.main", "unmount", workspace.name], check=True, capture_output=True)


def test_two_merges_at_once_are_both_made(target: Workspace, fork: Fork) -> None:
    copies = [fork(f"copy-{number}") for number in range(3)]
    for number, copy in enumerate(copies):
        put(copy, f"new-{number}", "new\n")
    threads = [threading.Thread(target=target.merge, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [text(target, f"new-{number}") for number in range(3)] == ["new\n"] * 3


def test_a_restore_during_a_merge_is_not_lost(target: Workspace, fork: Fork, relay: Relay) -> None:
    copy = fork()
    put(copy, "tree/file", "theirs\n")
    target.snapshot("before")
    put(target, "tree/file", "ours\n")
    relay.at("state", lambda _: target.restore("before"))
    done = relay.merge(target, copy)
    assert done.applied
    assert text(target) == "theirs\n"
    target.undo()
    assert text(target) == "first\n"


# -- the command line and the async client -----------------------------------------------------------------------
def run(*words: str) -> Any:
    return CliRunner().invoke(cli, list(words))


@pytest.mark.extended
def test_the_commands_say_what_they_did(target: Workspace, fork: Fork) -> None:
    copy = fork()
    put(copy, "new", "new\n")
    put(copy, "tree/file", "theirs\n")
    shown = run("diff", "-w", "target", "--against", "copy")
    assert shown.stdout.splitlines() == ["A new", "M tree/file"]
    dry = run("merge", "copy", "-w", "target", "--dry-run")
    assert dry.stdout.splitlines() == ["A new", "M tree/file"]
    put(target, "tree/file", "ours\n")
    refused = run("merge", "copy", "-w", "target")
    assert refused.exit_code == 1
    assert "conflict in tree/file (" in refused.stderr
    assert "1 conflict with copy; nothing was changed: choose with --conflicts" in refused.stderr
    answer = json.loads(run("merge", "copy", "-w", "target", "--json").stdout)
    assert answer["conflicts"][0]["path"] == "tree/file"
    assert answer["applied"] is False
    marked = run("merge", "copy", "-w", "target", "--conflicts", "markers")
    assert marked.exit_code == 0
    assert "conflict in tree/file (content)" in marked.stderr
    assert "; the file has markers" in marked.stderr
    assert "<<<<<<< ours" in Path(target.path, "tree/file").read_text()
    target.undo()
    merged = run("merge", copy.path, "-w", "target", "--conflicts", "theirs")
    assert merged.exit_code == 0, merged.output
    assert "merged copy: 1 added, 1 modified" in merged.stdout
    assert "nothing to do" in run("merge", "copy", "-w", "target").stdout
    put(target, "own", "changed\n")
    refused = run("adopt", "copy", "-w", "target")
    assert refused.exit_code == 1
    assert "own" in refused.stderr
    assert "so it would be lost" in refused.stderr
    forced = run("adopt", "copy", "-w", "target", "--force")
    assert forced.exit_code == 0
    assert "replaced own, which was changed here" in forced.stderr
    assert "would be lost" not in forced.stderr
    assert run("diff", "-w", "target", "--against", "copy").stdout == ""
    wrong = run("diff", "-w", "target", "snap", "--against", "copy")
    assert wrong.exit_code == 2


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_async_client_forks_and_merges(workdir: Path, backend: str) -> None:
    async def main() -> None:
        async with (
            AsyncWorkspace.mount(workdir / "source", name="source", engine="native") as source,
            source.fork(workdir / "copy", name="copy") as copy,
        ):
            await copy.async_filesystem.write("file", "of the fork")
            assert [each.path for each in (await source.diff(against=copy)).changes] == ["file"]
            assert (await source.merge(copy)).applied
            assert Path(source.path, "file").read_text() == "of the fork"
            assert (await source.adopt(copy)).counts.total == 0
            assert (await copy.status()).forked_from == "source"
            with pytest.raises(FileExistsError):
                await source.fork(workdir / "again", name="source")
            assert not os.path.exists(workdir / "again")
        assert not os.path.ismount(workdir / "copy")

    anyio.run(main, backend=backend)
