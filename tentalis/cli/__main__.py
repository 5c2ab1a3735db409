"""`python -m tentalis.cli`: the same as `tentalis`."""

from tentalis.cli.main import app

app()
