"""Adapters for agent frameworks and protocols.  Each module needs the extra of its name: `pip install 'vfsd[mcp]'`."""
