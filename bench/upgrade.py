"""How long programs wait for an upgrade: `python -m bench.upgrade [--files N] [--rounds N] [--persist] [--backend B]`.

Fills a workspace with small files (with the backends `overlay` and `host` the directory below, which a walk then makes
known to the kernel), and upgrades it again and again while `tar x` unpacks an archive into it in a loop.
Prints the pause that the daemon reports, and the longest call of a program that changes the mode of a file every
millisecond: median and maximum of the rounds; and the same program's longest call in as much time without an upgrade.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from bench.journal import fill
from vfsd.client.workspace import Workspace

_ARCHIVED: Final = 2000  # files that each `tar x` unpacks
_PERIOD_S: Final = 0.001


class _Prober:
    """Changes the mode of a file again and again; `longest_s` is the longest call since it was set to 0."""

    def __init__(self, path: Path) -> None:
        self.longest_s = 0.0
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Prober:
        self._path.touch()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        mode = 0o600
        while not self._stop.wait(_PERIOD_S):
            mode ^= 0o001
            start = time.perf_counter()
            os.chmod(self._path, mode)
            self.longest_s = max(self.longest_s, time.perf_counter() - start)


class _Unpacker:
    """Runs `tar x` and `rm -r` in a loop."""

    def __init__(self, archive: Path, target: Path) -> None:
        self.turns = 0
        self._archive = archive
        self._target = target
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Unpacker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._target.mkdir()
            subprocess.run(["tar", "xf", self._archive, "-C", self._target], check=True)
            subprocess.run(["rm", "-r", self._target], check=True)
            self.turns += 1


def _archive(directory: Path) -> Path:
    source, archive = directory / "source", directory / "archive.tar"
    source.mkdir()
    for number in range(_ARCHIVED):
        (source / f"f{number}").write_bytes(os.urandom(4000))
    subprocess.run(["tar", "cf", archive, "-C", source, "."], check=True)
    return archive


def _report(what: str, values_ms: list[float]) -> None:
    print(f"{what:<44}{statistics.median(values_ms):8.1f}{max(values_ms):10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--persist", action="store_true", help="with a journal and a keeper")
    parser.add_argument("--backend", choices=["memory", "overlay", "host"], default="memory")
    parser.add_argument("--directory", default=None, help="for the journal and the archive")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        root, archive = Path(place), _archive(Path(place))
        options: dict[str, Any] = {"persist": True, "journal_dir": root / "journal"} if arguments.persist else {}
        if arguments.backend != "memory":
            (root / "below").mkdir()
            fill(root / "below", arguments.files)
            options["backend"] = f"{arguments.backend}:{root / 'below'}"
        with Workspace.mount(root / "mount", **options) as workspace:
            if arguments.backend == "memory":
                fill(root / "mount", arguments.files)
            else:
                subprocess.run(["find", root / "mount", "-size", "+1M"], check=True)  # looks up every file
            pauses, longest, usual, whole = [], [], [], []
            with _Prober(root / "mount" / "probe") as prober, _Unpacker(archive, root / "mount" / "unpacked") as tar:
                for _ in range(arguments.rounds):
                    prober.longest_s = 0
                    start = time.perf_counter()
                    pauses.append(workspace.upgrade().pause_ms)
                    whole.append((time.perf_counter() - start) * 1000)
                    longest.append(prober.longest_s * 1000)
                    prober.longest_s = 0
                    time.sleep(whole[-1] / 1000)
                    usual.append(prober.longest_s * 1000)
            load = os.getloadavg()[0]
            what = f"{arguments.backend}, {arguments.files} files, {arguments.rounds} upgrades"
            print(f"{what}, {tar.turns} times tar x, load {load:.1f}")
            print(f"{'milliseconds':<44}{'median':>8}{'maximum':>10}")
            _report("pause, as the daemon reports it", pauses)
            _report("longest chmod during an upgrade", longest)
            _report("longest chmod in as much time without one", usual)
            _report("the whole upgrade", whole)


if __name__ == "__main__":
    main()
