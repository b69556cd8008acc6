"""Snapshots of a memory volume: the undo log, views of recorded states, and restores."""
