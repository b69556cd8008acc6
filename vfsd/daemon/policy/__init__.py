"""The policy of a workspace: which paths no program may change (--protect), and which none may see (--hide).

    rules       the patterns, what they match, and the files that have a matching name among several
    walk        a walk over the names of a volume
    volume      the volume that the engine serves: asks the rules before each call
    trees       states without what is hidden, and the check of what a restore or import would change
    service     tightening at run time: the kernel's caches, the journal, forks

Without a policy none of these modules is imported, and the engine serves the volume itself.
"""
