"""Backends: opens the volume that a backend string names.

`registry` finds the opener of a kind; each built-in one is a module, which is imported when it is used.
"""

from vfsd.daemon.backends.registry import Backend, BackendOpener, open_backend

__all__ = ["Backend", "BackendOpener", "open_backend"]
