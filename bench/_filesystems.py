"""The file systems that are measured: tmpfs as the limit, vfsd, and peers from Debian, each over a tmpfs of its own.

A peer that cannot be had is a named gap: `GapError` says why, and stands in the table.
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench._machine import AS_IT_IS, AWAKE
from vfsd.client.workspace import Workspace

LIMIT = "tmpfs"
OURS = {  # engine and backend of each column
    "vfsd native": ("native", "memory"),
    "vfsd pyfuse3": ("pyfuse3", "memory"),
    "vfsd host": ("native", "host"),
    "vfsd overlay": ("native", "overlay"),
    "vfsd pyfuse3 host": ("pyfuse3", "host"),
    "vfsd pyfuse3 overlay": ("pyfuse3", "overlay"),
}
PEERS = ("bindfs", "fuse-overlayfs", "passthrough_ll", "rclone")
# rclone takes milliseconds for what others do in microseconds, and would be most of the run.
SLOW = frozenset({"rclone"})
PASSTHROUGH_SOURCE = Path("/usr/share/doc/libfuse3-dev/examples/passthrough_ll.c")


class GapError(Exception):
    """Why a file system is not in the table."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """A file system under test: a name for its column, and an empty directory in it."""

    name: str
    path: Path
    pid: int | None = None  # of what serves it
    is_slow: bool = False  # so much that one round of fewer operations has to do
    modes: tuple[str, ...] = (AS_IT_IS, AWAKE)  # in which it is measured


def cpu_clock(pid: int | None) -> Callable[[], float]:
    """Seconds of CPU used by us, by the commands that we ran, and by the server with process id `pid`."""

    def now() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        server_ns = 0
        if pid is not None:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                server_ns += int((thread / "schedstat").read_text().split()[0])  # proc(5): time on the CPU
        return time.process_time() + children.ru_utime + children.ru_stime + server_ns / 1e9

    return now


def end_cleanly() -> None:
    """Let SIGTERM (timeout(1), CI) and Ctrl-C unwind the stack, so that no mount is left behind."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: sys.exit(128 + got))


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a new directory that is removed at the end, with the files of the daemons that are started meanwhile.

    Daemons are started directly: the fork server would start the second of two workspaces in another way than the
    first, and could outlive the run.
    """
    scratch = Path(tempfile.mkdtemp(prefix="vfsd-bench-"))
    os.environ["VFSD_RUNTIME_DIR"] = str(scratch)
    os.environ["VFSD_FORK_SERVER"] = "off"
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@contextmanager
def tmpfs(place: Path) -> Iterator[Path]:
    place.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=6G,nosuid,nodev", "tmpfs", place)
    try:
        yield place
    finally:
        run("umount", "-l", place)
        place.rmdir()


@contextmanager
def peer(place: Path, program: str, command: Callable[[Path, Path], list[str | Path]]) -> Iterator[tuple[Path, int]]:
    """A FUSE file system whose content lies in a tmpfs; `command(backing, mountpoint)` serves it in the foreground."""
    if shutil.which(program) is None and not Path(program).exists():
        raise GapError(f"{program} is missing")
    place.mkdir()
    mountpoint = place / "mount"
    mountpoint.mkdir()
    with tmpfs(place / "backing") as backing:
        server = subprocess.Popen(
            [str(part) for part in command(backing, mountpoint)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + 15
            while not os.path.ismount(mountpoint):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise GapError(f"{program} did not mount")
                time.sleep(0.05)
            yield mountpoint, server.pid
        finally:
            subprocess.run(["fusermount3", "-u", "-z", mountpoint], check=False, capture_output=True)
            server.terminate()
            server.wait()


def overlayfs_command(backing: Path, mountpoint: Path) -> list[str | Path]:
    for name in ("lower", "upper", "work"):
        (backing / name).mkdir()
    layers = f"lowerdir={backing}/lower,upperdir={backing}/upper,workdir={backing}/work"
    return ["fuse-overlayfs", "-f", "-o", layers, mountpoint]


def build_passthrough(scratch: Path) -> str:
    """libfuse's own example, compiled: its low-level API with no more than a system call a request."""
    if not PASSTHROUGH_SOURCE.exists():
        raise GapError("libfuse3-dev's example passthrough_ll.c is missing")
    program = scratch / "passthrough_ll"
    flags = run("pkg-config", "--cflags", "--libs", "fuse3").split()
    run("gcc", "-O2", "-w", f"-I{PASSTHROUGH_SOURCE.parent}", PASSTHROUGH_SOURCE, "-o", program, *flags)
    return str(program)


def rclone_command(backing: Path, mountpoint: Path) -> list[str | Path]:
    cache = backing.parent / "cache"
    return [
        "rclone",
        "mount",
        "--config",
        "/dev/null",
        "--cache-dir",
        cache,
        "--vfs-cache-mode",
        "writes",
        backing,
        mountpoint,
    ]


@contextmanager
def vfsd_mount(place: Path, engine: str, backend: str = "memory") -> Iterator[tuple[Path, int]]:
    """A workspace; a directory that the backend is to have lies in a tmpfs of its own."""
    place.mkdir()
    with ExitStack() as stack:
        if backend != "memory":
            backend += f":{stack.enter_context(tmpfs(place / 'backing'))}"
        name = f"bench-{place.name}-{os.getpid()}"
        workspace = Workspace.mount(place / "mount", backend, engine=engine, name=name)
        stack.enter_context(workspace)
        yield Path(workspace.path), workspace.pid


@contextmanager
def all_mounted(
    scratch: Path, wanted: Callable[[str], bool], modes: tuple[str, ...] = (AS_IT_IS,)
) -> Iterator[tuple[list[Mounted], dict[str, str]]]:
    """Every available file system, the limit first; and the gaps, with their reasons.

    A vfsd workspace is measured in one mode only, and each mode has its own: with `--wakeups auto` a daemon learns
    whether keeping CPUs awake gains anything, and would learn it from the wrong mode.
    """
    gaps: dict[str, str] = {}
    mounted: list[Mounted] = []

    def add(stack: ExitStack, name: str, make: Callable[[], object], modes: tuple[str, ...] = modes) -> None:
        if not wanted(name):
            return
        try:
            found = stack.enter_context(make())  # type: ignore[arg-type]
        except GapError as gap:
            gaps[name] = str(gap)
            return
        path, pid = found if isinstance(found, tuple) else (found, None)
        mounted.append(Mounted(name, path, pid, is_slow=name in SLOW, modes=modes))

    with ExitStack() as stack:
        add(stack, LIMIT, lambda: tmpfs(scratch / "tmpfs"))
        for name, (engine, backend) in OURS.items():
            for mode in modes:
                place = scratch / f"vfsd-{engine}-{backend}-{mode.replace(' ', '-')}"
                add(stack, name, functools.partial(vfsd_mount, place, engine, backend), (mode,))
        add(stack, "bindfs", lambda: peer(scratch / "bindfs", "bindfs", lambda b, m: ["bindfs", "-f", b, m]))
        add(stack, "fuse-overlayfs", lambda: peer(scratch / "overlay", "fuse-overlayfs", overlayfs_command))
        try:
            program = build_passthrough(scratch) if wanted("passthrough_ll") else ""
            add(
                stack,
                "passthrough_ll",
                lambda: peer(scratch / "ll", program, lambda b, m: [program, "-f", "-o", f"source={b}", m]),
            )
        except GapError as gap:
            gaps["passthrough_ll"] = str(gap)
        add(stack, "rclone", lambda: peer(scratch / "rclone", "rclone", rclone_command))
        yield mounted, gaps
