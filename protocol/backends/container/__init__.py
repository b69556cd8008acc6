"""The container backend: the workspace directory of a Podman container as a volume.  Needs `vfsd[container]`.

Nothing is imported here: `protocol.backends.container.podman.address` is for programs without Podman's client too.
"""
