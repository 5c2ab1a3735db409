"""Python calls that do what commands do: `tentalis.learn(...)` in a script or a notebook.

In: a data set, functions, settings. Out: the runs of the command `tentalis learn`, as objects. Begin reading in
`learn.py`; `shipped_functions.py` gives functions of a script or a cell a file, `learned_run.py` is the result.
"""
