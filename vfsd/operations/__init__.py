"""The operations on a workspace, each declared once: parameters, result, documentation, and properties."""
