"""The container backend: the workspace directory of a Podman container as a volume.  Needs `vfsd[container]`.

Imports nothing, because programs without Podman's client use `protocol.backends.container.podman.address`.
"""
