"""Records turns before their clients get the end of the answer.

In: records. Out: confirmed writes, or records in a spool on disk while the broker is unavailable. Begin with
`recorder.py`.
"""
