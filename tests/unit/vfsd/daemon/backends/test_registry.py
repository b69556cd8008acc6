"""The backend registry: the opener of each kind, built in or from an entry point."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from protocol.backends.memory import MemoryVolume
from tests.support.toy_backend import install_backend
from vfsd.client.arguments import mount_options
from vfsd.daemon.backends.registry import open_backend
from vfsd.wire.options import BackendSpec, MountOptions

TOY = """
from protocol.backends.memory import MemoryVolume
from vfsd.daemon.backends.registry import Backend

def open_toy(options, progress):
    if options.limits.max_bytes is not None:
        raise ValueError("toy has no limits")
    volume = MemoryVolume()
    volume.setxattr(1, b"user.toy", options.workspace.backend.argument.encode(), 0)
    return Backend(volume, cache_timeout_s=5.0)
"""


def test_a_built_in_kind_is_opened() -> None:
    backend = open_backend(MountOptions.of("/m", "m", max_bytes=1 << 20))
    assert isinstance(backend.volume, MemoryVolume)
    assert backend.volume.capabilities.snapshots


def test_the_opener_of_an_entry_point_gets_the_options_and_its_backend_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_backend(tmp_path, monkeypatch, "toy", "toy_of_options:open_toy", source=TOY)

    backend = open_backend(mount_options(tmp_path / "mnt", "toy:there"))
    assert backend.cache_timeout_s == 5.0
    assert isinstance(backend.volume, MemoryVolume)
    assert backend.volume.getxattr(1, b"user.toy") == b"there"
    with pytest.raises(ValueError, match="toy has no limits"):
        open_backend(mount_options(tmp_path / "mnt", "toy:there", max_bytes=1))


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OSError, match=r"there is no backend 'tape': use one of memory, .*exec:COMMAND$") as caught:
        open_backend(MountOptions.of("/m", "m", backend=BackendSpec("tape", "x")))
    assert caught.value.errno == errno.EOPNOTSUPP


@pytest.mark.parametrize(
    ("target", "reason"), [("no_such_toy:open_toy", "No module named"), ("errno:open_toy", "has no attribute")]
)
def test_an_entry_point_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, reason: str
) -> None:
    install_backend(tmp_path, monkeypatch, "toy", target)

    with pytest.raises(OSError, match=f"the backend 'toy' \\({target}\\) cannot be imported: .*{reason}"):
        open_backend(mount_options(tmp_path / "mnt", "toy:x"))
