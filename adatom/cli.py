"""The command line: `adatom doctor | verify | bench | compile | demo`. Each command lives in the module of its name."""

from __future__ import annotations

from typing import Annotated

import typer

from adatom import __version__, bench, demo, doctor, verify
from adatom import compile as compiling

app = typer.Typer(
    name="adatom",
    help="GPU kernels for PyTorch that can prove they are right, and that can be differentiated twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"adatom {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """GPU kernels for PyTorch that can prove they are right, and that can be differentiated twice."""


for _name, _module in (
    ("doctor", doctor),
    ("verify", verify),
    ("bench", bench),
    ("compile", compiling),
    ("demo", demo),
):
    app.command(_name)(_module.command)
