"""vfsd-fs.pyz: the commands of `vfsd fs --root` as one file, for machines and containers without vfsd.

    package      builds the file from this package and the modules of `protocol` that it shares
    program      the program: its commands
    backports, expression, values     take the place of what those modules import and older or bare Pythons lack
    remote       RemoteFilesystem, which copies the file over any executor and drives it

Nothing is imported here.
"""
