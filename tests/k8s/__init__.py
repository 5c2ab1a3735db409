"""Runs the chart on a real cluster: begin with `__main__.py`.

`parts.py` builds the programs of a small Kubernetes, `cluster.py` runs them or uses a cluster that is given, and
`scenario.py` is what happens to the release. `several_nodes.py` is a shorter scenario, with the object store of
`store.py`.
"""
