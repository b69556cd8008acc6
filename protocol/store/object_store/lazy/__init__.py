"""Reads of a snapshot in an object store while it is mounted: blobs are fetched when they are needed.

`contents` is the daemon's side, with the disk cache that all workspaces of the user share, and `helper` the process
that fetches.  The helper exists because `obstore` has threads, and a daemon forks.
"""
