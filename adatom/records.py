"""What the files that commands write have in common: where they may lie, and the commit that they name."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import typer


def to_write(file: Path | None) -> Path | None:
    """The file of an option, for typer to call before any work is done. BadParameter if it cannot be written."""
    if file is not None:
        folder = file.resolve().parent  # where a link points, not the link
        try:
            if file.is_dir():
                raise IsADirectoryError(None, "is a directory")
            if file.exists() and not os.access(file, os.W_OK):
                raise PermissionError(None, "is read-only")
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
            raise typer.BadParameter(f"{file} cannot be written: {why}") from None
    return file


def said(*command: str) -> str | None:
    """The first line that a command prints in the package's folder; None if there is none, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def commit() -> str | None:
    """The commit of this checkout, "+" appended if files differ from it; None outside one, and where the package only
    lies inside another one."""
    head = said("git", "rev-parse", "--short=12", "HEAD")
    if head is None or said("git", "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return head + ("+" if said("git", "status", "--porcelain", "-uno") else "")
