"""The pyfuse3 engine: serves a volume through `pyfuse3.Operations`.  It is the reference and the fallback.

`handlers` maps requests to calls on a volume, `engine` mounts and runs the loop.

Threading: the handlers run on the trio loop, `invalidate_inode` and `invalidate_entry` on any other thread
(`vfsd.kernel.engines.base` says why).  pyfuse3 keeps its session in globals, so a process serves one mount.

Differences from tmpfs and from the native engine, because pyfuse3 or libfuse lacks the feature:

- No O_TMPFILE (EOPNOTSUPP), no fallocate (EOPNOTSUPP; glibc's posix_fallocate writes zeros instead), no SEEK_DATA and
  SEEK_HOLE (a file is all data), no copy_file_range (the kernel copies), no birth time in statx.
- libfuse negotiates FUSE_HANDLE_KILLPRIV: the engine has to clear set-id bits, but a write request does not say who
  writes.  So the opener decides: a write through a descriptor that an unprivileged process opened clears the bits, a
  write through a descriptor that root opened does not.  tmpfs goes by the writer's CAP_FSETID.
- libfuse negotiates FUSE_AUTO_INVAL_DATA: the kernel drops a file's pages when the mtime changes, by its own writes
  too.  The first read after a write requests attributes and data again.
- A write is attributed to the process that opened the file (`_OpenFile.opener`), because the request does not say who
  writes.
- The kernel's readdir cache (FOPEN_CACHE_DIR) and opens without a request are not available.
- libfuse negotiates neither FUSE_DONT_MASK nor FUSE_SETXATTR_EXT: the umask applies even if a default ACL is inherited,
  and setting an access ACL does not clear S_ISGID if the caller is not in the file's group.
"""

from vfsd.kernel.engines.pyfuse3.engine import Pyfuse3Engine

__all__ = ["Pyfuse3Engine"]
