"""Which engine serves a mount, and what is told of it."""

from __future__ import annotations

import errno
import sys

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.volume import Volume
from vfsd.kernel.engines import choice
from vfsd.kernel.engines.base import EngineSettings
from vfsd.kernel.engines.native import NativeEngine
from vfsd.kernel.engines.pyfuse3 import Pyfuse3Engine

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
    monkeypatch.setattr("vfsd.kernel.engines.pyfuse3.Pyfuse3Engine", _Reference)
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


@pytest.fixture
def without_pyfuse3(monkeypatch: pytest.MonkeyPatch) -> None:
    # None makes `import` raise ImportError, as a missing package and a broken library do.
    monkeypatch.setitem(sys.modules, "pyfuse3", None)
    monkeypatch.delitem(sys.modules, "vfsd.kernel.engines.pyfuse3", raising=False)


@pytest.mark.usefixtures("without_pyfuse3")
def test_without_pyfuse3_auto_uses_the_native_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeEngine, "mount", lambda self: None)
    engine = choice.mount_engine("auto", MemoryVolume(), SETTINGS, None)
    assert (engine.name, engine.fallback_reason) == ("native", None)


@pytest.mark.usefixtures("without_pyfuse3")
def test_pyfuse3_that_is_asked_for_and_missing_says_what_to_install() -> None:
    with pytest.raises(OSError, match=r"cannot be loaded .*pip install .*pyfuse3.*--engine native") as refused:
        choice.mount_engine("pyfuse3", MemoryVolume(), SETTINGS, None)
    assert refused.value.errno == errno.EOPNOTSUPP


@pytest.mark.usefixtures("without_pyfuse3")
def test_where_neither_engine_serves_both_reasons_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "NativeEngine", _OldKernel)
    with pytest.raises(OSError, match=r"pyfuse3 engine cannot be loaded .*; not native: the kernel's FUSE 7.19"):
        choice.mount_engine("auto", MemoryVolume(), SETTINGS, None)
