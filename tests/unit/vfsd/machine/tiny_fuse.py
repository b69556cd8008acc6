"""A FUSE file system of one empty directory, for tests that need a daemon to kill: tiny_fuse.py MOUNTPOINT NAME."""

import sys

import pyfuse3
import trio


class OneDirectory(pyfuse3.Operations):
    async def getattr(self, inode, ctx=None):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = 0o040755
        entry.st_nlink = 2
        entry.attr_timeout = entry.entry_timeout = 0
        return entry

    async def lookup(self, parent_inode, name, ctx=None):
        raise pyfuse3.FUSEError(2)

    async def statfs(self, ctx):
        return pyfuse3.StatvfsData()

    async def opendir(self, inode, ctx):
        return inode

    async def readdir(self, fh, start_id, token):
        return


if __name__ == "__main__":
    mountpoint, name = sys.argv[1:]
    options = set(pyfuse3.default_options) | {f"fsname=vfsd:{name}", "subtype=vfsd"}
    pyfuse3.init(OneDirectory(), mountpoint, options)
    print("mounted", flush=True)
    trio.run(pyfuse3.main)
    pyfuse3.close(unmount=False)
