"""Every recipe, docs/recipes/X.patch, is short, explained by X.md, applies to the script as it is, and runs."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import sync
from test_packaging import TASKS, short_run

PATCHES = sorted((sync.ROOT / "docs" / "recipes").glob("*.patch"))
MOST_CHANGED_LINES = 40


def changed_lines(patch: str) -> int:
    return sum(line[:1] in ("+", "-") and line[:4] not in ("+++ ", "--- ") for line in patch.splitlines())


def scripts_of(patch: str) -> list[str]:
    """The files that a patch changes."""
    return re.findall(r"^\+\+\+ b/(\S+)", patch, re.MULTILINE)


def patched(patch: Path, folder: Path, root: Path = sync.ROOT) -> list[Path]:
    """Copies of the scripts with the recipe applied, in a folder outside of any repository."""
    names = scripts_of(patch.read_text())
    for name in names:
        (folder / name).write_bytes((root / name).read_bytes())
    for option in ("--check", "--whitespace=error"):
        command = ["git", "apply", option, str(patch)]
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, f"{patch.name} does not apply, write it anew: {run.stderr}"
    return [folder / name for name in names]


def results(metrics: list[list[str]]) -> list[list[str]]:
    """What a run computed: its metrics without the times."""
    return [row for row in metrics if not row[1].startswith("time/") and row[1] != "charts/SPS"]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_recipe_is_short_and_explained(patch):
    assert changed_lines(patch.read_text()) <= MOST_CHANGED_LINES
    page = patch.with_suffix(".md").read_text()
    assert f"git apply docs/recipes/{patch.name}" in page


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_recipe_applies_runs_and_changes_the_result(patch, tmp_path):
    for path in patched(patch, tmp_path):
        task = TASKS[path.name][0]
        run, plain = short_run(path, task), short_run(sync.ROOT / path.name, task)
        assert run.code == 0, run.stderr
        assert plain.code == 0, plain.stderr
        assert results(run.metrics) != results(plain.metrics)


def test_a_bad_recipe_is_found(tmp_path):
    """One that does not fit the script; and the lines that count."""
    (tmp_path / "x.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "copy").mkdir()
    text = "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n a = 1\n-b = 2\n+b = 3\n"
    assert (changed_lines(text), scripts_of(text)) == (2, ["x.py"])
    (tmp_path / "good.patch").write_text(text)
    assert patched(tmp_path / "good.patch", tmp_path / "copy", tmp_path)[0].read_text() == "a = 1\nb = 3\n"
    (tmp_path / "bad.patch").write_text(text.replace("b = 2", "b = 4"))
    with pytest.raises(AssertionError, match="does not apply"):
        patched(tmp_path / "bad.patch", tmp_path / "copy", tmp_path)
