"""Snapshots in an object store that is 20 ms away: pushes, and mounts of what was pushed.

    python -m bench.remote [--files 3000] [--large-files 100000] [--rounds 3] [--delay 0.02] [--only push mount]

The server is moto's S3 on this machine, behind a proxy that delays everything (`_slow_link`) and counts what passes.

`push`: a directory of FILES files is uploaded to a new place, ten files change, and it is uploaded again; by `vfsd
push` from a `host:` workspace, by `restic backup` and by `rclone sync`, in turns, ROUNDS times.  Programs that are not
installed are left out.  A time is that of the whole command, with its start.  `call` is `RemoteStore.push` of the same
ten changes, without the command, the daemon and the local snapshot.

`mount`: a snapshot of LARGE_FILES sparse files of 100 KB with 64 different contents, and one of a git repository of
FILES files, are mounted with `vfsd mount --from` with an empty cache.  `amplification` is what was transferred for
reading a number of files, as a multiple of their size.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench._slow_link import SlowLink, Traffic, slow_link
from bench.forks import git
from protocol.store import DirectorySource, Store
from protocol.store.object_store import RemoteStore, open_storage
from tests.support.s3_server import BUCKET, KEYS, options, s3_server
from vfsd.client.workspace import Workspace

_IN_A_DIRECTORY = 100
_LARGE_CONTENTS = 64
_LARGE_BYTES = 100 << 10
_READ = 100  # files whose reads give the amplification
Environment = Mapping[str, str]


class Rows:
    """Times and traffic by name, printed as a table."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[float, Traffic]]] = {}

    def timed(self, name: str, link: SlowLink, work: Callable[[], object]) -> Traffic:
        """Run `work`, and add its time and traffic."""
        link.traffic()
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        traffic = link.traffic()
        self._rows.setdefault(name, []).append((seconds, traffic))
        return traffic

    def show(self) -> None:
        """Print the medians, and the range of the times."""
        print(f"{'':28} {'ms':>8} {'range':>15} {'requests':>9} {'sent KB':>9} {'received KB':>11}")
        for name, runs in self._rows.items():
            times = [seconds * 1000 for seconds, _ in runs]
            requests, sent, received = (
                statistics.median(getattr(traffic, field) for _, traffic in runs)
                for field in ("requests", "sent_bytes", "received_bytes")
            )
            spread = f"{min(times):,.0f}-{max(times):,.0f}"
            print(
                f"{name:28} {statistics.median(times):8,.0f} {spread:>15} {requests:9,.0f} {sent / 1000:9,.0f}"
                f" {received / 1000:11,.0f}"
            )


# -- trees ------------------------------------------------------------------------------------------
def fill(top: Path, files: int) -> None:
    """Make a tree of small files, as a repository has them."""
    made = random.Random(files)
    for number in range(files):
        folder = top / f"d{number // _IN_A_DIRECTORY}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number}.txt").write_bytes(made.randbytes(made.randrange(200, 8000)))


def change(top: Path, files: int, turn: str) -> None:
    """Change ten files."""
    for number in range(0, files, max(1, files // 10)):
        (top / f"d{number // _IN_A_DIRECTORY}" / f"f{number}.txt").write_bytes(f"changed in {turn}".encode() * 50)


def fill_large(top: Path, files: int) -> None:
    """Make a tree of sparse, repetitive files of 100 KB."""
    contents = [random.Random(number).randbytes(4096) for number in range(_LARGE_CONTENTS)]
    for number in range(files):
        folder = top / f"d{number // 1000}"
        folder.mkdir(exist_ok=True)
        path = folder / f"f{number}"
        path.write_bytes(contents[number % _LARGE_CONTENTS])
        os.truncate(path, _LARGE_BYTES)


# -- pushes ----------------------------------------------------------------------------------------
def run(environment: Environment, *command: str) -> None:
    """Run a command; end with its errors if it fails."""
    # A bundle of certificates, which rclone refuses, is not needed without TLS.
    inherited = {name: value for name, value in os.environ.items() if name != "AWS_CA_BUNDLE"}
    done = subprocess.run(
        command, env={**inherited, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.decode(errors='replace')}")


def vfsd(environment: Environment, *words: str) -> None:
    """Run `vfsd`."""
    run(environment, sys.executable, "-m", "vfsd.cli.main", *words)


def pushers(tree: Path, place: Path, endpoint: str, mountpoint: str) -> dict[str, Callable[[str], object]]:
    """Return what uploads `tree` to a prefix, by name."""
    environment = {
        **KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "XDG_CACHE_HOME": str(place / "cache"),
        "RESTIC_PASSWORD": "x", "RCLONE_CONFIG": os.devnull,
    }  # fmt: skip
    found: dict[str, Callable[[str], object]] = {
        "vfsd push": lambda prefix: vfsd(environment, "push", f"s3://{BUCKET}/{prefix}/vfsd", "-w", mountpoint,
                                         "--as", f"push-{time.time_ns()}")
    }  # fmt: skip
    if (restic := shutil.which("restic")) is not None:
        made = set()

        def backup(prefix: str) -> None:
            repository = f"s3:{endpoint}/{BUCKET}/{prefix}-restic"
            if prefix not in made:
                run(environment, restic, "-r", repository, "init")
                made.add(prefix)
            run(environment, restic, "-r", repository, "backup", str(tree))

        found["restic backup"] = backup
    if (rclone := shutil.which("rclone")) is not None:
        target = f":s3,provider=Other,env_auth=true,force_path_style=true,endpoint='{endpoint}':{BUCKET}"
        found["rclone sync"] = lambda prefix: run(
            environment, rclone, "sync", "--transfers", "16", str(tree), f"{target}/{prefix}-rclone"
        )
    return found


def measure_pushes(place: Path, port: int, link: SlowLink, files: int, rounds: int) -> Rows:
    """Measure uploads of a new tree and of ten changes."""
    rows = Rows()
    tree = place / "tree"
    tree.mkdir()
    fill(tree, files)
    mountpoint = place / "mounted"
    store = place / "store"
    with Workspace.mount(mountpoint, backend=f"host:{tree}", store=store) as work:
        uploads = pushers(tree, place, f"http://127.0.0.1:{link.port}", work.path)
        for turn in range(rounds):
            for name, upload in uploads.items():
                rows.timed(f"{name}, all", link, partial(upload, f"turn{turn}"))
            change(tree, files, f"round {turn}")
            for name, upload in uploads.items():
                rows.timed(f"{name}, ten changes", link, partial(upload, f"turn{turn}"))
    with Store(place / "direct") as local:
        local.take("host:x", "first", DirectorySource(str(tree)))
        url = f"s3://{BUCKET}/direct"
        cache = str(place / "direct-cache")
        with RemoteStore(open_storage(url, options(port)), cache_directory=cache) as remote:
            remote.push(local, "host:x", "first")
        for turn in range(rounds):
            change(tree, files, f"call {turn}")
            local.take("host:x", f"call{turn}", DirectorySource(str(tree)))
            with RemoteStore(open_storage(url, options(link.port)), cache_directory=cache) as remote:
                rows.timed("call, ten changes", link, partial(remote.push, local, "host:x", f"call{turn}"))
    return rows


# -- mounts ----------------------------------------------------------------------------------------
def measure_mounts(place: Path, port: int, link: SlowLink, files: int, large_files: int, rounds: int) -> Rows:
    """Measure mounts of a large snapshot and of a repository."""
    rows = Rows()
    large, repository = place / "large", place / "repository"
    large.mkdir()
    fill_large(large, large_files)
    repository.mkdir()
    fill(repository, files)
    git("-C", str(repository), "init", "-q")
    git("-C", str(repository), "add", ".")
    git("-C", str(repository), "commit", "-qm", "x")
    git("-C", str(repository), "status")
    with Store(place / "store") as local, RemoteStore(open_storage(f"s3://{BUCKET}/m", options(port))) as remote:
        for name, tree in (("large", large), ("repository", repository)):
            local.take("host:x", name, DirectorySource(str(tree)))
            remote.push(local, "host:x", name)
    shutil.rmtree(large)
    environment = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.port}", "AWS_ALLOW_HTTP": "true"}
    mounted = str(place / "mounted")
    os.mkdir(mounted)
    try:
        for turn in range(rounds):
            fresh = {**environment, "XDG_CACHE_HOME": str(place / f"cache{turn}")}
            _measure_large(rows, link, fresh, mounted, random.Random(turn).sample(range(large_files), _READ))
            _measure_repository(rows, link, fresh, mounted)
            rows.timed("git status, host directory", link, partial(git, "-C", str(repository), "status"))
    finally:
        subprocess.run(["umount", "-l", mounted], check=False, capture_output=True)  # after a failure
    return rows


def _measure_large(rows: Rows, link: SlowLink, fresh: Environment, mounted: str, some: list[int]) -> None:
    rows.timed("mount", link, partial(vfsd, fresh, "mount", mounted, "--from", f"s3://{BUCKET}/m#large"))
    rows.timed("first ls", link, partial(run, {}, "ls", mounted))
    rows.timed("first ls -l of a directory", link, partial(run, {}, "ls", "-l", f"{mounted}/d0"))
    paths = [f"{mounted}/d{number // 1000}/f{number}" for number in some]
    traffic = rows.timed(f"cat of {_READ} files", link, partial(run, {}, "cat", *paths))
    amplification = traffic.received_bytes / (len(paths) * _LARGE_BYTES)
    print(f"amplification, {_READ} sparse files of 100 KB: {amplification:.3f}")
    vfsd(fresh, "unmount", mounted, "--discard")


def _measure_repository(rows: Rows, link: SlowLink, fresh: Environment, mounted: str) -> None:
    mount = partial(vfsd, fresh, "mount", mounted, "--from", f"s3://{BUCKET}/m#repository")
    status = partial(git, "-C", mounted, "status")
    mount()
    rows.timed("git status, cold", link, status)
    rows.timed("git status, again", link, status)
    vfsd(fresh, "unmount", mounted, "--discard")
    mount()
    rows.timed("git status, cached on disk", link, status)
    size = sum(path.stat().st_size for path in Path(mounted).glob("d*/*"))
    traffic = rows.timed("cat of the repository", link, partial(run, {}, "sh", "-c", f"cat {mounted}/d*/* > /dev/null"))
    print(f"amplification, all files of the repository: {traffic.received_bytes / size:.3f}")
    vfsd(fresh, "unmount", mounted, "--discard")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--large-files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.02, help="the round trip, in seconds")
    parser.add_argument("--only", nargs="+", choices=["push", "mount"], default=["push", "mount"])
    chosen = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs, round trip {chosen.delay * 1000:g} ms")
    for part in chosen.only:
        with tempfile.TemporaryDirectory() as name, s3_server() as port, slow_link(port, chosen.delay) as link:
            place = Path(name)
            if part == "push":
                rows = measure_pushes(place, port, link, chosen.files, chosen.rounds)
            else:
                rows = measure_mounts(place, port, link, chosen.files, chosen.large_files, chosen.rounds)
        rows.show()


if __name__ == "__main__":
    main()
