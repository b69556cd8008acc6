"""`vfsd upgrade` on each backend; then what is special to overlays, to `host:` and to `exec:`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protocol.backends.container.helper.wire import VERSION
from tests.mount.conftest import check_invariants, fixture_of
from tests.mount.files_in_use import in_use, make_files
from tests.mount.kept_workspaces import KeptCommand, change_at_random, facts
from tests.mount.programs import VFSD, failed, succeeded, vfsd
from tests.mount.test_keeper_backends import archive, fill, numbers, stored, twin_of
from tests.mount.test_upgrade import Dying, Upgradable, broken
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace


class Over(Upgradable):
    """A workspace over the directory `below`, or of that directory."""

    below: Path

    def __init__(self, workdir: Path, kind: str = "overlay", **options: Any) -> None:
        self.below = workdir / "below"
        self.below.mkdir()
        super().__init__(workdir, **{"backend": f"{kind}:{self.below}", **options})


class OverCommand(Upgradable):
    """The directory at the other end of a command."""

    def __init__(self, workdir: Path, **options: Any) -> None:
        (workdir / "kept").mkdir()
        self.command = KeptCommand(workdir / "kept")
        self.below = self.command.below
        super().__init__(workdir, **self.command.options, **options)

    def end(self) -> None:
        super().end()
        wait_until(lambda: not self.command.processes(), "the end of the helper")


KINDS: dict[str, tuple[type[Upgradable], dict[str, Any]]] = {
    "memory": (Upgradable, {}),
    "kept": (Upgradable, {"persist": True}),
    "overlay": (Over, {}),
    "kept overlay": (Over, {"persist": True}),
    "host": (Over, {"kind": "host"}),
    "exec": (OverCommand, {}),
    "exec without a keeper": (OverCommand, {"keeper": False}),
}


def make(workdir: Path, name: str) -> Upgradable:
    kind, options = KINDS[name]
    return kind(workdir, **options)


def on(*names: str, short: tuple[str, ...] = ()) -> Any:
    """A fixture of a workspace of each of the kinds; those that are not in `short` run in the extended suite only."""
    params = [
        pytest.param({"name": name}, id=name, marks=() if name in short else pytest.mark.extended) for name in names
    ]
    return fixture_of(make, lambda workspace: workspace.end(), params=params)


over = on("overlay", "kept overlay", "host")
killed = on("kept overlay", "host", "exec")
used = on(*KINDS, short=("exec", "exec without a keeper"))
written = on(*KINDS, short=("overlay", "kept overlay", "host"))
plain = on("overlay")
kept = on("kept overlay")
host = on("host", short=("host",))
memory = on("memory", short=("memory",))
far = on("exec", short=("exec",))


# -- each backend ------------------------------------------------------------------------------------
def test_open_files_mappings_directories_and_locks_continue(used: Upgradable) -> None:
    root, below = used.path, getattr(used, "below", None)
    if below is None:
        used.mount()
    place = below or root
    make_files(place)
    os.mkfifo(place / "fifo")
    for name in ("gone", "late", "quiet"):
        (place / name).write_bytes(b"of the lower layer")
    if below is not None:
        used.mount()
    with contextlib.ExitStack() as stack:
        files = stack.enter_context(in_use(root))
        gone, late, quiet = (
            stack.enter_context((root / name).open("r+b", buffering=0)) for name in ("gone", "late", "quiet")
        )
        (root / "gone").unlink()
        for name in files.seen[:50]:
            if name != "below":
                (root / "dir" / name).unlink()
        read_at = (root / "file").stat().st_atime_ns
        used.upgrade()
        (root / "late").unlink()
        gone.write(b"OF")
        used.upgrade()
        files.check(root)
        assert os.pread(gone.fileno(), 100, 0) == b"OF the lower layer"
        assert os.pread(late.fileno(), 100, 0) == b"of the lower layer"
        quiet.write(b"AT")
        assert (root / "quiet").read_bytes() == b"AT the lower layer"
        assert (root / "file").stat().st_atime_ns >= read_at
        if used.record.is_kept:
            pid = used.record.pid
            os.kill(pid, 9)
            wait_until(lambda: used.record.pid != pid, "a replacement")
            assert (root / "quiet").read_bytes() == b"AT the lower layer"
    workspace = Workspace.attach(used.name)
    check_invariants(workspace)
    if below is None:
        assert workspace.status().files == sum(len(files) for _, _, files in os.walk(root))


def test_a_random_writer_sees_what_its_twin_sees(written: Upgradable, workdir: Path, runs_long: bool) -> None:
    twin = twin_of(getattr(written, "below", None), workdir / "twin")
    workspace = written.mount()
    with written.being_upgraded(300 if runs_long else 2) as is_over:
        change_at_random([written.path, twin], 1, is_over)
    assert facts(written.path) == facts(twin)
    check_invariants(workspace)


def test_either_daemon_is_killed_at_the_last_steps(
    killed: Upgradable, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other steps do not depend on the backend: see `test_upgrade`."""
    fill(killed.below)
    dying = Dying(killed, workdir, monkeypatch)
    held = [os.open(killed.path / "d1" / f"n{number}", os.O_RDONLY) for number in (1, 4, 7)]
    expected = [os.pread(descriptor, 9, 0) for descriptor in held]
    if isinstance(killed, OverCommand):
        (killed.path / "d1" / "n1").unlink()
    with dying.being_written():
        for step in ("before Loaded", "after Finish", "before Prepared", "before Go", "after Go", "before Serving"):
            dying.upgrade_at(step)
            dying.check()
            wait_until(lambda: killed.record.is_kept, "a keeper")
    assert [os.pread(descriptor, 9, 0) for descriptor in held] == expected
    for descriptor in held:
        os.close(descriptor)


# -- overlays ----------------------------------------------------------------------------------------
@pytest.mark.extended
def test_a_tree_below_is_walked_while_it_is_upgraded(plain: Over, workdir: Path) -> None:
    """Inodes are loaded before, during and after the upgrades; those that programs know keep their numbers."""
    over = plain
    for number in range(1000):
        directory = over.below / f"d{number % 50}" / "deep"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{number}").write_bytes(b"%d" % number)
    over.mount()
    held = [os.open(over.path / f"d{number}" / "deep" / f"f{number}", os.O_RDONLY) for number in range(10)]
    known = {descriptor: os.fstat(descriptor).st_ino for descriptor in held}
    seen: dict[str, int] = {}
    with over.being_upgraded(2) as is_over:
        while not is_over():
            subprocess.run(["tar", "cf", workdir / "a.tar", "-C", over.path, "."], check=True)
            found = numbers(over.path)
            assert not seen or found == seen
            seen = found
    assert {descriptor: os.fstat(descriptor).st_ino for descriptor in held} == known
    for number, descriptor in enumerate(held):
        assert os.pread(descriptor, 100, 0) == b"%d" % number
        os.close(descriptor)
    check_invariants(Workspace.attach(over.name))


# -- what is kept ----------------------------------------------------------------------------------
@pytest.mark.extended
def test_the_base_of_an_overlay_is_kept(plain: Over) -> None:
    over = plain
    fill(over.below)
    with over.mount() as workspace:
        (over.path / "d0" / "n0").write_bytes(b"changed")
        (over.path / "new").write_bytes(b"new")
        before = succeeded(vfsd("diff", "-w", over.name))
        over.upgrade()
        assert succeeded(vfsd("diff", "-w", over.name)) == before
        (over.path / "d1" / "n1").unlink()
        succeeded(vfsd("apply", "d1", "-w", over.name))
        over.upgrade()
        assert not (over.below / "d1" / "n1").exists()
        assert succeeded(vfsd("diff", "-w", over.name)) == before
        succeeded(vfsd("discard", "d0", "-w", over.name))
        assert (over.path / "d0" / "n0").read_bytes() == (over.below / "d0" / "n0").read_bytes()
        check_invariants(workspace)


@pytest.mark.extended
def test_a_file_that_changes_below_shows_its_new_content(plain: Over) -> None:
    (plain.below / "f").write_bytes(b"1" * 8192)
    plain.mount()
    with (plain.path / "f").open("rb", buffering=0) as file:
        assert os.pread(file.fileno(), 4096, 0) == b"1" * 4096
        plain.upgrade()
        (plain.below / "f").write_bytes(b"3" * 8192)

        def is_new() -> bool:
            with contextlib.suppress(OSError):  # of the read that finds the change
                return (plain.path / "f").read_bytes() == b"3" * 8192
            return False

        wait_until(is_new, "the new content")


@pytest.mark.extended
def test_the_keeper_of_the_new_daemon_restarts_it(kept: Over) -> None:
    fill(kept.below)
    workspace = kept.mount()
    before, first = numbers(kept.path), kept.record
    with (kept.path / "d0" / "n0").open("rb", buffering=0) as file, (kept.path / "d1" / "n1").open("rb") as quiet:
        (kept.path / "d0" / "n0").unlink()
        del before["d0/n0"]
        for _ in range(2):
            kept.upgrade()
            assert kept.record.keeper not in {None, first.keeper}
            pid = kept.record.pid
            os.kill(pid, 9)
            assert file.read(5) == b"below"[:5]
            file.seek(0)
            wait_until(lambda: kept.record.pid != pid, "a replacement")  # noqa: B023 (called at once)
            assert numbers(kept.path) == before
        assert quiet.read(5) == b"below"
    assert not first.is_kept
    kept.upgrade()
    check_invariants(workspace)


def remote(workdir: Path, below: Path) -> str:
    """A snapshot in an object store, without its name: the newest one."""
    source = workdir / "source"
    source.mkdir()
    workspace = Workspace.mount(source, name=f"{workdir.name}-source", backend=f"host:{below}")
    succeeded(vfsd("snapshot", "base", "-w", workspace.name))
    url = f"file://{workdir}/store"
    (workdir / "store").mkdir()
    succeeded(vfsd("push", url, "--snapshot", "base", "-w", workspace.name))
    succeeded(vfsd("unmount", workspace.name))
    return f"overlay:{url}"


@pytest.mark.extended
@pytest.mark.parametrize("make", [archive, stored, remote])
def test_an_overlay_over_an_archive_or_a_snapshot_goes_on(plain: Over, workdir: Path, make: Any) -> None:
    fill(plain.below)
    plain.options["backend"] = make(workdir, plain.below)
    workspace = plain.mount()
    expected, before = facts(plain.path), numbers(plain.path)
    with (plain.path / "d1" / "n1").open("rb", buffering=0) as file:
        plain.upgrade()
        (plain.path / "d1" / "n1").unlink()
        plain.upgrade()
        assert file.read(6) == b"below "
    del expected["d1/n1"], before["d1/n1"]
    assert numbers(plain.path) == before
    assert facts(plain.path) == expected
    check_invariants(workspace)


@pytest.mark.extended
def test_the_content_of_a_stored_snapshot_stays_during_upgrades(plain: Over, workdir: Path) -> None:
    fill(plain.below)
    plain.options["backend"] = stored(workdir, plain.below)
    plain.mount()
    plain.upgrade()
    succeeded(vfsd("store", "drop", f"host:{plain.below}", "base"))
    succeeded(vfsd("store", "gc"))
    plain.upgrade()
    succeeded(vfsd("store", "gc"))
    assert (plain.path / "n1").read_bytes() == b"x" * 300_000


@pytest.mark.extended
def test_another_lower_layer_in_its_place_is_refused(plain: Over, workdir: Path) -> None:
    fill(plain.below)
    plain.options["backend"] = archive(workdir, plain.below)
    workspace = plain.mount()
    pid = workspace.status().pid
    place = Path(plain.options["backend"].removeprefix("overlay:"))
    place.rename(workdir / "moved.zip")
    (plain.path / "n1").write_text("another")
    workspace.export(place)
    succeeded(vfsd("discard", "n1", "-w", plain.name))
    assert "is not what the workspace was mounted over any more" in failed(vfsd("upgrade", plain.name))
    assert workspace.status().pid == pid
    assert (plain.path / "n1").read_bytes() == b"x" * 300_000
    (workdir / "moved.zip").rename(place)
    succeeded(vfsd("upgrade", plain.name))


@pytest.mark.extended
def test_a_directory_that_was_moved_stays_what_is_mounted(over: Over, workdir: Path) -> None:
    fill(over.below)
    over.mount()
    moved = workdir / "moved"
    with (over.path / "n1").open("r+b", buffering=0) as file:
        over.below.rename(moved)
        over.upgrade()
        over.below.mkdir()  # another directory in its place
        (over.below / "other").touch()
        pid = over.record.pid
        over.upgrade()
        if over.record.keeper is not None:
            pid = over.record.pid
            os.kill(pid, 9)
            wait_until(lambda: over.record.pid != pid, "a replacement")
        assert file.read(5) == b"xxxxx"
        file.write(b"changed")
    assert sorted(os.listdir(over.path)) == sorted(os.listdir(moved))
    assert (over.path / "n2").read_bytes()[:12] == b"xxxxxchanged"
    succeeded(vfsd("snapshot", "one", "-w", over.name))
    (over.path / "d1" / "new").write_text("new")
    (over.path / "n2").unlink()
    succeeded(vfsd("restore", "one", "-w", over.name))
    assert not (over.path / "d1" / "new").exists()
    assert (over.path / "n2").read_bytes()[:12] == b"xxxxxchanged"
    assert os.listdir(over.below) == ["other"]
    check_invariants(over.workspace)


# -- kill -9 ---------------------------------------------------------------------------------------
# -- `host:` ---------------------------------------------------------------------------------------
@pytest.mark.extended
@pytest.mark.parametrize("keeper", [True, False])
def test_files_without_names_of_a_host_directory_live(workdir: Path, keeper: bool) -> None:
    over = Over(workdir, "host", keeper=keeper)
    for number in range(300):
        (over.below / f"f{number}").write_bytes(b"%d" % number)
    workspace = over.mount()
    try:
        held = {number: os.open(over.path / f"f{number}", os.O_RDWR) for number in range(300)}
        for number in range(299):
            (over.path / f"f{number}").unlink()
        assert os.pread(held[299], 10, 0) == b"299"
        (over.below / "f299").unlink()  # by another program
        temporary = os.open(over.path, os.O_TMPFILE | os.O_RDWR)
        os.write(temporary, b"temporary")
        for _ in range(2):
            over.upgrade()
            for number, descriptor in held.items():
                assert os.pread(descriptor, 10, 0) == b"%d" % number
        os.pwrite(held[7], b"changed", 0)
        assert os.pread(held[7], 10, 0) == b"changed"
        root = os.open(over.path, os.O_RDONLY)
        os.link(f"/proc/self/fd/{temporary}", "named", dst_dir_fd=root, follow_symlinks=True)
        assert (over.below / "named").read_bytes() == b"temporary"
        for descriptor in (*held.values(), temporary, root):
            os.close(descriptor)
        check_invariants(workspace)
    finally:
        over.end()


def test_the_snapshots_and_the_undo_history_of_a_host_directory_are_kept(host: Over) -> None:
    (host.below / "f").write_text("one")
    workspace = host.mount()
    workspace.snapshot("one")
    (host.path / "f").write_text("two")
    workspace.restore("one")
    before = workspace.snapshots()
    host.upgrade()
    assert workspace.snapshots() == before
    succeeded(vfsd("restore", "--undo", "-w", host.name))
    assert (host.below / "f").read_text() == "two"
    pid = host.record.pid
    with (host.path / "f").open("r+") as file:
        os.kill(pid, 9)
        assert file.read() == "two"
    wait_until(lambda: host.record.pid != pid, "a replacement")
    check_invariants(workspace)


def test_the_snapshots_of_a_host_directory_are_found_after_a_symlink_to_it_changed(host: Over, workdir: Path) -> None:
    host.below.rename(workdir / "real")
    host.below.symlink_to(workdir / "real")
    (workdir / "another").mkdir()
    workspace = host.mount()
    (host.path / "f").write_text("one")
    workspace.snapshot("one")
    (host.path / "f").write_text("two")
    host.below.unlink()
    host.below.symlink_to(workdir / "another")
    host.upgrade()
    assert [each.name for each in workspace.snapshots()] == ["one"]
    workspace.restore("one")
    assert (host.path / "f").read_text() == (workdir / "real" / "f").read_text() == "one"
    assert os.listdir(workdir / "another") == []


# -- `exec:` -----------------------------------------------------------------------------------------
def test_snapshots_and_undo_steps_of_a_command_are_kept(far: OverCommand) -> None:
    (far.below / "changed").write_text("one\n")
    workspace = far.mount()
    workspace.snapshot("one")
    (far.path / "changed").write_text("two\n")
    workspace.restore("one")
    far.upgrade()
    succeeded(vfsd("restore", "--undo", "-w", far.name))
    assert (far.path / "changed").read_text() == "two\n"
    check_invariants(workspace)


def test_a_workspace_that_nobody_uses_after_an_upgrade_keeps_its_helper(far: OverCommand) -> None:
    """A helper that no daemon has joined ends after five minutes, so the next daemon joins before any request comes."""
    far.mount()
    with (far.path / "gone").open("w+b", buffering=0) as gone:
        (far.path / "gone").unlink()
        far.upgrade()
        helper, relay = far.command.processes()

        def has_joined() -> bool:
            """Whether the relay has a connection to the helper, besides its standard streams."""
            descriptors = Path(f"/proc/{relay}/fd").iterdir()
            return any(int(each.name) > 2 and os.readlink(each).startswith("socket:") for each in descriptors)

        wait_until(has_joined, "the relay to join")
        gone.write(b"written")
        assert os.pread(gone.fileno(), 9, 0) == b"written"
        assert far.command.processes() == [helper, relay]


ANOTHER_PROTOCOL = """
import sys
from protocol.backends.container.helper import wire
wire.VERSION += 1
from vfsd.daemon.upgrading import __main__ as upgrading
sys.exit(upgrading.main(int(sys.argv[-1])))
"""


@pytest.mark.extended
def test_a_version_whose_helper_speaks_another_protocol_is_refused_and_the_old_one_serves_on(
    far: OverCommand, workdir: Path
) -> None:
    far.mount()
    with (far.path / "gone").open("w+b", buffering=0) as gone:
        (far.path / "gone").unlink()
        pid = far.record.pid
        message = (
            f"speaks version {VERSION} of the protocol, this vfsd speaks version {VERSION + 1}: unmount the workspace"
        )
        with pytest.raises(OSError, match=message):
            far.upgrade(broken(workdir, ANOTHER_PROTOCOL))
        assert far.record.pid == pid
        gone.write(b"x")
        far.upgrade()
        assert os.pread(gone.fileno(), 9, 0) == b"x"


# -- several commands at once ----------------------------------------------------------------------
def test_commands_at_the_same_time_all_give_a_true_answer(memory: Upgradable) -> None:
    workspace = memory.mount()
    pid = workspace.status().pid
    commands = [subprocess.Popen([*VFSD, "upgrade", memory.name, "--json"], stdout=subprocess.PIPE) for _ in range(3)]
    answers = [json.loads(command.communicate()[0])["upgraded"][0] for command in commands]
    assert [command.returncode for command in commands] == [0, 0, 0]
    serving = workspace.status().pid
    assert serving != pid
    did = [answer for answer in answers if not answer["meanwhile"]]
    assert did, answers
    assert serving in {answer["pid"] for answer in did}


@pytest.mark.extended
def test_all_goes_on_past_a_workspace_that_cannot_be_upgraded(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names decide the order: the first one cannot be upgraded."""
    monkeypatch.setenv("VFSD_RUNTIME_DIR", str(workdir / "run"))  # those of other tests are not its business
    places = {"a": {"engine": "pyfuse3"}, "b": {}}
    with contextlib.ExitStack() as stack:
        pids = {}
        for name, options in places.items():
            (workdir / name).mkdir()
            workspace = stack.enter_context(Workspace.mount(workdir / name, name=f"{workdir.name}-{name}", **options))  # type: ignore[arg-type]
            pids[workspace.name] = workspace.status().pid
        done = vfsd("upgrade", "--all", "--json")
        assert done.returncode == 1
        entries = {entry["name"]: entry for entry in json.loads(done.stdout)["upgraded"]}
        assert "error" in entries[f"{workdir.name}-a"]
        assert entries[f"{workdir.name}-b"]["pid"] != pids[f"{workdir.name}-b"]
        assert f"{workdir.name}-a: the engine pyfuse3" in done.stderr
