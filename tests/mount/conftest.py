"""Real mounts: a workspace of its own for a test, on each engine, checked when the test is over."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.unmounting import unmount_when_idle
from vfsd.client.connection import ControlClient
from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace

ENGINES = ("native", "pyfuse3")
BACKENDS = ("memory", "overlay", "host")
PLACES = ("tmpfs", *(f"{engine}-{backend}" for engine in ENGINES for backend in BACKENDS))  # the oracle first
MountIt = Callable[..., Workspace]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.fuse)


def complaints(name: str) -> list[str]:
    """The lines of a daemon's log that a test must account for."""
    try:
        text = Path(log_path(name)).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if " warning " in line or " error " in line or "Traceback" in line]


def check_invariants(workspace: Workspace) -> None:
    """Have the daemon check its own state.  (A daemon that was lazily unmounted still answers.)"""
    with ControlClient(socket_of(workspace)) as client:
        client.call("check")


def socket_of(workspace: Workspace) -> str:
    return os.path.join(os.environ["VFSD_RUNTIME_DIR"], "vfsd", workspace.name + ".sock")


@contextmanager
def mounted(path: Path, **options: Any) -> Iterator[Workspace]:
    """A workspace at `path`; on leaving, its invariants hold and its log complains of nothing."""
    with Workspace.mount(path, **options) as workspace:
        yield workspace
        check_invariants(workspace)
        unmount_when_idle(workspace)
    assert complaints(workspace.name) == []


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def mount(engine: str, workdir: Path) -> Iterator[MountIt]:
    """Mounts workspaces below `workdir`: `mount()`, `mount(max_bytes=...)`; all are unmounted and checked."""
    with ExitStack() as stack:
        count = 0

        def mount_it(place: Path | None = None, **options: Any) -> Workspace:
            nonlocal count
            count += 1
            place = place or workdir / f"m{count}"
            place.mkdir()
            return stack.enter_context(
                mounted(place, **{"engine": engine, "name": f"{workdir.name}-{count}", **options})
            )

        yield mount_it


@pytest.fixture
def workspace(mount: MountIt) -> Workspace:
    return mount()


@pytest.fixture
def root(workspace: Workspace) -> Path:
    """The mount of `workspace`."""
    return Path(workspace.path)


# -- the same test on tmpfs and on mounts ---------------------------------------------------------------
@contextmanager
def provided(on: str, path: Path, *, max_bytes: int | None = None, max_inodes: int | None = None) -> Iterator[Path]:
    """A tmpfs or a workspace (one of PLACES, or an engine) at `path`, which everybody may use as they may use /tmp."""
    engine, _, backend = on.partition("-")
    if engine == "tmpfs":
        with _tmpfs(path, max_bytes, max_inodes):
            yield path
        return
    with ExitStack() as stack:
        options: dict[str, Any] = {"max_bytes": max_bytes, "max_inodes": max_inodes}
        if backend in ("overlay", "host"):
            below = path.with_name(f"{path.name}-below")
            below.mkdir()
            options["backend"] = f"{backend}:{below}"
        if backend == "host":
            # What is there is what is below: a tmpfs too, so that it shows what the oracle shows.
            stack.enter_context(_tmpfs(below, max_bytes, max_inodes))
            options = {"backend": options["backend"]}
        workspace = stack.enter_context(
            mounted(path, engine=engine, name=f"p-{path.name}", allow_other=True, **options)
        )
        path.chmod(0o1777)
        yield Path(workspace.path)


@contextmanager
def _tmpfs(path: Path, max_bytes: int | None, max_inodes: int | None) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    limits = [f"size={max_bytes}"] if max_bytes else []
    limits += [f"nr_inodes={max_inodes}"] if max_inodes else []
    options = ",".join(["mode=1777", "nosuid", "nodev", *limits])
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(scope="module", params=PLACES)
def on(request: pytest.FixtureRequest) -> str:
    """What the test runs on, one of PLACES."""
    return str(request.param)


@pytest.fixture(scope="module")
def kind(on: str) -> str:
    """What serves that: tmpfs, or an engine's name."""
    return on.partition("-")[0]


_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared(on: str, session_dir: str) -> Iterator[Path]:
    """One mount for all tests of a module, on each of PLACES."""
    place = Path(session_dir, "work", f"{on}{next(_numbers)}")
    place.mkdir()
    for above in place.parents:
        if str(above).startswith(session_dir):
            above.chmod(0o755)  # other users come through
    with provided(on, place) as root:
        yield root


@pytest.fixture
def place(shared: Path) -> Path:
    """A new directory that everybody may write in, on each of PLACES."""
    directory = shared / f"d{next(_numbers)}"
    directory.mkdir()
    directory.chmod(0o777)
    return directory
