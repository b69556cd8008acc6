"""adapters: one contract implemented over another.

    volume, host           a Filesystem over any Volume, over a directory of the host
    filesystem_volume      a Volume over any Filesystem, so that third-party filesystems can be mounted
    filesystem_tree        a Tree over any Filesystem, and archives for one that has none
    path_filesystem        the Filesystem itself, written once over the few operations of `PathFiles`
    snapshot_directory     a Volume that also shows its snapshots, over any Volume
    filtered, path_filter  trees that show a part of another tree

Nothing is imported here, so that using one adapter does not load the others.
"""
