"""Everything that a caller imports: Workspace, AsyncWorkspace, results, and the client of the control socket."""
