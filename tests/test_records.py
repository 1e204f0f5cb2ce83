"""The files that commands write: refused before any work if they cannot be, and named after the right commit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import adatom
from adatom import records
from adatom.bench.rivals import every, select
from adatom.cli import app

PACKAGE = Path(adatom.__file__).parent


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"})
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "command",
    (("demo", "--out"), ("bench", "norm", "--plot"), ("bench", "norm", "--record"), ("verify", "norm", "--record")),
)
def test_files_that_cannot_be_written_are_refused_before_any_work(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command runs into a wall where its work begins."""
    for work in ("adatom.doctor.examine", "adatom.bench.run.start", "adatom.verify.judge_all"):
        monkeypatch.setattr(work, lambda *_: pytest.fail("work began"))
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file/x.svg cannot be written: Not a directory" in refused(*command, f"{tmp_path}/file/x.svg")
    assert f"{tmp_path} cannot be written: is a directory" in refused(*command, str(tmp_path))


def test_files_may_lie_in_folders_that_are_not_there_yet_and_behind_links(tmp_path: Path) -> None:
    assert records.to_write(None) is None
    new, link = tmp_path / "a" / "b" / "x.json", tmp_path / "link.json"
    link.symlink_to(tmp_path / "c" / "y.json")
    for file in (new, link):
        assert records.to_write(file) == file
        file.write_text("{}")
    assert (tmp_path / "c" / "y.json").read_text() == "{}"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "c", "link.json", "x.json", "y.json"]


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
@pytest.mark.parametrize("tracked", (True, False), ids=("checkout", "installed inside one"))
def test_a_commit_is_that_of_the_package(tracked: bool, tmp_path: Path) -> None:
    """Of a copy of the module in a repository that has it, or that it was only installed in."""
    git = ["git", "-C", str(tmp_path), "-c", "user.email=a@b", "-c", "user.name=x"]
    package, own = tmp_path / "site" / "adatom", tmp_path / "own"
    package.mkdir(parents=True)
    shutil.copy(PACKAGE / "records.py", package)
    own.write_text("own")
    for command in (["init", "-q"], ["add", "own", *(["site"] if tracked else [])], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout[:12]

    def said() -> str:
        code = [sys.executable, "-c", "import records; print(records.commit())"]
        return subprocess.run(code, capture_output=True, text=True, check=True, cwd=package).stdout.strip()

    assert said() == (head if tracked else "None")
    own.write_text("changed")
    assert said() == (f"{head}+" if tracked else "None")


def test_tables_of_a_file_take_no_other_option() -> None:
    file = str(PACKAGE.parent / "results" / "nvidia_h100.json")
    for more in (("norm",), ("--case", "rms"), ("--plot", "x.svg")):
        assert "--tables prints all of a file" in refused("bench", *more, "--tables", file)
    assert not Path("x.svg").exists()


def test_all_rivals_may_be_named_beside_others() -> None:
    known = [rival.name for rival in every()]
    assert list(select("all")) == known and select("none") == () == select("")
    assert list(select("all,adatom:triton")) == [*known, "adatom:triton"]
    assert list(select(f"{known[0]},all,{known[0]}")) == known
    with pytest.raises(ValueError, match="no rival nonsense; there are"):
        select("all,nonsense")


HANGING = """
import signal
import time
from adatom import compile
from types import SimpleNamespace
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it, and their children
compile.build = lambda spec: (print("ready", flush=True), time.sleep(600))
compile.build_all([SimpleNamespace()] * 8, 2, lambda report: None)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_an_interrupted_compilation_ends_at_once_and_leaves_no_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HANGING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(12).count(b"ready") == 2  # both workers are there
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
            assert process.wait(30) == -signal.SIGINT
            with pytest.raises(ProcessLookupError):
                for _ in range(100):
                    os.killpg(process.pid, 0)
                    time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
