"""Print what a process can see of how it was started, and end as the first argument says.

`python -m tests.unit.repository.probe END [ARGUMENT ...]`: test_zygote compares a started and a forked one.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that lists
    return found


def _streams() -> dict[str, object]:
    return {
        name: [stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.fileno()]
        for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout), ("stderr", sys.stderr))
    }


def main() -> None:
    report = {
        "arguments": sys.argv,
        "command": sys.orig_argv,
        "name": [__name__, __spec__.name],
        "first of path": sys.path[0],
        "environment": {key: os.environ[key] for key in sorted(os.environ) if key != "GLIBC_TUNABLES"},
        "directory": os.getcwd(),
        "descriptors": _descriptors(),
        "parent": os.getppid(),
        "group": os.getpgid(0) if os.getpgid(0) != os.getpid() else "its own",
        "session": os.getsid(0) if os.getsid(0) != os.getpid() else "its own",
        "umask": os.umask(0),
        "users": [os.getresuid(), os.getresgid(), os.getgroups()],
        "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "ignored": sorted(each for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN),
        "handled": sorted(each for each in signal.valid_signals() if callable(signal.getsignal(each))),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "streams": _streams(),
        "threads": threading.active_count(),
        "zone": time.tzname,
        "host": socket.gethostname(),
    }
    print(json.dumps(report))
    sys.stdout.flush()
    atexit.register(print, "at exit")
    end = sys.argv[1] if len(sys.argv) > 1 else "0"
    if end == "interrupt":
        signal.raise_signal(signal.SIGINT)
    elif end == "thread":
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    elif end == "signal":  # from another thread, which finds this one by its number
        threading.Thread(target=signal.pthread_kill, args=(threading.main_thread().ident, signal.SIGTERM)).start()
        time.sleep(60)
    elif end == "sleep":
        time.sleep(60)
    elif end == "child":
        sys.exit(subprocess.run([sys.executable, "-m", __spec__.name, "5"], check=False, cwd="/").returncode)
    elif end == "raise":
        raise ValueError("raised")
    elif end == "say":
        sys.exit("said")
    else:
        sys.exit(int(end))


if __name__ == "__main__":
    main()
