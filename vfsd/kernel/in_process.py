"""A Filesystem object of this process, mounted: served by a thread of this process for as long as it lives.

Threading: the object's methods are called on the serving thread, one at a time.  Whoever uses the object
itself meanwhile does so from another thread: it must bear that.  The thread takes the interpreter's lock for
each request; a C extension that waits for the mount without letting go of that lock waits for ever.  So would
`subprocess`, where it starts a program that is on the mount, or in a directory of it: see `_spawn_without_the_lock`.

Nothing is cached by the kernel longer than a request, since the object may change without anybody telling.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import trio

from protocol.adapters.filesystem_volume import FilesystemVolume
from protocol.filesystem import Filesystem
from vfsd.kernel.engines.base import Engine, EngineSettings
from vfsd.kernel.engines.choice import mount_engine
from vfsd.machine import mounts

__all__ = ["MountedFilesystem"]

_logger = logging.getLogger(__name__)
_JOIN_S: Final = 10.0
_VFORK_LETS_GO: Final = (3, 11, 4)  # python/cpython#104372


class MountedFilesystem:
    """A mounted Filesystem object; a context manager that unmounts at the end of its block."""

    def __init__(self, filesystem: Filesystem, path: str, *, name: str, engine: str, allow_other: bool) -> None:
        """Mount `filesystem` at the empty directory `path`.  OSError as from `vfsd.machine.mounts.check_mountpoint`."""
        _spawn_without_the_lock()
        if mounts.check_mountpoint(path) is not None:
            mounts.clear_dead_mount(path)
        self.filesystem = filesystem
        self._path = path
        self._name = name
        self._volume = FilesystemVolume(filesystem)
        settings = EngineSettings(
            path, name, read_only=filesystem.read_only, allow_other=allow_other, cache_timeout_s=0.0
        )
        self._engine: Engine = mount_engine(engine, self._volume, settings, None)
        self._thread = threading.Thread(target=self._serve, name=f"vfsd {name}", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """The mountpoint."""
        return self._path

    @property
    def name(self) -> str:
        """What the mount's source shows, "vfsd:<name>"."""
        return self._name

    @property
    def mounted(self) -> bool:
        """Whether it is still served."""
        return self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.unmount(lazy=True)

    def unmount(self, *, lazy: bool = False) -> None:
        """Unmount; what was written is in the object when this returns.

        OSError(EBUSY) names who has files open; `lazy` detaches it all the same, and serves them until they are done.
        """
        if self._thread.is_alive() and mounts.mount_at(self._path) is not None:
            try:
                mounts.unmount(self._path, lazy=lazy)
            except OSError:
                if mounts.mount_at(self._path) is not None:
                    raise  # else it ended by itself, or by somebody else's hand, in this moment
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        try:
            trio.run(self._engine.serve)
        except Exception:
            _logger.exception("serving %s ended", os.fsencode(self._path))
        finally:
            self._engine.unmount()
            with suppress(OSError):  # libfuse leaves a mount whose connection was cut
                mounts.clear_dead_mount(self._path)
            for path, error in self._volume.write_back_all():
                _logger.error("what was written to %s is lost: %s", os.fsencode(path), error)


def _spawn_without_the_lock() -> None:
    """Have `subprocess` start programs in ways that let this process's other threads run meanwhile.

    posix_spawn keeps the interpreter's lock until the program runs, and so does vfork in older versions: Debian 12
    has 3.11.2.  Both switches are documented ("Disabling use of vfork() or posix_spawn()").
    """
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[misc]  # noqa: SLF001
    if sys.version_info < _VFORK_LETS_GO:
        subprocess._USE_VFORK = False  # type: ignore[misc]  # noqa: SLF001
