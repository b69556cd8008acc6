"""The policy of a workspace: which paths no program may change (--protect), and which none may see (--hide).

    rules       the patterns, what they match, and the files that have a matching name among several
    volume      the volume that the engine serves: asks the rules before each call
    service     tightening at run time: the kernel's caches, the journal, forks; states without what is hidden, and the
                check of what a restore or import would change

Without a policy none of these modules is imported, and the engine serves the volume itself.
"""
