"""adapters: one view made of another.

    volume, host         a Filesystem over any Volume, over a directory of the host
    filesystem_volume    a Volume over any Filesystem, so that third parties' can be mounted
    hydrate              files of the host as what a volume begins with
    foreign              archives for a Filesystem that has none

A Filesystem is written once, in `store_filesystem`, over the few operations of a `store`.  Nothing is
imported here: whoever needs one adapter does not load the others.
"""
