"""The relay: a program that hands its standard streams over to a helper that runs already (see `sessions`).

It says that the helper runs (or has ended), and waits for GO.  Then it waits until the helper closes the connection:
what started it, such as an exec session of Podman or an ssh, lives as long as it does.
"""

import array
import os
import socket
import sys

from protocol.backends.container.helper.sessions import address
from protocol.backends.container.helper.wire import GO, JOIN, NO_HELPER, RELAY_MAGIC


def main(arguments: "list[str]") -> None:
    """Connect to the helper `arguments[0]`, with the secret [1] and the seconds [2] that it holds; names in hex."""
    name, secret, seconds = bytes.fromhex(arguments[0]), bytes.fromhex(arguments[1]), int(arguments[2])
    try:
        _connected(name).close()
    except OSError:
        os.write(1, NO_HELPER)
        sys.stderr.write("the helper that has the files open has ended\n")
        sys.exit(3)
    os.write(1, RELAY_MAGIC)
    if os.read(0, len(GO)) == GO:
        connection = _connected(name)
        streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]).tobytes())]
        connection.sendmsg([JOIN.pack(secret, seconds)], streams)
        connection.recv(1)
    os._exit(0)  # an interactive Python would go on to read the stream


def _connected(name: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address(name))
    return connection
