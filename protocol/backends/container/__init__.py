"""The container backend: a directory in a Podman container as a volume."""
