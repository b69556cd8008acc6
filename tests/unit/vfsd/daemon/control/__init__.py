"""The control socket over real sockets: server, clients, and what hostile peers can do to them."""
