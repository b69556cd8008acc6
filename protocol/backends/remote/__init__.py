"""The remote backend (`exec:COMMAND`): a directory at the other end of a command that gives a Python, as a volume.

The command is `ssh HOST python3`, `kubectl exec -i POD -- python3`, or `python3` itself.  vfsd sends it the helper that
the container backend has, and reads and writes files through that.
"""
