"""The control socket: JSON-RPC 2.0 over a Unix socket: the server and its methods."""
