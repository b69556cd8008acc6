"""A container's workspace, through each transport, against the host backend and against `podman exec`.

The same directory of this machine is served three times: by the host backend, and bound into a container and served
through the rootfs and through the agent transport.  So a row shows what the way into the container costs.  The mounts
take turns; a cell is the median over the rounds.  `podman exec` is one command in the container for one operation, as
an agent without vfsd does it, over the same service.

    python -m bench.container [--cpu] [--rows REGEX] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from bench import _micro
from bench._filesystems import cpu_clock, end_cleanly
from protocol.backends.container.agent.tree import AgentTree
from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.podman.spec import ContainerMount, ContainerSpec
from protocol.backends.container.workspace import AgentTransport
from tests.container.conftest import PYTHON, import_image, inside
from tests.container.service import running_service, write_python_image
from vfsd.client.workspace import Workspace

# Fewer than elsewhere: the agent's rows, and above all podman exec's, take their time.
AMOUNTS = _micro.Amounts(files=300, entries=3000, data_bytes=8 << 20)
EXEC_OPERATIONS = 10
TREE_FILES = 1000
READERS = 32
ROOTFS_MOST = 1.5  # of what the host backend takes
AGENT_LEAST = 50.0  # times as fast as podman exec


@dataclass(frozen=True, slots=True)
class Bench:
    """The mounts by name, their clocks, and the container that has the same directory at /workspace."""

    mounts: dict[str, Path]
    clocks: dict[str, Callable[[], float]]
    container: Container


@contextmanager
def benched(scratch: Path, *, cpu: bool) -> Iterator[Bench]:
    with ExitStack() as stack:
        url = stack.enter_context(running_service(scratch / "podman"))
        service = PodmanService(url)
        stack.callback(service.close)
        archive = scratch / "python.tar"
        write_python_image(archive)
        import_image(url, archive, PYTHON)
        shared = scratch / "shared"
        shared.mkdir()
        container = service.create(ContainerSpec(PYTHON, mounts=[ContainerMount(str(shared), "/workspace")]))
        stack.callback(container.remove)
        container.start()
        mounts, clocks = {}, {}
        for name, options in {
            "host": {"backend": f"host:{shared}"},
            "rootfs": {"backend": f"container:{container.name}", "transport": "rootfs", "podman_url": url},
            "agent": {"backend": f"container:{container.name}", "transport": "agent", "podman_url": url},
        }.items():
            mounts[name] = scratch / name
            workspace = Workspace.mount(mounts[name], name=f"bench-{name}", **options)  # type: ignore[call-overload]
            stack.enter_context(workspace)
            clocks[name] = cpu_clock(workspace.status().pid) if cpu else time.perf_counter
        yield Bench(mounts, clocks, container)


# -- the same workload on each mount -------------------------------------------------------------------
def measure_row(workload: _micro.Workload, bench: Bench, rounds: int) -> dict[str, float]:
    """Seconds an operation (or MiB), by mount."""
    cells: dict[str, list[float]] = {name: [] for name in bench.mounts}
    names = list(bench.mounts)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            place = bench.mounts[name] / f"round{number}-{name}"
            place.mkdir()
            try:
                cells[name].append(_micro.measure(workload, str(place), bench.clocks[name], AMOUNTS))
            finally:
                shutil.rmtree(place)
    return {name: statistics.median(seconds) for name, seconds in cells.items()}


# -- one podman exec for each operation ---------------------------------------------------------------
EXECS: dict[str, list[str]] = {
    "stat cold": ["stat", "/workspace/exec/f{}"],
    "open+read+close cold": ["cat", "/workspace/exec/f{}"],
    "create + write 1 KB": ["sh", "-c", "head -c 1024 /dev/zero > /workspace/exec/new{}"],
    "mkdir": ["mkdir", "/workspace/exec/dir{}"],
    "rename": ["mv", "/workspace/exec/f{}", "/workspace/exec/renamed{}"],
    "unlink": ["rm", "/workspace/exec/renamed{}"],
}


def measure_exec(bench: Bench) -> dict[str, float]:
    """Seconds for one operation as one `podman exec`, through the service's API: the CLI takes longer."""
    inside(bench.container, "mkdir /workspace/exec; cd /workspace/exec; for i in $(seq 0 9); do echo x > f$i; done")
    found = {}
    for name, command in EXECS.items():
        began = time.perf_counter()
        for number in range(EXEC_OPERATIONS):
            inside(bench.container, *(part.format(number) for part in command))
        found[name] = (time.perf_counter() - began) / EXEC_OPERATIONS
    inside(bench.container, "rm -r /workspace/exec")
    return found


# -- a tree, one request after the other and many together ---------------------------------------------
def read_tree(root: Path, readers: int) -> float:
    """Seconds to list a tree of TREE_FILES files in 20 directories and read each, by so many threads."""

    def read(path: str) -> int:
        with open(path, "rb") as file:
            return len(file.read())

    began = time.perf_counter()
    paths = [entry.path for directory in os.scandir(root / "tree") for entry in os.scandir(directory.path)]
    if readers == 1:
        sizes = [read(path) for path in paths]
    else:
        with ThreadPoolExecutor(readers) as pool:
            sizes = list(pool.map(read, paths))
    assert len(sizes) == TREE_FILES
    assert set(sizes) == {1024}
    return time.perf_counter() - began


def read_in_bulk(container: Container) -> float:
    """Seconds for the same through the agent alone, as a snapshot reads: listed in pages, files asked for ahead."""

    def read(tree: AgentTree) -> float:
        began = time.perf_counter()
        sizes = [sum(map(len, tree.chunks(entry.path))) for entry in tree.walk(b"tree") if entry.is_file]
        assert (len(sizes), set(sizes)) == (TREE_FILES, {1024})
        return time.perf_counter() - began

    async def measure() -> float:
        transport = AgentTransport(container.service, "/workspace")
        async with trio.open_nursery() as nursery:
            await transport.open(container.inspect(), nursery)
            seconds = await trio.to_thread.run_sync(read, transport.tree())
            await transport.close()
        return seconds

    return trio.run(measure)


def measure_tree(bench: Bench) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {name: {} for name in bench.mounts}
    for title, readers in (("one by one", 1), (f"{READERS} readers", READERS)):
        for name, root in bench.mounts.items():
            script = "import os\nfor d in range(20):\n os.makedirs(f'/workspace/tree/d{d}')\n"
            script += " for f in range(50): open(f'/workspace/tree/d{d}/f{f}', 'wb').write(b'x' * 1024)"
            inside(bench.container, "python3", "-c", script)
            _micro.drop_caches()
            found[name][title] = read_tree(root, readers)
            if name == "agent":
                found[name]["in bulk"] = read_in_bulk(bench.container)
            inside(bench.container, "rm -r /workspace/tree")
    return found


# -- the report ---------------------------------------------------------------------------------------
def _shown(seconds: float, unit: str) -> str:
    return f"{1 / seconds:.0f} MiB/s" if unit == "MiB" else f"{seconds * 1e6:.1f} us"


def report_row(name: str, unit: str, row: dict[str, float], execs: dict[str, float]) -> dict[str, float]:
    ratios = {"rootfs/host": row["rootfs"] / row["host"], "agent/host": row["agent"] / row["host"]}
    cells = "".join(f"{_shown(seconds, unit):>14}" for seconds in row.values())
    line = f"{name:24}{cells}{ratios['rootfs/host']:>10.2f}x"
    if name in execs:
        ratios["exec/agent"] = execs[name] / row["agent"]
        line += f"{execs[name] * 1e3:>12.1f} ms{ratios['exec/agent']:>9.0f}x"
    print(line, flush=True)
    return ratios


def run(options: argparse.Namespace, bench: Bench) -> dict[str, object]:
    execs = {} if options.cpu else measure_exec(bench)  # what runs in there is nobody's CPU time here
    print(
        f"{'':24}" + "".join(f"{name:>14}" for name in bench.mounts) + f"{'rootfs/host':>11}{'exec':>15}{'agent':>10}"
    )
    rows: dict[str, object] = {}
    for workload in _micro.WORKLOADS:
        if re.search(options.rows, workload.name):
            row = measure_row(workload, bench, options.rounds)
            ratios = report_row(workload.name, workload.unit, row, execs)
            rows[workload.name] = {"seconds": row, "ratios": ratios}
    tree = measure_tree(bench)
    for name, found in tree.items():
        print(
            f"{TREE_FILES} files, {name:8}" + "".join(f"{title:>14}: {s * 1e3:6.0f} ms" for title, s in found.items())
        )
    return {"rows": rows, "exec_seconds": execs, "tree_seconds": tree}


def misses(found: dict[str, object]) -> list[str]:
    """The rows that are slower than they are to be."""
    rows = found["rows"]
    assert isinstance(rows, dict)
    slow = [f"{name}: rootfs {row['ratios']['rootfs/host']:.2f}x the host backend" for name, row in rows.items()
            if row["ratios"]["rootfs/host"] > ROOTFS_MOST]  # fmt: skip
    return slow + [
        f"{name}: agent only {row['ratios']['exec/agent']:.0f}x as fast as podman exec"
        for name, row in rows.items()
        if row["ratios"].get("exec/agent", AGENT_LEAST) < AGENT_LEAST
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows that match this expression")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_const", const=2, dest="rounds", help="two rounds")
    parser.add_argument(
        "--cpu", action="store_true",
        help="CPU time of client and daemon (not of what runs in the container): for a machine that has other work",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("the benchmark runs a Podman of root's and drops caches: run it as root")
    end_cleanly()
    scratch = Path(tempfile.mkdtemp(prefix="vfsd-bench-"))
    os.environ["VFSD_RUNTIME_DIR"] = str(scratch)
    load = os.getloadavg()[0]
    print(f"load at the start: {load:.1f} on {os.cpu_count()} CPUs; {options.rounds} rounds")
    try:
        with benched(scratch, cpu=options.cpu) as bench:
            found = run(options, bench)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for miss in misses(found):
        print(f"missed: {miss}")
    if options.json:
        machine: dict[str, object] = {
            "kernel": platform.release(), "python": platform.python_version(), "cpus": os.cpu_count(),
            "load_before": load, "load_after": os.getloadavg()[0], "cpu_time": options.cpu, "rounds": options.rounds,
        }  # fmt: skip
        Path(options.json).write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
