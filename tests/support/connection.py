"""A stand-in for ssh: it runs a command, passes its standard streams, and the command outlives it.

    python connection.py COMMAND...

When this process is killed, the command's input and output end, as at the other end of a connection that was cut.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

_READ_BYTES = 65536


def pump(source: int, target: int) -> None:
    """Copy to the end of `source`, and close `target`."""
    try:
        while data := os.read(source, _READ_BYTES):
            while data:
                data = data[os.write(target, data) :]
    except OSError:
        pass
    os.close(target)


def main() -> None:
    command = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert command.stdin is not None
    assert command.stdout is not None
    assert command.stderr is not None
    threading.Thread(target=pump, args=(0, command.stdin.fileno()), daemon=True).start()
    errors = threading.Thread(target=pump, args=(command.stderr.fileno(), 2))
    errors.start()
    pump(command.stdout.fileno(), 1)
    errors.join()
    os._exit(command.wait())


if __name__ == "__main__":
    main()
