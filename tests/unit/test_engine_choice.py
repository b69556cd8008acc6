"""Which engine serves a mount, and what is told of it."""

from __future__ import annotations

import errno

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.volume import Volume
from vfsd.engines import choice
from vfsd.engines.base import EngineSettings
from vfsd.engines.native import NativeEngine
from vfsd.engines.pyfuse3 import Pyfuse3Engine

SETTINGS = EngineSettings("/nowhere", "choice")


class _OldKernel(NativeEngine):
    code = errno.EPROTONOSUPPORT

    def mount(self) -> None:
        raise OSError(self.code, "the kernel's FUSE 7.19 lacks NO_OPEN_SUPPORT")


class _Forbidden(_OldKernel):
    code = errno.EPERM


class _Reference(Pyfuse3Engine):
    def mount(self) -> None:
        """Always well."""


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Volume:
    monkeypatch.setattr(choice, "NativeEngine", _OldKernel)
    monkeypatch.setattr("vfsd.engines.pyfuse3.Pyfuse3Engine", _Reference)
    return MemoryVolume()


def test_auto_falls_back_where_the_kernel_lacks_something_and_the_engine_says_what(volume: Volume) -> None:
    engine = choice.mount_engine("auto", volume, SETTINGS, None)
    assert engine.name == "pyfuse3"
    assert engine.fallback_reason == "not native: the kernel's FUSE 7.19 lacks NO_OPEN_SUPPORT"


def test_an_engine_that_was_asked_for_is_no_fallback(volume: Volume) -> None:
    assert choice.mount_engine("pyfuse3", volume, SETTINGS, None).fallback_reason is None
    with pytest.raises(OSError, match="NO_OPEN_SUPPORT"):
        choice.mount_engine("native", volume, SETTINGS, None)


def test_a_mount_that_no_engine_could_make_is_not_tried_twice(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "NativeEngine", _Forbidden)
    with pytest.raises(PermissionError) as refused:
        choice.mount_engine("auto", volume, SETTINGS, None)
    assert refused.value.errno == errno.EPERM
