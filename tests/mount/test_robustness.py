"""Abuse: interrupted and crowded, deep and full, short of memory.  The daemon answers, and its state holds."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import backend_over, check_invariants
from tests.mount.programs import Program
from tests.support.rights import needs_root
from vfsd.client.workspace import Workspace

MountIt = Callable[..., Workspace]
MIB = 1 << 20
OPEN_FILES = 1000
PROCESSES = 64


def start(code: str, cwd: Path, *arguments: object) -> subprocess.Popen[bytes]:
    """A Python process that is up when this returns: its code says so with `print(flush=True)`."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)], cwd=cwd, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit status; it must end by itself."""
    process.communicate(timeout=60)
    return process.returncode


# -- interrupted ------------------------------------------------------------------------------------------
READS = """
import os
fd = os.open("f", os.O_RDONLY)
print(flush=True)
while True:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert len(os.pread(fd, 8 << 20, 0)) == 8 << 20
"""
WRITES = """
import os, sys
fd = os.open("w" + sys.argv[1], os.O_RDWR | os.O_CREAT)
print(flush=True)
while True:
    assert os.pwrite(fd, bytes([65 + int(sys.argv[1])]) * (4 << 20), 0) == 4 << 20
"""
MAKES = """
import os, sys
os.mkdir("d" + sys.argv[1])
os.chdir("d" + sys.argv[1])
print(flush=True)
while True:
    for n in range(100):
        os.close(os.open(f"f{n}", os.O_CREAT | os.O_WRONLY))
        os.rename(f"f{n}", f"g{n}")
    for n in range(100):
        os.unlink(f"g{n}")
"""


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_programs_that_are_stopped_in_mid_request_harm_nothing(root: Path, number: signal.Signals) -> None:
    (root / "f").write_bytes(os.urandom(8 * MIB))
    before = (root / "f").read_bytes()
    for round_ in range(5):
        running = [start(READS, root), start(WRITES, root, round_), start(MAKES, root, round_)]
        for process in running:
            assert process.poll() is None
            process.send_signal(number)
        for process in running:
            assert ended(process) in (-number, 1)  # Python makes SIGINT an exception
    assert (root / "f").read_bytes() == before
    for round_ in range(5):
        written = (root / f"w{round_}").read_bytes()
        assert written.count(65 + round_) == len(written)
        shutil.rmtree(root / f"d{round_}")


@pytest.mark.extended
def test_a_signal_that_is_handled_does_not_break_reads_and_writes(root: Path) -> None:
    """An interval timer fires all the time: no call may fail or come back short for it (signal(7), local files)."""
    code = """
content = os.urandom(4 << 20)
fd = os.open('f', os.O_RDWR | os.O_CREAT)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for n in range(40):
    assert os.pwrite(fd, content, 0) == len(content)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.pread(fd, len(content), 0) == content
    os.mkdir('d'); os.rename('d', 'e'); os.rmdir('e'); os.stat('f'); os.listdir('.')
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    with Program(cwd=root) as program:
        program(code)


# -- crowds -----------------------------------------------------------------------------------------------
@pytest.mark.extended
def test_a_thousand_files_are_open_at_once_and_unlinked(root: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * OPEN_FILES), hard))
    files: list[int] = []
    try:
        for number in range(OPEN_FILES):
            files.append(os.open(root / f"f{number}", os.O_RDWR | os.O_CREAT))
            os.write(files[-1], b"%d" % number)
        for number in range(OPEN_FILES):
            os.unlink(root / f"f{number}")
        assert os.listdir(root) == []
        for number, fd in enumerate(files):
            assert os.pread(fd, 99, 0) == b"%d" % number
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    free = os.statvfs(root)
    while os.statvfs(root).f_files - os.statvfs(root).f_ffree > 1:  # the kernel's forgets come by themselves
        os.sched_yield()
    assert free.f_files == os.statvfs(root).f_files


def _list_and_empty(workspace: Workspace, count: int) -> None:
    root = Path(workspace.path)
    (root / "many").mkdir()
    many = os.open(root / "many", os.O_RDONLY)
    for number in range(count):
        os.mknod(f"file-{number:06}", dir_fd=many)
    os.close(many)
    assert len(os.listdir(root / "many")) == count
    workspace.snapshot("full")
    listing = start(
        "import os\nprint(flush=True)\nwhile 'many' in os.listdir('.'):\n"
        "    try: names = os.listdir('many')\n    except FileNotFoundError: break\n"
        "    assert len(names) == len(set(names))\n",
        root,
    )
    subprocess.run(["rm", "-rf", "many"], cwd=root, check=True)
    assert ended(listing) == 0
    assert os.listdir(root) == []
    check_invariants(workspace)
    workspace.restore("full")
    assert len(os.listdir(root / "many")) == count


@pytest.mark.extended
def test_a_directory_of_thousands_is_listed_and_emptied_at_once(workspace: Workspace) -> None:
    _list_and_empty(workspace, 1_200)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_directory_of_two_hundred_thousand_is_listed_and_emptied_at_once(workdir: Path, engine: str) -> None:
    (workdir / "m").mkdir()
    # Its log says that not all of 200,000 changes were shown to inotify watchers.
    with Workspace.mount(workdir / "m", engine=engine, name=workdir.name) as workspace:
        _list_and_empty(workspace, 200_000)


@pytest.mark.extended
@pytest.mark.slow
def test_sixty_four_processes_work_on_one_file(root: Path) -> None:
    code = """
import fcntl, os, sys
number = int(sys.argv[1])
fd = os.open("f", os.O_RDWR | os.O_CREAT)
log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
print(flush=True)
for n in range(10):
    os.pwrite(fd, bytes([number]) * 1000, number * 1000)
    assert os.pread(fd, 1000, number * 1000) == bytes([number]) * 1000
    os.write(log, b"%d %d\\n" % (number, n))
    with open("lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        count = int(open("count").read())
        with open("count", "w") as file:
            file.write(str(count + 1))
"""
    (root / "count").write_text("0")
    running = [start(code, root, number) for number in range(PROCESSES)]
    assert [ended(process) for process in running] == [0] * PROCESSES
    assert (root / "f").read_bytes() == b"".join(bytes([number]) * 1000 for number in range(PROCESSES))
    lines = (root / "log").read_text().splitlines()
    assert sorted(lines) == sorted(f"{number} {n}" for number in range(PROCESSES) for n in range(10))
    assert (root / "count").read_text() == str(10 * PROCESSES)


def test_threads_that_make_rename_and_remove_the_same_names_leave_a_sound_tree(workspace: Workspace) -> None:
    root = Path(workspace.path)
    unexpected: list[OSError] = []
    usual = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EPERM}

    def make(one: Path, _: Path) -> None:
        os.close(os.open(one, os.O_CREAT | os.O_WRONLY))

    actions: list[Callable[[Path, Path], object]] = [
        lambda one, _: os.mkdir(one), make, os.rename, os.link,
        lambda one, _: os.unlink(one), lambda one, _: os.rmdir(one), lambda one, _: os.listdir(one),
    ]  # fmt: skip

    def work(seed: int) -> None:
        names = ["a", "b", "a/c", "b/c", "a/c/d", "b/e"]
        chance = random.Random(seed)
        for _ in range(600):
            try:
                chance.choice(actions)(root / chance.choice(names), root / chance.choice(names))
            except OSError as error:
                if error.errno not in usual:
                    unexpected.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for number in range(5):
        workspace.snapshot(f"s{number}")
    for thread in threads:
        thread.join()
    assert unexpected == []
    check_invariants(workspace)
    for number in range(5):
        workspace.restore(f"s{number}")
        check_invariants(workspace)


# -- full -------------------------------------------------------------------------------------------------
@pytest.mark.extended
def test_many_writers_on_a_full_volume_leave_it_sound(mount: MountIt) -> None:
    workspace = mount(max_bytes=2 * MIB, max_inodes=200)
    root = Path(workspace.path)
    code = """
import errno, os, sys
print(flush=True)
for n in range(150):
    try:
        with open(f"{sys.argv[1]}-{n % 60}", "r+b" if n % 3 == 0 else "wb", buffering=0) as file:
            file.seek(n * 100)
            file.write(bytes([n]) * 30_000)
        if n % 5 == 0:
            os.unlink(f"{sys.argv[1]}-{n % 60}")
        os.mkdir(f"{sys.argv[1]}-d{n}")
    except OSError as error:
        assert error.errno in (errno.ENOSPC, errno.ENOENT), error
"""
    running = [start(code, root, number) for number in range(8)]
    assert [ended(process) for process in running] == [0] * 8
    check_invariants(workspace)
    used = sum(os.lstat(root / name).st_blocks * 512 for name in os.listdir(root))
    assert used <= 2 * MIB
    subprocess.run("rm -rf -- *", shell=True, cwd=root, check=True)
    (root / "again").write_bytes(b"x" * MIB)


# -- short of memory --------------------------------------------------------------------------------------
@pytest.fixture
def short_of_memory(workspace: Workspace) -> Iterator[Path]:
    """A workspace whose daemon gets 64 MiB of address space more than it has, and no byte beyond."""
    root = Path(workspace.path)
    (root / "before").write_bytes(b"before" * 1000)
    with open(f"/proc/{workspace.pid}/statm") as file:
        pages = int(file.read().split()[0])
    before = resource.prlimit(workspace.pid, resource.RLIMIT_AS)
    limit = pages * os.sysconf("SC_PAGESIZE") + 64 * MIB
    resource.prlimit(workspace.pid, resource.RLIMIT_AS, (limit, before[1]))
    yield root
    resource.prlimit(workspace.pid, resource.RLIMIT_AS, before)


@pytest.mark.write_through  # with a write-back cache, write(2) does not fail
def test_a_daemon_without_memory_says_enomem_and_lives(short_of_memory: Path, workspace: Workspace) -> None:
    root = short_of_memory
    chunk = os.urandom(MIB)
    with Program(cwd=root) as program:
        program("fd = os.open('big', os.O_RDWR | os.O_CREAT); at = 0", chunk=chunk)
        with pytest.raises(OSError, match=r".") as raised:
            program("while True: at += os.pwrite(fd, chunk, at)")
        assert raised.value.errno == errno.ENOMEM
        written = program("at")
        assert written >= 32 * MIB
        assert program("os.fstat(fd).st_size") >= written
        for offset in range(0, written - MIB, 8 * MIB):
            assert program(f"os.pread(fd, len(chunk), {offset}) == chunk")
        program("os.close(fd)")
    assert (root / "before").read_bytes() == b"before" * 1000
    os.unlink(root / "big")
    (root / "after").write_bytes(b"after" * 1000)
    assert (root / "after").read_bytes() == b"after" * 1000
    check_invariants(workspace)


# -- at rest ----------------------------------------------------------------------------------------------
def cpu_ns(pid: int) -> int:
    """What the threads of a process have used: proc(5)."""
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in Path(f"/proc/{pid}/task").iterdir())


@pytest.mark.extended
def test_a_daemon_waits_awake_for_microseconds_only(mount: MountIt) -> None:
    workspace = mount()
    root = Path(workspace.path)
    for number in range(2000):  # requests that come one after the other are waited for awake
        (root / str(number)).mkdir()
    before = cpu_ns(workspace.pid)
    time.sleep(1)
    assert cpu_ns(workspace.pid) - before < 0.1e9
    for number in range(300):
        (root / f"slow{number}").exists()
        time.sleep(0.002)
    assert cpu_ns(workspace.pid) - before < 0.3e9


@needs_root
def test_a_daemon_s_waits_are_not_made_longer_to_save_interrupts(mount: MountIt) -> None:
    assert int(Path(f"/proc/{mount().pid}/timerslack_ns").read_text()) == 1


_LIMIT = 48
_FILES = 60


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["memory", "overlay", "host"])
def test_with_all_descriptors_in_use_calls_are_answered(workdir: Path, backend: str) -> None:
    kind = backend_over(backend, workdir / "low")
    place = workdir / "m"
    place.mkdir()
    command = f"ulimit -n {_LIMIT}; exec {sys.executable} -m vfsd.cli.main mount {place} --backend {kind}"
    if backend == "host":
        command += f" --store {workdir / 'store'}"
    subprocess.run(["sh", "-c", command], check=True, timeout=60, stdout=subprocess.DEVNULL)
    with Workspace.attach(str(place)) as workspace:
        try:
            _use_up_and_call(workspace, place, workdir)
        finally:
            workspace.unmount(lazy=True)


def _use_up_and_call(workspace: Workspace, place: Path, workdir: Path) -> None:
    for number in range(_FILES):
        (place / f"{number}").write_text("content")
    orphans, clients = [], []
    try:
        for number in range(_FILES):  # a host workspace keeps a descriptor for each
            try:
                orphans.append(os.open(place / f"{number}", os.O_RDWR))
                os.unlink(place / f"{number}")
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                break
        for _ in range(_LIMIT):
            clients.append(client := socket.socket(socket.AF_UNIX))
            client.connect(os.path.join(os.environ["VFSD_RUNTIME_DIR"], "vfsd", workspace.name + ".sock"))
        assert workspace.status().pid == workspace.pid
        for call in (
            lambda: workspace.snapshot("busy"),
            lambda: workspace.export(workdir / "busy.zip"),
            lambda: workspace.diff("busy"),
        ):
            try:
                call()
            except FileNotFoundError:
                pass  # the snapshot was one of the calls that failed
            except OSError as error:
                if f"may have {_LIMIT} files open" not in str(error):
                    raise
        assert place.stat()
    finally:
        for descriptor in orphans:
            os.close(descriptor)
        for client in clients:
            client.close()
    workspace.snapshot("free")
    (place / "new").write_text("new")
    assert workspace.restore("free").counts.total == 1
    workspace.export(workdir / "free.zip")
