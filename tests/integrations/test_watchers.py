"""Programs that watch files themselves, not their directories, learn of a restore and of the edits after it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.mount.conftest import mounted
from vfsd.client.workspace import Workspace

WAIT_S = 120


@pytest.fixture(params=["memory", "host", "overlay"])
def project(request: pytest.FixtureRequest, workdir: Path) -> Iterator[Workspace]:
    """A workspace with a snapshot `good` of a project whose file `part.ts` is correct."""
    below = workdir / "below"
    below.mkdir()
    (workdir / "ws").mkdir()
    backend = "memory" if request.param == "memory" else f"{request.param}:{below}"
    with mounted(workdir / "ws", name=f"{workdir.name}-ws", backend=backend) as workspace:
        root = Path(workspace.path)
        (root / "part.ts").write_text("export const part: number = 1;\n")
        (root / "main.ts").write_text('import { part } from "./part";\nexport const all: number = part;\n')
        (root / "tsconfig.json").write_text(json.dumps({"compilerOptions": {"noEmit": True}, "files": ["main.ts"]}))
        workspace.snapshot("good")
        yield workspace


class Lines:
    """The lines that a program prints, as they come."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._lines: list[str] = []
        self._read = 0
        self._changed = threading.Condition()
        self._program = program
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        """Wait for a line with `text` after those that earlier calls found."""

        def found() -> bool:
            for number in range(self._read, len(self._lines)):
                if text in self._lines[number]:
                    self._read = number + 1
                    return True
            return False

        with self._changed:
            assert self._changed.wait_for(found, WAIT_S), (text, self._lines)

    def wait_for_watch(self, path: str) -> None:
        """Wait until the program watches the file that `path` refers to: it notices a replacement after the event."""
        inode = os.stat(path).st_ino
        deadline = time.monotonic() + WAIT_S
        while f" ino:{inode:x} " not in self._watches():
            assert time.monotonic() < deadline, (path, inode, self._watches())
            time.sleep(0.05)

    def _watches(self) -> str:
        """The inotify watches of the program, as proc(5) shows them."""
        directory = f"/proc/{self._program.pid}/fdinfo"
        found = ""
        for name in os.listdir(directory):
            with suppress(OSError), open(f"{directory}/{name}") as file:
                found += file.read()
        return found


@contextmanager
def running(*command: str, directory: str) -> Iterator[Lines]:
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as program:
        try:
            yield Lines(program)
        finally:
            program.kill()


def edit(root: str, text: str) -> None:
    """Replace the file, as `sed -i` and most editors do."""
    path = os.path.join(root, "part.ts")
    with open(path + ".new", "w") as file:
        file.write(f"export const part: number = {text};\n")
    os.rename(path + ".new", path)


def npm_package(name: str) -> str:
    installed = os.path.join(os.environ.get("VFSD_WATCHERS", ""), "node_modules", name)
    if shutil.which("node") is None or not os.path.isdir(installed):
        pytest.skip(f"{name} is missing: make test-integrations installs it")
    return installed


def test_tsc_watch_compiles_again_after_each_restore_and_each_edit(project: Workspace) -> None:
    tsc = npm_package("typescript") + "/bin/tsc"
    root = str(project.path)
    part = os.path.join(root, "part.ts")
    with running("node", tsc, "--watch", "--preserveWatchOutput", directory=root) as lines:
        lines.wait_for("Found 0 errors")
        for text in ('"a"', '"b"'):
            lines.wait_for_watch(part)
            edit(root, text)
            lines.wait_for("Found 1 error")
            lines.wait_for_watch(part)
            project.restore("good")
            lines.wait_for("Found 0 errors")


def test_chokidar_sees_each_restore_and_each_edit(project: Workspace) -> None:
    program = (
        f"const {{watch}} = await import({json.dumps(npm_package('chokidar') + '/esm/index.js')});"
        "watch('part.ts', {ignoreInitial: true, atomic: false})"
        ".on('all', (event, path) => console.log(event, path)).on('ready', () => console.log('ready'));"
    )
    root = str(project.path)
    part = os.path.join(root, "part.ts")
    with running("node", "--input-type=module", "--eval", program, directory=root) as lines:
        lines.wait_for("ready")
        for text in ('"a"', '"b"'):
            lines.wait_for_watch(part)
            edit(root, text)
            lines.wait_for("change part.ts")
            lines.wait_for_watch(part)
            project.restore("good")
            lines.wait_for("change part.ts")


def test_watchdog_sees_each_restore_and_each_edit(project: Workspace) -> None:
    program = (
        "import time, watchdog.events, watchdog.observers\n"
        "class Handler(watchdog.events.FileSystemEventHandler):\n"
        "    def on_any_event(self, event):\n"
        "        if event.event_type in ('created', 'modified', 'moved'):\n"
        "            print('changed', event.src_path, event.dest_path, flush=True)\n"
        "observer = watchdog.observers.Observer()\n"
        "observer.schedule(Handler(), '.')\n"
        "observer.start()\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    root = str(project.path)
    with running(sys.executable, "-c", program, directory=root) as lines:
        lines.wait_for("ready")
        for text in ('"a"', '"b"'):
            edit(root, text)
            lines.wait_for("part.ts.new")
            project.restore("good")
            lines.wait_for("./part.ts")
