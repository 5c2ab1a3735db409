"""The stream applications: they turn tasks, results and feedback into rollouts.

In: records on topics. Out: records on topics, each confirmed before its input is committed. Begin with
`apps/join/core.py`. `runtime/` runs an application; `fold/` holds the parts that several applications share.
"""
