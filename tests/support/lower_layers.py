"""Makes archives and stored snapshots of a directory, and opens them as the lower layer of an overlay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from protocol.archive import MountedArchive, write_archive
from protocol.backends.overlay import OverlayVolume
from protocol.backends.overlay.tree_lower import TreeLower
from protocol.store import DirectorySource, Store
from protocol.store.object_store import RemoteStore
from protocol.store.object_store.packs import key_of

Layer = Literal["archive", "snapshot"]
LAYERS: Final[tuple[Layer, ...]] = ("archive", "snapshot")
NAME: Final = "below"


def make(layer: Layer, directory: Path, place: Path) -> None:
    """Make a layer with the content of `directory` at `place`: an archive, or a store with a snapshot NAME."""
    if layer == "snapshot":
        with Store(place) as store:
            store.take("host:below", NAME, DirectorySource(str(directory)))
        return
    volume = OverlayVolume(str(directory))
    try:
        with volume.tree() as tree, place.open("wb") as file:
            write_archive(tree, file)
    finally:
        volume.lower.close()


def opened(layer: Layer, place: Path, cache_bytes: int = 4 << 20) -> TreeLower:
    """Open the layer at `place`.  The caller closes it."""
    if layer == "archive":
        archive = MountedArchive(str(place), cache_bytes=cache_bytes)
        return TreeLower(archive, str(place), memory_bytes=archive.memory_bytes, close=archive.close)
    snapshot = Store(place).mounted("host:below", NAME)
    return TreeLower(snapshot, NAME, memory_bytes=snapshot.memory_bytes, close=snapshot.close)


def damage_inodes(remote: RemoteStore, name: str) -> None:
    """Damage the inode listing of the root of a snapshot in a store at file:///."""
    inodes = remote.get(name).record.inodes
    assert inodes is not None
    place = remote.packs.view().find(inodes.content)
    assert place is not None
    path = Path(remote.directory.removeprefix("file://"), key_of(place.pack))
    data = bytearray(path.read_bytes())
    data[place.offset + place.length // 2] ^= 1
    path.write_bytes(data)


@contextmanager
def over(layer: Layer, directory: Path, place: Path) -> Iterator[OverlayVolume]:
    """An overlay over a new layer with the content of `directory`; its invariants are checked at the end."""
    make(layer, directory, place)
    lower = opened(layer, place)
    volume = OverlayVolume(lower)
    try:
        yield volume
        volume.check_invariants()
    finally:
        lower.close()
