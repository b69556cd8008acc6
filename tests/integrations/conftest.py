"""Other projects' packages, driven for real: collected with VFSD_INTEGRATIONS=1 only (`make test-integrations`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.model import ScriptedModel
from tests.mount.conftest import mounted
from tests.support.session_directories import new_directory
from vfsd.client.workspace import Workspace

collect_ignore_glob = [] if os.environ.get("VFSD_INTEGRATIONS", "") not in ("", "0") else ["*"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.fuse)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
def workspace(workdir: Path) -> Iterator[Workspace]:
    (workdir / "ws").mkdir()
    with mounted(workdir / "ws", name=f"{workdir.name}-ws") as workspace:
        yield workspace


@pytest.fixture(scope="module")
def shared(session_dir: str) -> Iterator[Workspace]:
    """A workspace for the tests of a module, which runs commands."""
    with Workspace.mount(new_directory(session_dir, "shared"), exec_on_host=True) as workspace:
        yield workspace


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, workdir: Path) -> Iterator[ScriptedModel]:
    """A model endpoint, to which the agents that the test starts send their requests."""
    (workdir / "home").mkdir()
    with ScriptedModel() as model:
        settings = {
            "ANTHROPIC_BASE_URL": model.url,
            "ANTHROPIC_API_KEY": "a-key-of-the-scripted-model",
            "CLAUDE_CONFIG_DIR": str(workdir / "home" / ".claude"),
            "HOME": str(workdir / "home"),
            "TMPDIR": str(workdir / "home"),
            # Nothing but the model is on loopback; nothing else may be asked.
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        for name in list(os.environ):
            if name.startswith(("CLAUDECODE", "CLAUDE_CODE_ENTRYPOINT", "ANTHROPIC_AUTH")):
                monkeypatch.delenv(name)
        yield model
        assert model.failures == []


@pytest.fixture(scope="session")
def claude() -> str:
    """The path of Claude Code."""
    found = os.environ.get("VFSD_CLAUDE") or shutil.which("claude")
    if found is None:
        pytest.skip("claude is missing: make test-integrations installs it")
    return found
