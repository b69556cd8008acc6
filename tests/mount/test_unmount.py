"""`vfsd unmount` of a workspace that holds what nobody else has: it asks, saves, refuses or discards."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
import termios
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import ENGINES, check_invariants, complaints, socket_of
from tests.mount.programs import elsewhere, failed, succeeded, vfsd, wait_logged
from tests.support.host_directories import mounted_tmpfs
from tests.support.leaks import mounts
from tests.support.rights import need_root, needs_root
from vfsd.client.connection import ControlClient, daemon_end
from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace
from vfsd.operations.workspace import UnmountParams

MountIt = Callable[..., Workspace]
QUESTION = b"[y/N]: "


both_engines = pytest.mark.parametrize("engine", ENGINES, indirect=True)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """One, but where the engine may make a difference (`both_engines`)."""
    return str(getattr(request, "param", "native"))


@pytest.fixture
def mount(engine: str, workdir: Path) -> Iterator[MountIt]:
    """Mounts workspaces; those that the test leaves mounted are checked and unmounted."""
    made: list[Workspace] = []
    with ExitStack() as stack:

        def mount_it(**options: Any) -> Workspace:
            place = workdir / f"m{len(made)}"
            place.mkdir()
            name = f"{workdir.name}-{len(made)}"
            made.append(stack.enter_context(Workspace.mount(place, engine=engine, name=name, **options)))
            return made[-1]

        yield mount_it
        for workspace in made:
            if is_mounted(workspace):
                check_invariants(workspace)
            assert complaints(workspace.name) == []


@pytest.fixture
def overlay(mount: MountIt, below: Path) -> Workspace:
    return mount(backend=f"overlay:{below}")


@pytest.fixture
def below(workdir: Path) -> Path:
    directory = workdir / "below"
    directory.mkdir()
    (directory / "file").write_text("below")
    return directory


def unmount(workspace: Workspace, *words: object) -> subprocess.CompletedProcess[str]:
    return vfsd("unmount", workspace.name, *words)


def is_mounted(workspace: Workspace) -> bool:
    return workspace.path in {mount.mountpoint for mount in mounts()}


class Terminal:
    """`vfsd unmount` on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = os.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vfsd.cli.main", "unmount", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 so that Ctrl-C reaches it
        )
        os.close(theirs)

    def question(self) -> str:
        """What it shows, up to the question."""
        shown = b""
        while not shown.endswith(QUESTION):
            shown += os.read(self._ours, 1)
        return shown.decode()

    def answer(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def interrupt(self) -> None:
        """Press Ctrl-C, again where it comes just before the program reads: Python then waits for the next key."""
        while self._process.poll() is None:
            self.answer(b"\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    def end(self) -> tuple[int, str]:
        """The exit status, and the rest of what it shows."""
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the terminal has no user any more
            while data := os.read(self._ours, 1000):
                shown += data
        os.close(self._ours)
        return self._process.wait(), shown.decode()


# -- in a script ------------------------------------------------------------------------------------
@both_engines
def test_unexported_changes_are_refused_named_and_discarded_on_demand(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("work")
    workspace.snapshot("one")
    for words in ((), ("--lazy",)):
        said = failed(unmount(workspace, *words))
        assert "1 file (4 B), 1 snapshot" in said
        assert "--export FILE.zip" in said
        assert "--discard" in said
    done = unmount(workspace, "--json")
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["errno"] == "ENOTEMPTY"
    facts = error["unsaved"]
    assert (facts["files"], facts["size_bytes"], facts["snapshots"], facts["changes"]) == (1, 4, 1, None)
    assert (root / "file").read_text() == "work"
    succeeded(unmount(workspace, "--discard"))
    assert not is_mounted(workspace)
    assert "no workspace" in failed(unmount(workspace, "--discard"))


def test_a_workspace_without_changes_or_content_is_unmounted_at_once(mount: MountIt, workdir: Path) -> None:
    untouched, emptied, orphan = mount(), mount(), mount()
    with open(Path(emptied.path) / "file", "w") as file:
        file.write("gone")
    (Path(emptied.path) / "file").unlink()
    descriptor = os.open(orphan.path, os.O_TMPFILE | os.O_RDWR)
    os.write(descriptor, b"nobody has it")
    os.close(descriptor)
    for workspace in (untouched, emptied, orphan):
        succeeded(unmount(workspace))
        assert not is_mounted(workspace)


@pytest.mark.extended
@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "file").rename(root / "other"),
        lambda root: os.setxattr(root / "file", "user.x", b"1"),
        lambda root: (root / "file").chmod(0o600),
        lambda root: os.link(root / "file", root / "too"),
    ],
    ids=["rename", "setxattr", "chmod", "link"],
)
def test_each_kind_of_change_after_an_export_counts(
    workspace: Workspace, root: Path, workdir: Path, change: Callable[[Path], object]
) -> None:
    (root / "file").write_text("work")
    workspace.export(workdir / "a.zip")
    change(root)
    failed(unmount(workspace))
    workspace.export(workdir / "a.zip", overwrite=True)
    succeeded(unmount(workspace))


def test_exports_that_leave_something_out_do_not_count(workspace: Workspace, root: Path, workdir: Path) -> None:
    (root / "file").write_text("work")
    workspace.snapshot("old")
    (root / "new").write_text("work")
    for number, words in enumerate((("--exclude", "new"), ("--include", "new"), ("--snapshot", "old"))):
        succeeded(vfsd("-w", workspace.name, "export", workdir / f"{number}.zip", *words))
        failed(unmount(workspace))
    succeeded(vfsd("-w", workspace.name, "export", workdir / "all.zip"))
    succeeded(unmount(workspace))


@both_engines
def test_a_shared_mapping_that_was_written_to_is_a_change(workspace: Workspace, root: Path, workdir: Path) -> None:
    (root / "file").write_bytes(b"x" * 4096)
    workspace.export(workdir / "a.zip")
    with open(root / "file", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[0:1] = b"y"
    failed(unmount(workspace))
    succeeded(unmount(workspace, "--discard"))


def test_a_workspace_from_an_archive_has_nothing_to_lose_until_it_changes(
    mount: MountIt, workspace: Workspace, root: Path, workdir: Path
) -> None:
    (root / "file").write_text("work")
    workspace.export(workdir / "a.zip")
    again, changed = mount(archive=workdir / "a.zip"), mount(archive=workdir / "a.zip")
    succeeded(unmount(again))
    (Path(changed.path) / "file").unlink()
    (Path(changed.path) / "dir").mkdir()
    failed(unmount(changed))


@both_engines
def test_an_overlay_is_asked_about_what_was_not_applied(overlay: Workspace, below: Path, workdir: Path) -> None:
    root = Path(overlay.path)
    assert (root / "file").read_text() == "below"
    (root / "file").write_text("work")
    (root / "new").write_text("new")
    said = failed(unmount(overlay))
    assert "1 added, 1 modified" in said
    assert "vfsd apply" in said
    succeeded(vfsd("-w", overlay.name, "apply", root / "file"))
    assert "1 added; " in failed(unmount(overlay))
    succeeded(vfsd("-w", overlay.name, "export", workdir / "c.zip", "--changes-only"))
    failed(unmount(overlay))
    overlay.snapshot("named")
    succeeded(vfsd("-w", overlay.name, "apply"))
    assert (below / "new").read_text() == "new"
    succeeded(unmount(overlay))


def test_an_overlay_with_snapshots_and_no_changes_is_not_said_to_have_changes(overlay: Workspace) -> None:
    new = Path(overlay.path) / "new"
    new.write_text("new")
    overlay.snapshot("named")
    new.unlink()
    said = failed(unmount(overlay))
    assert "holds 1 snapshot, but no changes" in said
    assert "vfsd apply" not in said
    assert "--discard` drops them" in said
    succeeded(unmount(overlay, "--discard"))


def test_an_overlay_that_is_again_as_below_or_was_exported_is_unmounted(
    mount: MountIt, below: Path, workdir: Path
) -> None:
    back, exported = (mount(backend=f"overlay:{below}") for _ in range(2))
    (Path(back.path) / "new").write_text("new")
    (Path(back.path) / "new").unlink()
    succeeded(unmount(back))
    (Path(exported.path) / "file").unlink()
    failed(unmount(exported))
    succeeded(vfsd("-w", exported.name, "export", workdir / "a.zip"))
    succeeded(unmount(exported))


def test_a_host_directory_loses_nothing(mount: MountIt, below: Path) -> None:
    workspace = mount(backend=f"host:{below}")
    (Path(workspace.path) / "file").write_text("work")
    succeeded(unmount(workspace))
    assert (below / "file").read_text() == "work"


def test_all_unmounts_those_that_lose_nothing(workspace: Workspace, root: Path, mount: MountIt) -> None:
    empty = mount()
    (root / "file").write_text("work")
    done = vfsd("unmount", "--all", "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    entries = {one["name"]: one for one in answer["unmounted"]}
    assert "error" not in entries[empty.name]
    assert entries[workspace.name]["error"]["unsaved"]["files"] == 1
    assert answer["error"]["errno"] == "ENOTEMPTY"
    assert done.stderr.count(workspace.name) == 1 + 2  # once as the subject, and in the two commands
    assert f"`vfsd unmount {workspace.name} --discard`" in done.stderr
    assert is_mounted(workspace)


# -- on a terminal -------------------------------------------------------------------------------------
@pytest.mark.extended
def test_a_terminal_is_asked_and_only_yes_unmounts(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("work")
    for keys, status, says in ((b"n\n", 1, "still mounted"), (b"\n", 1, "--export"), (b"\x04", 1, "still mounted")):
        terminal = Terminal(workspace.name)
        assert "1 file (4 B)" in terminal.question()
        terminal.answer(keys)
        ended, shown = terminal.end()
        assert (ended, says in shown) == (status, True)
        assert is_mounted(workspace)
    terminal = Terminal(workspace.name)
    terminal.question()
    terminal.interrupt()
    ended, shown = terminal.end()
    assert ended == 130
    assert f"{workspace.name} is still mounted" in shown
    assert is_mounted(workspace)

    terminal = Terminal(workspace.name)
    terminal.question()
    terminal.answer(b"y\n")
    assert terminal.end()[0] == 0
    assert not is_mounted(workspace)


@both_engines
def test_what_changes_while_it_asks_is_asked_about_again(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("work")
    terminal = Terminal(workspace.name)
    assert "1 file (4 B)" in terminal.question()
    (root / "file").write_text("much more work")
    terminal.answer(b"y\n")
    assert "1 file (14 B)" in terminal.question()
    workspace.snapshot("kept")
    terminal.answer(b"y\n")
    assert "1 file (14 B), 1 snapshot" in terminal.question()
    terminal.answer(b"y\n")
    assert terminal.end()[0] == 0
    assert not is_mounted(workspace)


@pytest.mark.extended
def test_a_token_is_good_for_one_state(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("work")
    with daemon_end(workspace.status().pid) as wait_ended, ControlClient(socket_of(workspace)) as client:
        first = client.call("unsaved")
        (root / "file").write_text("more")
        for token in (first.token, "", "x", "99999-0-0-0"):
            with pytest.raises(OSError, match="changes") as refused:
                client.call("unmount", UnmountParams(token=token))
            assert refused.value.errno == errno.ENOTEMPTY
        client.call("unmount", UnmountParams(token=client.call("unsaved").token))
        wait_ended()
    assert not is_mounted(workspace)


# -- --export -------------------------------------------------------------------------------------------
@both_engines
def test_export_saves_first(workspace: Workspace, root: Path, workdir: Path) -> None:
    (root / "file").write_text("work")
    workspace.snapshot("one")
    archive = workdir / "a.zip"
    archive.write_text("mine")
    assert "--force" in failed(unmount(workspace, "--export", archive))
    assert archive.read_text() == "mine"
    assert "inside" in failed(unmount(workspace, "--export", root / "a.zip"))
    assert is_mounted(workspace)
    done = unmount(workspace, "--export", archive, "--force")
    succeeded(done)
    assert "1 snapshot" in done.stderr
    assert not is_mounted(workspace)
    assert zipfile.ZipFile(archive).read("files/file") == b"work"


def test_an_export_that_fails_leaves_the_workspace_mounted(workspace: Workspace, root: Path, workdir: Path) -> None:
    (root / "file").write_bytes(os.urandom(1 << 20))
    with mounted_tmpfs(workdir / "small", max_bytes=64 * 1024) as small:
        said = failed(unmount(workspace, "--export", small / "a.zip"))
        assert "No space left" in said
        assert "still mounted" in said
        assert os.listdir(small) == []
    assert is_mounted(workspace)
    assert (root / "file").stat().st_size == 1 << 20


@pytest.mark.extended
def test_a_busy_workspace_is_exported_and_stays(workspace: Workspace, root: Path, workdir: Path) -> None:
    (root / "file").write_text("work")
    with open(root / "file"):
        assert failed(unmount(workspace)).startswith("vfsd: error: busy")
        done = unmount(workspace, "--export", workdir / "a.zip", "--json")
        assert done.returncode == 1
        error = json.loads(done.stdout)["error"]
        assert error["errno"] == "EBUSY"
        assert f"exported to {workdir}/a.zip, and is still mounted" in error["message"]
    assert is_mounted(workspace)
    succeeded(unmount(workspace))
    assert zipfile.ZipFile(workdir / "a.zip").read("files/file") == b"work"


@needs_root
@pytest.mark.parametrize("words", [(), ("--lazy",)], ids=" ".join)
def test_the_daemon_ends_although_another_mount_namespace_has_a_copy_of_the_mount(
    engine: str, workdir: Path, words: tuple[str, ...]
) -> None:
    workspace = Workspace.mount(workdir, engine=engine)
    with elsewhere(workdir):
        succeeded(unmount(workspace, *words))  # returns when the daemon has ended
        assert not os.path.exists(socket_of(workspace))
        assert "another mount namespace" in Path(log_path(workspace.name)).read_text(encoding="utf-8")


@both_engines
def test_a_daemon_that_ends_leaves_what_is_mounted_at_its_place_by_then(engine: str, workdir: Path) -> None:
    need_root()
    workspace = Workspace.mount(workdir, engine=engine)
    pid = workspace.status().pid
    with daemon_end(pid) as wait_ended, open(os.path.join(workspace.path, "file"), "w"):
        subprocess.run(["umount", "--lazy", workspace.path], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", workdir], check=True)
        try:
            os.kill(pid, signal.SIGTERM)
            wait_logged(workspace.name, "SIGTERM", pid)
            os.kill(pid, signal.SIGTERM)  # at the second one it ends, although the file is open
            wait_ended()
            assert {mount.fs_type for mount in mounts() if mount.mountpoint == str(workdir)} == {"tmpfs"}
        finally:
            subprocess.run(["umount", "--lazy", workdir], check=True)


# -- what does not ask ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words",
    [("--force",), ("--export", "a.zip", "--all"), ("--export", "a.zip", "--discard"), ("--export", "a.tar")],
    ids=" ".join,
)
def test_options_that_contradict_each_other_are_wrong_usage(words: tuple[str, ...]) -> None:
    assert vfsd("unmount", *words).returncode == 2


def test_a_detached_daemon_changes_nothing_in_the_directory_below_its_mount(mount: MountIt, workdir: Path) -> None:
    source = workdir / "source"
    source.mkdir()
    workspace = mount(backend=f"host:{source}", store=workdir / "store", exec_on_host=True)
    with open(os.path.join(workspace.path, "held"), "w"):
        subprocess.run(["fusermount3", "-u", "-z", workspace.path], check=True)

        written = vfsd("fs", "write", "-w", workspace.name, "new", input="x")
        ran = vfsd("exec", "-w", workspace.name, "--", "touch", "new")

    assert "not mounted here any more" in written.stdout
    assert "not mounted here any more" in ran.stderr
    assert os.listdir(workspace.path) == []
