"""Search: files of a tree by name (`glob_paths`) and lines of its files by content (`grep_tree`).

Threading: runs in a worker thread, on a tree of its own.  `keep_going` is called at every directory, file and block; an
exception from it ends the search, so that is how to cancel one.
"""
