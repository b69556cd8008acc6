"""Transport through a helper process inside the container, which answers file requests over an exec session."""
