"""Unmodified programs of ten client libraries, each run in the environment of `make test-clients` against a gateway."""
