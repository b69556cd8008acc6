"""Snapshots in an object store."""
