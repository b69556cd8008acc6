"""OverlayInode: one version of an inode that came from the lower layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.backends.memory.inode import Inode
from protocol.backends.overlay.content import LowerContent

if TYPE_CHECKING:
    from protocol.backends.overlay.lower import FileRecord, Identity, LowerFile, LowerStat


class OverlayInode(Inode):
    """`lower` is the file of the lower layer.

    A file's `nlink` is that of the lower file: larger than `links` while names are not loaded yet or lie outside DIR.
    """

    __slots__ = ("lower",)

    lower: LowerFile

    def set_size_and_times(self, seen: LowerStat) -> None:
        """Set size and times to those of the lower file."""
        self.size = seen.st_size
        self.atime_ns, self.mtime_ns, self.ctime_ns = seen.st_atime_ns, seen.st_mtime_ns, seen.st_ctime_ns
        self.birth_ns = min(self.mtime_ns, self.ctime_ns)

    def follows(self, was: Identity) -> bool:
        """Whether this version has no changes over the lower file, whose identity is `was`.

        A change sets the ctime.  Another mtime alone comes from a discard or a restore that touched the file.
        """
        content = self.content
        return (
            self.lower.identity == was
            and (self.size, self.ctime_ns) == (was[2], was[4])
            and (content is None or (isinstance(content, LowerContent) and content.is_pristine))
        )

    @property
    def followed(self) -> FileRecord:
        return self.lower.record

    def clone(self, epoch: int) -> OverlayInode:
        twin = super().clone(epoch)
        assert isinstance(twin, OverlayInode)
        twin.lower = self.lower
        return twin


def lower_files(version: Inode) -> set[LowerFile]:
    """The files of the lower layer that an inode came from, and that its content is read from."""
    found = {version.lower} if isinstance(version, OverlayInode) else set()
    return found | {version.content.lower} if isinstance(version.content, LowerContent) else found
