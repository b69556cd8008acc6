"""What somebody may put in the place of a file that vfsd reads: a FIFO, a device, a symlink, and so on."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

__all__ = ["NOT_REGULAR", "plant"]

NOT_REGULAR: Final = ("fifo", "socket", "directory", "symlink", "symlink to a fifo", "device")


def plant(place: Path, kind: str) -> None:
    """Put something of `kind` at `place`, one of NOT_REGULAR or "huge", an endless file of zeros."""
    match kind:
        case "fifo":
            os.mkfifo(place)
        case "socket":
            # Bound by a short name: the address of a socket has 108 bytes.
            with socket.socket(socket.AF_UNIX) as listener:
                descriptor = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
                listener.bind(f"/proc/self/fd/{descriptor}/{place.name}")
                os.close(descriptor)
        case "directory":
            place.mkdir()
        case "symlink":
            place.symlink_to("/etc/hostname")
        case "symlink to a fifo":
            os.mkfifo(place.with_name("fifo"))
            place.symlink_to("fifo")
        case "device":
            place.symlink_to("/dev/zero")
        case "huge":
            place.touch()
            os.truncate(place, 1 << 40)
