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


def _git(*command: str) -> str | None:
    """What git says of the package's folder; None if it fails."""
    try:
        git = ["git", "-C", str(Path(__file__).parent), *command]
        done = subprocess.run(git, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str | None:
    """The commit of this checkout, "+" appended if files differ from it; None outside one, and where the package only
    lies inside another one."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None or _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return head + ("+" if _git("status", "--porcelain", "-uno") else "")
