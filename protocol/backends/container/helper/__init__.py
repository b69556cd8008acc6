"""The helper: the program that vfsd runs inside a container and talks to over one stream.

It runs on any Python from 3.6 on with only the standard library, and nothing is installed in the image: vfsd sends
the sources of these modules and of `protocol.linux.portable` when it starts the helper
(`protocol.backends.container.agent.helper_transport`).  So these modules may import nothing else of vfsd and use no
newer syntax.
"""
