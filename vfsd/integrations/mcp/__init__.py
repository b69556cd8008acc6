"""`vfsd mcp`: a running workspace as a server of the Model Context Protocol.  Needs the extra `mcp`.

`server` binds the official SDK to `tools`, which does not import it, and serves standard input and output; `http` is
the other transport, and `access` says who may use it.  https://modelcontextprotocol.io has the specification.
"""
