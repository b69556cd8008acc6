"""--max-memory on a mount: the daemon's resident set stays bounded under the contents that take the most memory."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import check_invariants
from tests.mount.filling import KINDS, fill, remove_all
from tests.mount.programs import VFSD, failed, log_of, succeeded, vfsd
from tests.support.processes import children
from tests.support.waiting import wait_until
from vfsd.client.workspace import Workspace
from vfsd.daemon.forks.family import slack_bytes

MountIt = Callable[..., Workspace]
MIB = 1 << 20
LIMIT = 32 * MIB
CGROUP_BYTES = 400 * MIB
USUAL = ("sparse", "large_xattrs", "symlinks", "snapshots_with_blocks")
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def peak_rss(pid: int) -> int:
    """The daemon's largest resident set, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def check_bounded(kind: str, workspace: Workspace, limit: int) -> None:
    """Fill the workspace; then removing, restoring and dropping work, and the resident set was bounded all along."""
    pid = workspace.status().pid
    steps = fill(kind, workspace)
    assert steps > 0
    status = workspace.status()
    filled = peak_rss(pid)
    taken = (status.live_bytes or 0) + (status.snapshot_bytes or 0) + (status.overhead_bytes or 0)
    # The files without names are closed by now.
    assert kind == "orphans" or limit // 4 < taken, "it was refused long before the limit"
    assert taken <= limit * 1.05
    named = [snapshot.name for snapshot in workspace.snapshots() if snapshot.kind == "user"]
    if named:
        workspace.restore(named[len(named) // 2])
    remove_all(Path(workspace.path))
    assert os.listdir(workspace.path) == []
    if named:
        workspace.restore(named[0])
        remove_all(Path(workspace.path))
    for snapshot in workspace.snapshots():
        workspace.drop(snapshot.name)
    peak = peak_rss(pid)
    print(
        f"{kind}: {steps:,} steps, charged {taken / MIB:.1f} MiB, peak {filled / MIB:.1f}, {peak / MIB:.1f} at the end"
    )
    assert peak < 1.25 * limit + 60e6
    (Path(workspace.path) / "after").write_bytes(b"x" * MIB)
    assert (Path(workspace.path) / "after").read_bytes() == b"x" * MIB


@pytest.mark.extended
@pytest.mark.parametrize(("engine", "kind"), [*(("native", kind) for kind in USUAL), ("pyfuse3", "sparse")])
def test_the_resident_set_is_bounded_by_max_memory(mount: MountIt, kind: str) -> None:
    check_bounded(kind, mount(max_memory=LIMIT), LIMIT)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["native"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_resident_set_is_bounded_by_max_memory_for_every_kind(mount: MountIt, kind: str) -> None:
    check_bounded(kind, mount(max_memory=96 * MIB), 96 * MIB)


def test_at_the_limit_a_snapshot_is_refused_with_what_to_do_and_removing_makes_room(mount: MountIt) -> None:
    workspace = mount(max_memory=16 * MIB)
    root = Path(workspace.path)
    (root / "kept").write_bytes(os.urandom(6 * MIB))
    workspace.snapshot("named")
    with pytest.raises(OSError, match="No space left"):
        (root / "more").write_bytes(os.urandom(16 * MIB))
    with pytest.raises(OSError, match=r"No memory left for a snapshot.*vfsd drop.*--max-memory") as refused:
        workspace.snapshot("another")
    assert refused.value.errno == errno.ENOSPC
    (root / "more").unlink()
    workspace.snapshot("another")
    os.truncate(root / "kept", 5 * MIB + 1)
    (root / "kept").unlink()
    workspace.restore("named")
    assert (root / "kept").stat().st_size == 6 * MIB
    assert {"named", "another"} <= {snapshot.name for snapshot in workspace.snapshots()}


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["memory", "overlay"])
@pytest.mark.parametrize("engine", ["native"])
def test_what_was_dropped_for_lack_of_memory_is_named_and_no_undo_goes_over_two_steps(
    mount: MountIt, workdir: Path, backend: str
) -> None:
    workspace = mount(max_memory=16 * MIB, backend=backend)
    picked = ("-w", workspace.name)
    file = Path(workspace.path) / "file"
    file.touch()
    workspace.snapshot("empty")
    named: list[str] = []
    for number in range(6):
        file.write_bytes(b"%d" % number + os.urandom(3 * MIB))
        named += re.findall(
            r"^dropped (safety-\d+), taken .* ago: memory was needed$",
            succeeded(vfsd("restore", "empty", *picked)),
            re.MULTILINE,
        )
    file.write_bytes(os.urandom(8 * MIB))  # which makes some more go, and the next answer names them
    record = json.loads(succeeded(vfsd("snapshot", "last", "--json", *picked)))
    assert {each["reason"] for each in record["expired"]} == {"memory"}
    named += [each["name"] for each in record["expired"]]
    assert named == [f"safety-{number}" for number in range(1, len(named) + 1)]
    assert len(named) < 6
    assert workspace.snapshot("another").expired == {}
    assert workspace.status().pruned == len(named)
    assert re.search(rf"^pruned\t{len(named)}$", succeeded(vfsd("status", *picked)), re.MULTILINE)
    file.write_bytes(b"")
    for number in reversed(range(len(named), 6)):
        assert workspace.undo().step == "restore empty"
        assert file.read_bytes()[:1] == b"%d" % number
    said = failed(vfsd("restore", "--undo", *picked))
    assert "the earlier states were dropped because memory was needed (--max-memory)" in said


def test_an_archive_larger_than_the_memory_left_is_refused_before_anything_changes(
    mount: MountIt, workdir: Path
) -> None:
    source = mount()
    (Path(source.path) / "large").write_bytes(os.urandom(10 * MIB))
    source.export(workdir / "large.zip")
    workspace = mount(max_memory=16 * MIB)
    root = Path(workspace.path)
    (root / "mine").write_bytes(os.urandom(8 * MIB))
    with pytest.raises(OSError, match=r"16,777,216 bytes of memory \(--max-memory\); nothing was changed") as refused:
        workspace.import_archive(workdir / "large.zip")
    assert refused.value.errno == errno.ENOSPC
    assert os.listdir(root) == ["mine"]
    (root / "mine").unlink()
    workspace.import_archive(workdir / "large.zip")
    assert (root / "large").stat().st_size == 10 * MIB
    assert workspace.status().overhead_bytes < MIB  # type: ignore[operator]


# -- with defaults, in a cgroup ----------------------------------------------------------------------------


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with a memory limit of 400 MiB; the directory whose cgroup.procs takes a process."""
    v1 = (_V1 / "memory.limit_in_bytes").exists()
    place = (_V1 if v1 else _V2) / f"vfsd-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        try:
            limit = place / ("memory.limit_in_bytes" if v1 else "memory.max")
            limit.write_text(str(CGROUP_BYTES))
        except OSError as error:
            pytest.skip(f"no memory controller for a new cgroup: {error}")
        yield place
    finally:
        place.rmdir()


def check_survives(kind: str, cgroup: Path, workdir: Path) -> None:
    point = workdir / "limited"
    point.mkdir()
    into = ("sh", "-c", f'echo $$ > "{cgroup}/cgroup.procs" && exec "$@"', "sh")
    succeeded(vfsd("mount", point, "--name", workdir.name, before=into))
    workspace = Workspace.attach(workdir.name)
    try:
        status = workspace.status()
        assert status.max_memory == CGROUP_BYTES // 2
        assert status.max_bytes == CGROUP_BYTES // 2
        check_bounded(kind, workspace, CGROUP_BYTES // 2)
        assert workspace.status().pid == status.pid
    finally:
        workspace.unmount()


@pytest.mark.extended
def test_with_defaults_the_daemon_survives_in_a_cgroup_of_400_mib(cgroup: Path, workdir: Path) -> None:
    check_survives("large_xattrs", cgroup, workdir)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_with_defaults_the_daemon_survives_every_kind(cgroup: Path, workdir: Path, kind: str) -> None:
    check_survives(kind, cgroup, workdir)


COMPACTED_BYTES = 100 * MIB


@pytest.fixture
def compacted(workdir: Path) -> Iterator[Workspace]:
    root = workdir / "mount"
    with Workspace.mount(
        root, persist=True, journal_dir=workdir / "journal", max_memory=COMPACTED_BYTES, keeper=False
    ) as made:
        yield made
        check_invariants(made)


def private_bytes(*pids: int) -> int:
    """Return the sum of the proportional set sizes of anonymous memory."""
    found = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
    return found


class StoppedCompaction:
    """`vfsd compact`, stopped while another process writes the image."""

    def __init__(self, compacted: Workspace) -> None:
        while True:
            self.command = subprocess.Popen(
                [*VFSD, "compact", "-w", compacted.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            wait_until(lambda: bool(children(compacted.pid)) or self.command.poll() is not None, "a writer")
            for writer in children(compacted.pid):
                self.writer = writer
                try:
                    os.kill(writer, signal.SIGSTOP)
                except ProcessLookupError:
                    break
                return
            self.command.communicate()  # it was too fast


def rewrite(root: Path, count: int) -> None:
    for number in range(count):
        with open(root / f"f{number}", "wb") as file:
            file.write(os.urandom(MIB))


@pytest.mark.extended
def test_a_change_that_needs_the_memory_ends_the_compaction(compacted: Workspace) -> None:
    root = Path(compacted.path)
    rewrite(root, 60)
    compaction = StoppedCompaction(compacted)
    peak, is_over = 0, threading.Event()

    def observe() -> None:
        nonlocal peak
        while not is_over.wait(0.01):
            peak = max(peak, private_bytes(compacted.pid, compaction.writer))

    observer = threading.Thread(target=observe)
    observer.start()
    rewrite(root, 60)
    is_over.set()
    observer.join()
    _, error = compaction.command.communicate()
    assert compaction.command.returncode == 1
    assert "needed the memory (--max-memory)" in error
    assert peak <= COMPACTED_BYTES + slack_bytes(2)
    succeeded(vfsd("compact", "-w", compacted.name))
    rewrite(root, 60)


@pytest.mark.extended
def test_a_compaction_without_room_is_refused_before_it_begins(compacted: Workspace) -> None:
    root = Path(compacted.path)
    with pytest.raises(OSError, match="No space left"):
        rewrite(root, 110)
    before = sorted(os.listdir(root))
    message = failed(vfsd("compact", "-w", compacted.name))
    assert "MiB of --max-memory: the journal stays as it is; remove files" in message
    assert sorted(os.listdir(root)) == before
    for name in before[:60]:
        (root / name).unlink()
    succeeded(vfsd("compact", "-w", compacted.name))


@pytest.mark.extended
@pytest.mark.slow
def test_a_compaction_that_begins_by_itself_and_has_no_room_is_logged(compacted: Workspace) -> None:
    root = Path(compacted.path)
    with pytest.raises(OSError, match="No space left"):
        rewrite(root, 110)
    while "of --max-memory: the journal stays as it is" not in log_of(compacted.name):
        rewrite(root, 20)
