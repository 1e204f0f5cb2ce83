"""`python -m adatom`: the command line, where its script is not on the path."""

from adatom.cli import app

app(prog_name="adatom")
