"""The helper: what runs inside a container and does there what vfsd asks for, over one stream.

A program of its own, for any Python from 3.6 on, of which it takes the standard library only; nothing is installed
in the image.  vfsd sends these modules' sources when it starts it (`protocol.backends.container.agent.start`), and
shares `wire` with it.  So nothing here may import anything else of vfsd, nor use newer syntax.
"""
