"""Reads of a snapshot in an object store while it is mounted: blobs are fetched when they are needed.

`contents.RemoteContents` is the daemon's side, and `helper` the process that fetches; `blob_cache` is the disk cache
that all workspaces of the user share.  The helper exists because `obstore` has threads, and a daemon forks.
"""
