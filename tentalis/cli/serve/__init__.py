"""`tentalis serve`, `worker` and `manager`: one process of the stack per module.

In: options and TENTALIS_* variables. Out: a process that runs until SIGTERM, with logs on stderr and an exit code.
Begin with `app.py` (the list); `stream.py` runs the stream applications, `options.py` has the options that they share.
"""
