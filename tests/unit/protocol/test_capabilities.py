"""A volume that declares a capability has the methods of its protocol.  The signatures are checked by mypy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.backends.container.reconnecting_volume import ReconnectingVolume
from protocol.backends.host import HostVolume
from protocol.backends.memory import MemoryVolume
from protocol.backends.overlay import OverlayVolume
from protocol.volume import Volume
from protocol.volume_extensions import (
    CheckableVolume,
    ExternallyChangedVolume,
    OverlaidVolume,
    PreparingVolume,
    SnapshotableVolume,
    StagingVolume,
    checkable,
    externally_changed,
    overlaid,
    preparing,
    snapshotable,
    staging,
)


def test_a_memory_volume_declares_all_about_snapshots_and_imports() -> None:
    volume = MemoryVolume()
    of_snapshots: SnapshotableVolume = volume
    of_imports: PreparingVolume = volume
    assert snapshotable(volume) is of_snapshots
    assert preparing(volume) is staging(volume) is of_imports
    assert overlaid(volume) is None
    assert externally_changed(volume) is None


def test_an_overlay_declares_its_lower_layer_and_no_import_in_slices(tmp_path: Path) -> None:
    volume = OverlayVolume(tmp_path)
    try:
        over_a_directory: OverlaidVolume = volume
        of_imports: StagingVolume = volume
        assert overlaid(volume) is over_a_directory
        assert staging(volume) is of_imports
        assert preparing(volume) is None
    finally:
        volume.lower.close()


@pytest.mark.parametrize("make", [HostVolume, lambda _: ReconnectingVolume(supports_acl=False)])
def test_a_volume_over_files_declares_external_changes_and_no_snapshots(
    make: Callable[[Path], Volume], tmp_path: Path
) -> None:
    volume = make(tmp_path)
    changed: ExternallyChangedVolume | None = externally_changed(volume)
    checked: CheckableVolume | None = checkable(volume)
    assert changed is checked is volume
    assert snapshotable(volume) is None
    if isinstance(volume, HostVolume):
        volume.close()
