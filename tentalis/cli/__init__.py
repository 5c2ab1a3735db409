"""The `tentalis` command: one module per command or group, named as the command.

In: arguments and TENTALIS_* variables. Out: tables or JSON on stdout, logs on stderr, an exit code
(`tentalis/service/exit_codes.py`). Begin reading in `main.py`, the list of all commands; `serve/` has the processes,
`shared/` what several commands need.
"""
