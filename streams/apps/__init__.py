"""The stream applications, one folder each: `core` is pure, `processor` is the shell around it.

In and out: the topics of docs/architecture.md. Begin with `join`.
"""
