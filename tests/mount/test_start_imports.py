"""What a daemon imports before its mount answers."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import protocol
import vfsd as package
from tests.mount.conftest import check_invariants, mounted
from tests.mount.kept_workspaces import Kept, KeptCommand, KeptHost, KeptOverlay
from tests.mount.programs import log_of, succeeded, vfsd
from tests.support.waiting import wait_until
from tests.support.zygote import starting_interpreters
from vfsd.client.launch import log_path
from vfsd.client.workspace import Workspace

# What only calls on the control socket, other backends or rare options need.
LATER = (
    "asyncio", "click", "hypothesis", "logging.handlers",
    "podman", "protocol.archive", "protocol.backends.container", "protocol.backends.host",
    "protocol.backends.overlay", "protocol.diff.patch", "protocol.execution", "protocol.search", "protocol.store",
    "protocol.testing", "protocol.tools", "pyfuse3", "re2", "rich", "vfsd.cli", "vfsd.client",
    "vfsd.daemon.control.handlers.fs", "vfsd.daemon.control.handlers.changes", "vfsd.kernel.engines.pyfuse3", "zlib_ng",
)  # fmt: skip
# What preload() is for: a process that forks daemons imports it once.
PRELOADED = "import sys; from vfsd.daemon.preload import preload; preload(); print(*sys.modules)"

EVERYTHING: Final = """
import sys
from vfsd.daemon import preload
from vfsd.daemon.backends import registry
preload.preload(registry._BUILT_IN)
for kind in registry._BUILT_IN:
    preload.import_rest(kind)
print(*sys.modules)
"""
# Few workspaces have a sandbox; an engine is imported before its mount is made.
NOT_AT_THE_START = {"vfsd.daemon.exec.sandbox", "vfsd.kernel.engines.pyfuse3"}


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def imports(log: str) -> list[str]:
    """The modules that were imported, by PYTHONPROFILEIMPORTTIME."""
    return [line.rsplit("|", 1)[1].strip() for line in log.splitlines() if line.startswith("import time:")]


def test_a_daemon_imports_what_its_mount_needs_and_preload_imports_all_of_it(workdir: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, starting_interpreters():
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        with mounted(workdir / "m") as workspace:
            workspace.snapshot("s")  # answered after everything is imported
            log = Path(log_path(workspace.name)).read_text()
    before, _, after = log.partition(": mounted, served by")
    imported, rest = imports(before), imports(after)
    assert "protocol.backends.memory.volume" in imported
    assert [module for module in imported if within(module, LATER)] == []
    assert "vfsd.daemon.control.handlers.fs" in rest

    loaded = subprocess.run([sys.executable, "-c", PRELOADED], capture_output=True, text=True, check=True)
    ours = {module for module in imported if within(module, ("protocol", "vfsd"))}
    assert ours - set(loaded.stdout.split()) <= {"vfsd.daemon.main"}


def imported_in_functions(module: str) -> set[str]:
    """The modules of vfsd that functions of `module` import."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    functions = [
        node for node in ast.walk(ast.parse(Path(found.origin).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]  # fmt: skip
    imports = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in imports if node.module and within(node.module, ("protocol", "vfsd"))}


@pytest.mark.extended
def test_a_daemon_imports_nothing_later(workdir: Path) -> None:
    """The files of vfsd may have been replaced since it started (`pip install --upgrade`)."""
    done = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True, check=True, cwd=workdir)
    loaded = {module for module in done.stdout.split() if within(module, ("protocol", "vfsd"))}
    later = {name for module in loaded for name in imported_in_functions(module)} - loaded
    assert later == NOT_AT_THE_START


@pytest.mark.extended
@pytest.mark.parametrize("kind", [Kept, KeptOverlay, KeptHost, KeptCommand])
def test_a_replacement_imports_nothing_before_it_serves(workdir: Path, kind: type[Kept]) -> None:
    """The files of vfsd may have been replaced since the first daemon started (`pip install --upgrade`)."""
    with pytest.MonkeyPatch.context() as patch, starting_interpreters():
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        kept = kind(workdir)
        kept.mount().snapshot("s")  # answered after everything is imported
        (kept.path / "file").write_bytes(b"content")
        kept.kill()
        assert (kept.path / "file").read_bytes() == b"content"
        log = Path(log_path(kept.name)).read_text()
        kept.end()
    _, _, after = log.partition("was killed by SIGKILL")
    before, found, _ = after.partition("continued the mount")
    assert found
    assert imports(before) == []


@pytest.fixture
def old(workdir: Path) -> Iterator[Path]:
    """Another installation of vfsd."""
    root = workdir / "old"
    for one in (package, protocol):
        assert one.__file__ is not None
        source = Path(one.__file__).parent
        shutil.copytree(source, root / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    with starting_interpreters():
        yield root


@pytest.mark.extended
@pytest.mark.parametrize("kind", [Kept, KeptOverlay, KeptHost, KeptCommand])
def test_a_daemon_whose_installation_is_gone_serves_is_restarted_and_is_upgraded(
    workdir: Path, old: Path, kind: type[Kept]
) -> None:
    kept = kind(workdir)
    options = [
        text for key, value in kept.options.items()
        for text in ([f"--{key}"] if value is True else [f"--{key.replace('_', '-')}", str(value)])
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(old), "VFSD_FORK_SERVER": "off"}
    succeeded(vfsd("mount", kept.path, "--name", kept.name, *options, env=environment))
    workspace = Workspace.attach(kept.name)
    try:
        (kept.path / "file").write_bytes(b"one")
        workspace.snapshot("one")  # answered after everything is imported
        keeper = kept.record.keeper
        assert keeper is not None
        wait_until(lambda: _has_imported(keeper), "the imports of the keeper")
        shutil.rmtree(old)

        for number in range(2):
            (kept.path / "file").write_bytes(b"two")
            workspace.diff("one")
            workspace.snapshot(f"two-{number}")
            workspace.restore("one")
            assert (kept.path / "file").read_bytes() == b"one"
            workspace.undo()
            workspace.export(workdir / f"{number}.zip")
            if kind in {Kept, KeptOverlay}:
                succeeded(vfsd("compact", "-w", kept.name))
            if not number:
                pid = kept.record.pid
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda pid=pid: kept.record.pid != pid, "a replacement")
                assert (kept.path / "file").read_bytes() == b"two"
        assert "restarted" in succeeded(vfsd("upgrade", kept.name))
        assert (kept.path / "file").read_bytes() == b"two"
        assert "Error" not in log_of(kept.name)
        check_invariants(workspace)
    finally:
        kept.end()


def _has_imported(keeper: int) -> bool:
    """Whether the keeper has imported what replacements need: it takes its name after that."""
    return Path(f"/proc/{keeper}/comm").read_text().startswith("vfsd-keep")
