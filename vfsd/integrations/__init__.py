"""Adapters for agent frameworks and protocols.  Each module needs the extra of its name (docs/start.md)."""
