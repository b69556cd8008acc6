"""The native engine: the kernel's FUSE protocol in Python, without libfuse.

`wire` defines the structs, `negotiation` answers INIT, `mounting` calls fusermount3, `operations` maps opcodes to calls
on a volume, `replies` packs the answers, `polling` decides when to sleep, `session` is the loop.
"""

from vfsd.kernel.engines.native.session import NativeEngine

__all__ = ["NativeEngine"]
