"""The native engine: the kernel's FUSE protocol in Python, without libfuse.

`wire` defines the structs, `mounting` makes the mount and answers INIT, `session` is the loop, `requests` has the steps
of one request, `operations` maps opcodes to calls on a volume, `replies` packs the answers, `wakeups` decides when to
sleep.
"""

from vfsd.kernel.engines.native.session import NativeEngine

__all__ = ["NativeEngine"]
