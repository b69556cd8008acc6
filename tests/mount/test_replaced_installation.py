"""`pip install --upgrade` replaces the files of vfsd under running daemons: what is loaded later would not fit.

A daemon of an installation whose files are gone has to do the same as before.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import protocol
import vfsd as package
from tests.mount.conftest import check_invariants
from tests.mount.kept_workspaces import Kept, KeptCommand, KeptHost, KeptOverlay
from tests.mount.programs import log_of, succeeded, vfsd
from tests.support.waiting import wait_until
from tests.support.zygote import starting_interpreters
from vfsd.client.workspace import Workspace


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
