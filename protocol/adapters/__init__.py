"""adapters: one contract implemented over another.

    volume, host           a Filesystem over any Volume, over a directory of the host
    filesystem_volume      a Volume over any Filesystem, so that third-party filesystems can be mounted
    path_files             `PathFiles`: the few operations on files over which the Filesystem is written once
    plain_filesystem       that Filesystem; `path_filesystem` adds snapshots and archives
    host_files             `PathFiles` of a directory of the host
    snapshot_directory     a Volume that also shows its snapshots, over any Volume
    trees, git_patterns    trees of other objects, and trees that show a part of another tree

Nothing is imported here, so that using one adapter does not load the others.
"""
