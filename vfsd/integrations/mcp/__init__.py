"""`vfsd mcp`: a running workspace as a server of the Model Context Protocol.  Needs the extra `mcp`.

`server` binds the official SDK to `tools` and `resources`, which do not import it; `stdio` and `http` are the
transports.  https://modelcontextprotocol.io has the specification.
"""
