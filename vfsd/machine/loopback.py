"""Sockets that only programs of this machine can connect to."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Listen at the loopback address `host`; port 0 is any free port.  OSError, whose message names the address."""
    is_ipv6 = ":" in host
    sock = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        address = f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"
        raise OSError(error.errno, f"cannot listen at {address}: {error.strerror}") from None
    return sock
