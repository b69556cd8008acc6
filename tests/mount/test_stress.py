"""stress-ng and fio on a mount: what verifies on tmpfs verifies here; no bad block, no EIO, nothing hangs."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.mount.conftest import BACKENDS, ENGINES, WRITE_BACK, check_invariants, provided
from vfsd.client.workspace import Workspace

MountIt = Callable[..., Workspace]

# Of stress-ng's class "filesystem" those that work in the directory that they are given, in the order of its list.
# Not among them: bind-mount and binderfs (mounts of their own), eventfd, ioprio and procfs (no files of ours).
STRESSORS = """
    access chattr chdir chmod chown copy-file dentry dir dirdeep dirmany dnotify dup fallocate fanotify fcntl
    fiemap file-ioctl filename flock fpunch fsize fstat getdent handle hdd inode-flags inotify io iomix lease
    link locka lockf lockofd mknod open rename symlink sync-file touch utime verity xattr
""".split()  # noqa: SIM905
# Of other classes those that use files.
MORE = """
    seek sendfile splice mmap mmapfork mmapfixed msync readahead revio rlimit fault
""".split()  # noqa: SIM905
# In every run: the ones with most to verify.  Over a directory those that the directory makes a difference to.
BRIEF = """
    chmod chown copy-file dentry fallocate filename hdd iomix lockf mmap msync rename seek utime xattr
""".split()  # noqa: SIM905
OVER_A_DIRECTORY = "copy-file dentry fallocate hdd mmap rename xattr".split()  # noqa: SIM905
AT_ONCE = 8  # of the above
FIO_ENGINES = ("psync", "mmap", "pvsync2", "io_uring", "libaio")


# Each backend on the native engine and each engine with memory; the other combinations with --runs-long.
COMBINATIONS = [
    pytest.param(engine, backend, marks=() if engine == "native" or backend == "memory" else pytest.mark.long)
    for engine in (*ENGINES, WRITE_BACK)
    for backend in BACKENDS
]


def stress(stressors: Sequence[str], place: Path, seconds: int) -> tuple[int, str]:
    """The exit status and the output of stress-ng, which runs the stressors in parallel and removes their files."""
    directory = place / "stress"
    directory.mkdir()
    each = [word for stressor in stressors for word in (f"--{stressor}", "1")]
    command = ["stress-ng", *each, "--verify", "--timeout", f"{seconds}s", "--temp-path", directory]
    # A process group of its own: it ends what it started.
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    assert os.strerror(errno.EIO) not in said
    assert list(directory.iterdir()) == []
    directory.rmdir()
    return done.returncode, said


def fio(place: Path, *options: str) -> None:
    """Random writes of mixed sizes by several jobs, each block read again and its CRC compared."""
    directory = place / "fio"
    directory.mkdir()
    command = [
        "fio", "--name=verify", f"--directory={directory}", "--rw=randwrite", "--bsrange=512-64k", "--numjobs=3",
        "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--group_reporting", *options,
    ]  # fmt: skip
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verify:" not in done.stderr
    shutil.rmtree(directory)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "backend"), COMBINATIONS, indirect=["engine"])
def test_stress_ng_verifies_what_it_does_on_a_mount(workspace: Workspace) -> None:
    stressors = BRIEF if workspace.status().backend == "memory" else OVER_A_DIRECTORY
    for first in range(0, len(stressors), AT_ONCE):
        status, said = stress(stressors[first : first + AT_ONCE], Path(workspace.path), 1)
        assert status == 0, said
        check_invariants(workspace)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stressor", STRESSORS + MORE)
def test_stress_ng_passes_where_it_passes_on_tmpfs(mount: MountIt, workdir: Path, stressor: str) -> None:
    (workdir / "tmpfs").mkdir()
    with provided("tmpfs", workdir / "tmpfs") as oracle:
        expected, _ = stress([stressor], oracle, 3)
    status, said = stress([stressor], Path(mount().path), 3)
    assert status == expected, said


@pytest.mark.extended
@pytest.mark.parametrize(("engine", "backend"), COMBINATIONS, indirect=["engine"])
@pytest.mark.parametrize("io_engine", ["psync", "mmap"])
def test_fio_finds_no_bad_block(root: Path, io_engine: str) -> None:
    fio(root, "--size=2m", f"--ioengine={io_engine}")


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("io_engine", FIO_ENGINES)
def test_fio_finds_no_bad_block_however_it_writes(root: Path, io_engine: str) -> None:
    fio(root, "--size=64m", f"--ioengine={io_engine}")
    if io_engine == "mmap":
        return  # fio's own mistakes the offsets of several jobs in one file, on tmpfs too
    fio(root, "--size=16m", f"--ioengine={io_engine}", "--filename=one-file", "--offset_increment=16m")
    fio(root, "--size=16m", f"--ioengine={io_engine}", "--direct=1", "--bsrange=4k-64k")
