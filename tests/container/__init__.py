"""The container backend, against a real Podman."""
