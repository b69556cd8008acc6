"""CPU time of short commands: `python -m bench.commands`, next to `python -c pass` and `git status`.

The commands run in turn; user and system time of each process come from wait4(2).  Prints the medians in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from vfsd import Workspace
from vfsd.cli import hook_client
from vfsd.machine.runtime import socket_path

RAW_CALL = """import json, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(b'{"jsonrpc":"2.0","method":"status","params":{},"id":1}\\n')
json.loads(sock.recv(65536))
"""


def cpu_ms(command: Sequence[str], directory: str) -> float:
    child = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, command
    return (usage.ru_utime + usage.ru_stime) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    python = sys.executable
    fast, full = (python, "-m", "vfsd.cli.fast_path"), (python, "-m", "vfsd.cli.main")
    script = os.path.join(os.path.dirname(python), "vfsd")
    fast = (script,) if os.path.exists(script) else fast
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as place, Workspace.mount(place) as workspace:
        subprocess.run(["git", "init", "-q", place], check=True)
        workspace.snapshot("base")
        commands = {
            "python -c pass": (python, "-c", "pass"),
            "raw socket call, python -I -S": (python, "-I", "-S", "-c", RAW_CALL, socket_path(workspace.name)),
            "git status": ("git", "status"),
            "hook client": (python, "-I", "-S", hook_client.__file__, "snapshot"),
            "vfsd snapshot": (*fast, "snapshot"),
            "vfsd status": (*fast, "status"),
            "vfsd restore": (*fast, "restore", "base"),
            "vfsd diff": (*fast, "diff", "base"),
            "full command: status": (*full, "status"),
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds + 1):
            for name, command in commands.items():
                times[name].append(cpu_ms(command, place))
        for name, values in times.items():
            print(f"{name:32} {statistics.median(values[1:]):6.1f} ms")


if __name__ == "__main__":
    main()
