"""adapters: one contract implemented over another.

    volume, host           a Filesystem over any Volume, over a directory of the host
    filesystem_volume      a Volume over any Filesystem, so that third-party filesystems can be mounted
    path_filesystem        the Filesystem itself, written once over the few operations of `PathFiles`
    snapshot_directory     a Volume that also shows its snapshots, over any Volume
    trees, git_patterns    trees of other objects, and trees that show a part of another tree

Nothing is imported here, so that using one adapter does not load the others.
"""
