"""Training runs as the log records them: list, show, compare, and delete what is stored of them.

In: manifests, plans, step results, policy updates and promotions; the folders of the state directory and of
TENTALIS_STORE. Out: rows, details, differences, and a plan of deletion. Begin with `core.py`; `deletion.py` decides
what can be deleted, `process.py` reads the log and the folders.
"""
