"""The native engine: the kernel's wire protocol, spoken from Python without a library in between.

`wire` has the structs, `negotiation` the agreement at INIT, `mounting` the way through fusermount3,
`operations` the opcodes over a volume, `replies` the bytes of the answers, `session` the loop.
"""

from vfsd.kernel.engines.native.session import NativeEngine

__all__ = ["NativeEngine"]
