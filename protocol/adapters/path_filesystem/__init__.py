"""A Filesystem over files that are reached by path: a host directory, a tree, or a volume."""
