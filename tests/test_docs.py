"""Every python block of the README and of docs/ runs as it is written, on a CPU; links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.append(ROOT / "examples" / "potential" / "README.md")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks():
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match.group(1) == "python":
                line = text.count("\n", 0, match.start(2))
                yield pytest.param(page, line, match.group(2), id=f"{page.name}:{line + 1}")


@pytest.fixture(autouse=True)
def cpu(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    mpl.use("agg")
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("page", "line", "code"), list(blocks()))
def test_python_block(page, line, code):
    if "transformers" in code:
        pytest.importorskip("transformers")
    exec(compile("\n" * line + code, str(page), "exec"), {"__name__": "__main__"})


def test_there_are_blocks():
    assert len(list(blocks())) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    text = FENCE.sub("", page.read_text())
    headings = {
        re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (page.parent / target.split("#")[0]).exists(), target


def test_the_design_names_every_file():
    tree = (ROOT / "docs" / "design.md").read_text().split("```")[1]
    folders = ("", "ops/attention", "tiles", "potential", "compat", "integrations")
    files = {path.name for folder in folders for path in (ROOT / "adatom" / folder).glob("[!_]*.py")}
    assert files == set(re.findall(r"\b[a-z]\w*\.py\b", tree))


def commands():
    """The lines of shell blocks that call a tool of this repository: page, its words."""
    for page in PAGES:
        for match in FENCE.finditer(page.read_text()):
            for line in match.group(2).splitlines() if match.group(1) == "sh" else ():
                if words := re.findall(r"\S+", line.split("#")[0]):
                    yield page, words


def test_commands_in_the_pages_exist():
    """With the options that they are given."""
    from typer.testing import CliRunner

    from adatom.cli import app

    named = set()
    for page, (program, *words) in commands():
        if program == "adatom":
            named.add(words[0])
            done = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "400"})
            assert done.exit_code == 0
            assert [word for word in words if word.startswith("-") and word not in done.output] == [], page
        elif program == "python":
            assert (page.parent / words[0]).is_file(), page
        else:
            assert program == "make" and f"\n{words[0]}:" in (ROOT / "Makefile").read_text(), page
    assert named >= {"doctor", "demo", "verify", "bench", "compile"}


def test_the_readme_shows_the_recorded_results():
    shown = (ROOT / "README.md").read_text().split("<!-- results:begin -->")[1].split("<!-- results:end -->")[0].strip()
    command = [sys.executable, "-m", "adatom", "bench", "--tables", str(ROOT / "results" / "nvidia_h100.json")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "400"}, cwd=ROOT)
    assert done.returncode == 0 and shown == done.stdout.strip()
