"""Every recipe, docs/recipes/X.patch, is short, explained by X.md, applies to the script as it is, and runs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sync
import torch
from harness import wrap
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


def stored_transitions(path: Path, folder: Path) -> Path:
    """The replay memory of a run with another seed."""
    runs = folder / f"runs of {path.stem}"
    run = short_run(sync.ROOT / path.name, TASKS[path.name][0], "--seed=2", "--checkpoint-replay", f"--runs-dir={runs}")
    assert run.code == 0, run.stderr
    return next(runs.glob("*/replay_*.npz"))


# Flags that a recipe needs to have an effect, where it does nothing without them.
FLAGS = {"offline_data": lambda path, folder: [f"--offline-dataset={stored_transitions(path, folder)}"]}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_recipe_applies_runs_and_changes_the_result(patch, tmp_path):
    for path in patched(patch, tmp_path):
        task, flags = TASKS[path.name][0], FLAGS[patch.stem](path, tmp_path) if patch.stem in FLAGS else []
        run, plain = short_run(path, task, *flags), short_run(sync.ROOT / path.name, task)
        assert run.code == 0, run.stderr
        assert plain.code == 0, plain.stderr
        assert results(run.metrics) != results(plain.metrics)
        if flags:
            without = short_run(path, task)
            assert results(without.metrics) == results(plain.metrics), without.stderr


def test_offline_data_makes_the_share_of_each_batch_that_was_asked_for(tmp_path, monkeypatch):
    """Of 10 transitions 3 are the file's, whose rewards are all 7; with ratio 0 the file has no say."""
    batches = []
    for path in patched(sync.ROOT / "docs/recipes/offline_data.patch", tmp_path):
        spec = importlib.util.spec_from_file_location(f"patched_{path.stem}", path)
        script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # (dataclasses look it up there)
        spec.loader.exec_module(script)
        memory = script.ReplayMemory(50, 1, 3, 1, torch.device("cpu"))
        for _ in range(50):
            memory.add(*(np.full((1, *x.shape[2:]), 7 * (name == "rewards")) for name, x in memory.data.items()))
        memory.save(tmp_path / "sevens.npz")
        wrap(monkeypatch, script, "update", lambda _, real, *args: batches.append(args[2]) or real(*args))
        flags = {"env_id": "Pendulum-v1", "total_timesteps": 60, "learning_starts": 20, "batch_size": 10}
        flags |= {"eval_every": 0, "eval_episodes": 1, "hidden_size": 8, "runs_dir": str(tmp_path / "runs")}
        for ratio, share in ((0.3, 3), (0.0, 0), (1.0, 10)):
            batches.clear()
            script.main(script.Args(**flags, offline_dataset=str(tmp_path / "sevens.npz"), offline_ratio=ratio))
            assert len(batches) == 41
            assert all(len(x) == 10 for batch in batches for x in batch)
            assert {(batch[2] == 7).sum().item() for batch in batches} == {share}
        np.savez(tmp_path / "short.npz", rewards=np.zeros(5))
        for name in ("no.npz", "short.npz"):
            with pytest.raises(SystemExit) as stop:
                script.main(script.Args(**flags, offline_dataset=str(tmp_path / name)))
            assert stop.value.code == 2


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
