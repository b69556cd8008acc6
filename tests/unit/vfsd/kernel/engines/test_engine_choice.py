"""The choice of the engine that serves a mount, and the engines that installed packages add."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from protocol.backends.memory import MemoryVolume
from protocol.volume import Volume
from vfsd.kernel.engines import choice, native
from vfsd.kernel.engines.base import EngineSettings, Impersonator
from vfsd.kernel.engines.native import NativeEngine
from vfsd.kernel.engines.policy import is_omnipotent, needs_checks
from vfsd.kernel.engines.pyfuse3 import Pyfuse3Engine
from vfsd.wire.options import is_engine, known_engines

SETTINGS = EngineSettings("/nowhere", "choice")


class _OldKernel(NativeEngine):
    code = errno.EPROTONOSUPPORT

    def mount(self) -> None:
        raise OSError(self.code, "the kernel's FUSE 7.19 lacks NO_OPEN_SUPPORT")


class _Forbidden(_OldKernel):
    code = errno.EPERM


class _Reference(Pyfuse3Engine):
    def mount(self) -> None:
        """Succeed."""


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Volume:
    monkeypatch.setattr(native, "NativeEngine", _OldKernel)
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
    monkeypatch.setattr(native, "NativeEngine", _Forbidden)
    with pytest.raises(PermissionError) as refused:
        choice.mount_engine("auto", volume, SETTINGS, None)
    assert refused.value.errno == errno.EPERM


@pytest.fixture
def without_pyfuse3(monkeypatch: pytest.MonkeyPatch) -> None:
    # None makes `import` raise ImportError, as a missing package and a broken library do.
    monkeypatch.setitem(sys.modules, "pyfuse3", None)
    for module in [each for each in sys.modules if each.startswith("vfsd.kernel.engines.pyfuse3")]:
        monkeypatch.delitem(sys.modules, module)


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
    monkeypatch.setattr(native, "NativeEngine", _OldKernel)
    with pytest.raises(OSError, match=r"pyfuse3 engine cannot be loaded .*; not native: the kernel's FUSE 7.19"):
        choice.mount_engine("auto", MemoryVolume(), SETTINGS, None)


# -- engines of installed packages ---------------------------------------------------------------
class ToyEngine(_Reference):
    """An engine outside the packages; `mount` makes no mount."""

    name = "toy"  # type: ignore[misc]

    def __init__(self, volume: Volume, settings: EngineSettings, impersonator: Impersonator | None) -> None:
        super().__init__(volume, settings, impersonator)
        self.served = volume, settings, impersonator


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with entry points: a working engine, and one whose module is missing."""
    metadata = tmp_path / "toy_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vfsd.engines]\ntoy = {__name__}:ToyEngine\nbroken = no_such_module:Engine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("packages")
def test_an_engine_of_an_installed_package_is_called_with_the_volume_and_the_settings() -> None:
    volume = MemoryVolume()
    engine = choice.mount_engine("toy", volume, SETTINGS, None)
    assert isinstance(engine, ToyEngine)
    assert engine.name == "toy"
    assert engine.served == (volume, SETTINGS, None)


@pytest.mark.usefixtures("packages")
def test_engines_of_installed_packages_are_known_beside_the_built_in_ones() -> None:
    assert known_engines() == ["auto", "native", "pyfuse3", "broken", "toy"]
    assert is_engine("toy")
    assert not is_engine("tow")


@pytest.mark.usefixtures("packages")
def test_an_engine_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(OSError, match=r"'broken' \(no_such_module:Engine\) cannot be imported") as refused:
        choice.mount_engine("broken", MemoryVolume(), SETTINGS, None)
    assert refused.value.errno == errno.EOPNOTSUPP


@pytest.mark.usefixtures("packages")
def test_an_unknown_engine_is_refused_with_the_names_of_the_others() -> None:
    with pytest.raises(OSError, match="no engine 'natve': use one of auto, native, pyfuse3, broken, toy") as refused:
        choice.mount_engine("natve", MemoryVolume(), SETTINGS, None)
    assert refused.value.errno == errno.EINVAL


def test_a_built_in_engine_is_known_without_a_search_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", None)
    assert is_engine("native")


EVERYTHING = 0x1FFFFFFFFFF
INITIAL_NAMESPACE = "         0          0 4294967295\n"


def proc(place: Path, capabilities: int = EVERYTHING, uid_map: str = INITIAL_NAMESPACE) -> Path:
    (place / "status").write_text(f"Name:\tvfsd\nUid:\t0\t0\t0\t0\nCapEff:\t{capabilities:016x}\n")
    (place / "uid_map").write_text(uid_map)
    return place


def test_root_with_its_capabilities_is_omnipotent(tmp_path: Path) -> None:
    assert is_omnipotent(proc(tmp_path))


@pytest.mark.parametrize("missing", [0, 1, 3, 4], ids=["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"])
def test_root_without_one_of_its_capabilities_is_not(tmp_path: Path, missing: int) -> None:
    assert not is_omnipotent(proc(tmp_path, EVERYTHING & ~(1 << missing)))


@pytest.mark.parametrize("uid_map", ["0 1000 1\n", "0 100000 65536\n1000 1000 1\n", ""])
def test_root_of_a_user_namespace_is_not(tmp_path: Path, uid_map: str) -> None:
    assert not is_omnipotent(proc(tmp_path, uid_map=uid_map))


def test_where_nothing_says_what_root_may_it_is_not(tmp_path: Path) -> None:
    assert not is_omnipotent(tmp_path)
    (tmp_path / "uid_map").write_text(INITIAL_NAMESPACE)
    (tmp_path / "status").write_text("Name:\tvfsd\n")
    assert not is_omnipotent(tmp_path)


def test_mounts_that_others_may_enter_are_checked() -> None:
    assert needs_checks(EngineSettings("/nowhere", "x", allow_other=True))


def test_mounts_of_other_users_than_root_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert needs_checks(EngineSettings("/nowhere", "x"))
