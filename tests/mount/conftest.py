"""Real mounts: a workspace of its own for a test, on each engine, checked when the test is over."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.tool_messages import EditFileParams
from tests.mount.programs import Program
from tests.support.hung_daemons import end_watch
from tests.support.lower_layers import LAYERS, NAME, make
from tests.support.rights import need_root
from tests.support.session_directories import new_directory
from tests.support.unmounting import unmount_when_idle
from vfsd.client.connection import ControlClient
from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace

ENGINES = ("native", "pyfuse3")
BACKENDS = ("memory", "overlay", "host")
WRITE_BACK = "native-writeback"  # the native engine with `--cache writeback`
# The oracle first.
OVER_LAYERS = tuple(f"native-{layer}" for layer in LAYERS)  # overlays over an empty archive or stored snapshot
PLACES = ("tmpfs", *(f"{engine}-{backend}" for engine in ENGINES for backend in BACKENDS), WRITE_BACK, *OVER_LAYERS)
# These modules run with a write-back cache in every session, the others with --runs-long.
WRITE_BACK_MODULES = frozenset(
    {
        "test_archive_live", "test_restore_live", "test_semantics_files", "test_semantics_limits",
        "test_undo",
    }
)  # fmt: skip
LAYER_MODULES = frozenset({"test_semantics_files"})  # run in OVER_LAYERS in every session, the others with --runs-long
# What these modules test lies above the engine: in the store, the backends, the control socket and the commands.  They
# run on the native engine, and on pyfuse3 with --runs-long and where a test is marked `both_engines`.
ONE_ENGINE_MODULES = frozenset(
    {
        "test_archive_live", "test_audit", "test_control_live", "test_fs_live", "test_hard_links", "test_host_backend",
        "test_host_snapshots", "test_interrupts_live", "test_json_documents", "test_lazy_resume", "test_long_paths",
        "test_overlay_backend", "test_restored_times", "test_snapshot_directory", "test_third_party_volume",
        "test_undo",
    }
)  # fmt: skip
# For a test whose size is the point, and that no combination of engine and backend makes another one of.
EACH_ENGINE_AND_BACKEND_ONCE = ("tmpfs", "native-memory", "native-overlay", "native-host", "pyfuse3-memory")
MountIt = Callable[..., Workspace]
Fork = Callable[..., Workspace]


@pytest.hookimpl(tryfirst=True)  # the root's takes the tests out that are marked `long`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    left_out: set[pytest.Item] = set()
    for item in items:
        if not str(item.path).startswith(here):
            continue
        item.add_marker(pytest.mark.fuse)
        if item.path.stem not in LAYER_MODULES and _is_over_layer(item):
            item.add_marker(pytest.mark.long)
        has_one_engine = item.path.stem in ONE_ENGINE_MODULES and not item.get_closest_marker("both_engines")
        if has_one_engine and _is_on_pyfuse3(item):
            item.add_marker(pytest.mark.long)
        if not _is_write_back(item):
            continue
        if item.path.stem not in WRITE_BACK_MODULES:
            item.add_marker(pytest.mark.long)
        mounts_itself = not {"mount", "on", "served"} & set(item.fixturenames)  # type: ignore[attr-defined]
        is_host = "host" in item.callspec.params.values()  # type: ignore[attr-defined]  # it has no write-back cache
        if mounts_itself or is_host or item.get_closest_marker("write_through"):
            left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)  # before pytest reads the parameters of fixtures
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests on the engines and the backends that their marker `workspaces` names."""
    marker = metafunc.definition.get_closest_marker("workspaces")
    if marker is None:
        return
    if "backends" in marker.kwargs and "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", marker.kwargs["backends"], indirect=True)
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "engines" in marker.kwargs and "engine" in metafunc.fixturenames and "engine" not in given:
        metafunc.definition.add_marker(pytest.mark.parametrize("engine", marker.kwargs["engines"], indirect=True))


def _options(node: pytest.Item) -> dict[str, Any]:
    """The options of `Workspace.mount` in the marker `workspaces`."""
    marker = node.get_closest_marker("workspaces")
    return {} if marker is None else {k: v for k, v in marker.kwargs.items() if k not in ("engines", "backends")}


def _is_write_back(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and WRITE_BACK in getattr(item, "callspec", _NoCall).params.values()


def _is_on_pyfuse3(item: pytest.Item) -> bool:
    params = getattr(item, "callspec", _NoCall).params.values()
    return not {"pyfuse3", "memory-pyfuse3"}.isdisjoint(param for param in params if isinstance(param, str))


def _is_over_layer(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and getattr(item, "callspec", _NoCall).params.get("on") in OVER_LAYERS


class _NoCall:
    params: Mapping[str, object] = {}


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


def backend_over(kind: str, below: Path) -> str:
    """The backend string of a `kind` of BACKENDS; the directory `below` is made if it needs one."""
    if kind not in ("overlay", "host"):
        return kind
    below.mkdir(exist_ok=True)
    return f"{kind}:{below}"


@contextmanager
def mounted(path: Path, *, may_say: str | None = None, **options: Any) -> Iterator[Workspace]:
    """A workspace at `path`; on leaving, its invariants hold, and each complaint in its log contains `may_say`.

    The backends "overlay" and "host" without a directory are over `below`, next to `path`.
    """
    if "backend" in options:
        options["backend"] = backend_over(options["backend"], path.with_name("below"))
    if options.get("allow_other"):
        need_root()  # other users are let in
    with end_watch() as end_begins, Workspace.mount(path, **options) as workspace:
        try:
            yield workspace
        finally:
            end_begins(workspace)
        check_invariants(workspace)
        unmount_when_idle(workspace)
    assert [line for line in complaints(workspace.name) if may_say is None or may_say not in line] == []


def edit_on_two_mounts(*workspaces: Workspace) -> str:
    """Edit 40 lines of file "f" on two mounts of its directory, all at the same time; return what it has to be then."""
    first, second = (Path(each.path, "f") for each in workspaces)
    first.write_text("".join(f"<{n}>\n" for n in range(40)))
    assert second.read_text() == first.read_text()  # both kernels know the file

    def edit(number: int) -> None:
        with ControlClient(socket_of(workspaces[number % 2])) as client:
            client.call("fs.edit", EditFileParams(path="f", old_text=f"<{number}>", new_text=f"[{number}]"))

    with ThreadPoolExecutor(40) as threads:
        list(threads.map(edit, range(40)))
    return "".join(f"[{n}]\n" for n in range(40))


@pytest.fixture(params=(*ENGINES, WRITE_BACK))
def engine(request: pytest.FixtureRequest) -> str:
    """An engine's name.  With WRITE_BACK, `mount` uses a write-back cache where the backend has one."""
    return str(request.param).partition("-")[0]


@pytest.fixture
def mount(request: pytest.FixtureRequest, engine: str, workdir: Path) -> Iterator[MountIt]:
    """Mounts workspaces below `workdir`: `mount()`, `mount(max_bytes=...)`; all are unmounted and checked.

    `mount(backend="overlay")` and `mount(backend="host")` are over the directory of the fixture `directory`.
    """
    is_cached = _is_write_back(request.node)
    with ExitStack() as stack:
        count = 0

        def mount_it(place: Path | None = None, **options: Any) -> Workspace:
            nonlocal count
            count += 1
            place = place or workdir / f"m{count}"
            place.mkdir()
            if is_cached and str(options.get("backend", "memory")).startswith(("memory", "overlay")):
                options = {"cache": "writeback", **options}
            return stack.enter_context(
                mounted(place, **{"engine": engine, "name": f"{workdir.name}-{count}", **options})
            )

        yield mount_it


@pytest.fixture
def directory(workdir: Path) -> Path:
    """The directory below the workspaces that `mount` makes."""
    path = workdir / "below"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture
def store(workdir: Path) -> Path:
    return workdir / "store"


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that a stranger may enter."""
    with tempfile.TemporaryDirectory(prefix="vfsd-host-") as place:
        os.chmod(place, 0o755)
        yield Path(place)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """One of the backends of the marker `workspaces`."""
    return str(getattr(request, "param", "memory"))


@pytest.fixture
def workspace(mount: MountIt, backend: str, request: pytest.FixtureRequest) -> Workspace:
    """A workspace with the options of the marker `workspaces`."""
    return mount(**{"backend": backend, **_options(request.node)})


@pytest.fixture(scope="module", params=BACKENDS)
def shared_workspace(request: pytest.FixtureRequest, session_dir: str) -> Iterator[Workspace]:
    """One workspace for the tests of a module, on each backend."""
    top, backend = new_directory(session_dir, "shared"), str(request.param)
    options = {"store": top / "store"} if backend == "host" else {}
    with mounted(top / "m", backend=backend, engine="native", name=f"{top.name}-{backend}", **options) as workspace:
        yield workspace


def fixture_of(make: Callable[..., Any], end: Callable[[Any], object], params: Any = None, ids: Any = None) -> Any:
    """A fixture for what `make` makes in a test's `workdir`, with the options in `params`; `end` is called with it."""

    @pytest.fixture(params=params, ids=ids)
    def made(workdir: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
        found = make(workdir, **getattr(request, "param", {}))
        yield found
        end(found)

    return made


@pytest.fixture
def program(root: Path) -> Iterator[Program]:
    """A program that runs beside the test; `root` is a name in it."""
    with Program() as program:
        program("pass", root=str(root))
        yield program


@contextmanager
def forking(workdir: Path, source: Workspace) -> Iterator[Fork]:
    """Yield a function that forks `source`, or another workspace, below `workdir`.

    At the end the forks are checked and unmounted, unless the test killed them.
    """
    made: list[Workspace] = []

    def make(name: str = "copy", of: Workspace = source, **options: Any) -> Workspace:
        made.append(of.fork(workdir / name, name=name, **options))
        return made[-1]

    yield make
    for workspace in reversed(made):
        is_mounted = os.path.ismount(workspace.path)
        if is_mounted and not os.path.exists(f"/proc/{workspace.pid}"):
            continue
        if is_mounted:
            check_invariants(workspace)
            unmount_when_idle(workspace)
        assert complaints(workspace.name) == []


@pytest.fixture
def fork(workdir: Path, source: Workspace) -> Iterator[Fork]:
    with forking(workdir, source) as fork:
        yield fork


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
        if on == WRITE_BACK:
            options["cache"] = "writeback"
        if on in OVER_LAYERS:
            below, place = (path.with_name(f"{path.name}-{name}") for name in ("below", "layer.zip"))
            below.mkdir()
            make("archive" if backend == "archive" else "snapshot", below, place)
            options["backend"] = f"overlay:{place}"
            if backend == "snapshot":
                options |= {"backend": f"overlay:snapshot:{NAME}", "store": place}
        if backend in ("overlay", "host"):
            below = path.with_name(f"{path.name}-below")
            below.mkdir()
            options["backend"] = f"{backend}:{below}"
        if backend == "host":
            # What is there is what is below: a tmpfs too, so that it shows what the oracle shows.
            stack.enter_context(_tmpfs(below, max_bytes, max_inodes))
            options = {"backend": options["backend"]}
        workspace = stack.enter_context(
            mounted(path, engine=engine, name=f"p-{path.name}", allow_other=os.geteuid() == 0, **options)
        )
        path.chmod(0o1777)
        yield Path(workspace.path)


@contextmanager
def _tmpfs(path: Path, max_bytes: int | None, max_inodes: int | None) -> Iterator[None]:
    need_root()
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
    with provided(on, new_directory(session_dir, on)) as root:
        yield root


@pytest.fixture
def place(shared: Path) -> Path:
    """A new directory that everybody may write in, on each of PLACES."""
    directory = shared / f"d{next(_numbers)}"
    directory.mkdir()
    directory.chmod(0o777)
    return directory


def text(workspace: Workspace, path: str = "tree/file") -> str:
    return Path(workspace.path, path).read_text()


def put(workspace: Workspace, path: str, content: str) -> None:
    Path(workspace.path, path).write_text(content)
