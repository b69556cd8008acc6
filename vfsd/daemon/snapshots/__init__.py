"""Snapshots of a mounted workspace, held by its volume or by a store."""
