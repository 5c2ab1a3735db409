"""Shared by the commands: settings and the broker, errors, output, options, and conversions of records.

In: options and TENTALIS_* variables. Out: settings of a command, JSON and tables on stdout, messages with exit codes.
Begin with `settings.py` (the broker of a command) and `errors.py` (exit codes).
"""
