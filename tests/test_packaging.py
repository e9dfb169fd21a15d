"""Every script works alone: copied to an empty folder, and with the packages that its own first lines ask for.

Needs the package index (for the resolution of dependencies, nothing is installed): without it these tests fail.
"""

import ast
import csv
import functools
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import sync
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPTS = sync.find_scripts()
PYTHONS = ("3.11", "3.12", "3.13")
# Tasks of the short runs; the first one is also that of the recipes (test_recipes.py). Pendulum-v1 is cut at 200 steps.
TASKS = {
    "ppo_atari.py": ("ALE/Breakout-v5",),
    **{f"{name}.py": ("Pendulum-v1", "HalfCheetah-v5") for name in ("ppo_continuous", "sac", "td3")},
}
# What makes a run short. A script is given those that it has.
SHORT = {
    "total_timesteps": 256,
    "num_envs": 1,
    "num_steps": 128,
    "num_minibatches": 4,
    "update_epochs": 1,
    "eval_episodes": 1,
    "eval_every": 0,
    "log_every": 128,
    "learning_starts": 100,
}


@dataclass
class Run:
    """What a run printed and left behind."""

    code: int
    stdout: str
    stderr: str
    files: set[str]
    metrics: list[list[str]]


def run_alone(path: Path, *arguments: str) -> Run:
    """Copy one script to an empty folder and run it there, on one thread."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, path.name).write_bytes(path.read_bytes())
        command = [sys.executable, path.name, *arguments]
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        files = {found.name for found in Path(folder).iterdir()}
        rows = [row for file in Path(folder).glob("runs/*/metrics.csv") for row in csv.reader(file.open())]
    return Run(run.returncode, run.stdout, run.stderr, files, rows)


@functools.cache
def short_run(path: Path, task: str, *more_flags: str) -> Run:
    """A short training run of a script on a task, with whatever shortens it."""
    fields = sync.Script(path).fields
    flags = [word for name, value in SHORT.items() if name in fields for word in (flag_of(name), str(value))]
    return run_alone(path, *(["--env-id", task] if "env_id" in fields else []), *flags, *more_flags)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_help_shows_the_docstring_and_every_flag(script):
    run = run_alone(script.path, "--help")
    assert (run.code, run.stderr, run.files) == (0, "", {script.name})
    assert "".join(ast.get_docstring(script.tree).split()) in "".join(run.stdout.split())
    assert [name for name in script.fields if flag_of(name) not in run.stdout] == []


@pytest.mark.parametrize(("script", "task"), [(s, task) for s in SCRIPTS for task in TASKS.get(s.name, ["no task"])])
def test_a_run_leaves_its_folder_and_prints_only_its_own_lines(script, task):
    """Nothing but runs/ appears (no MUJOCO_LOG.TXT), and on stderr nothing but the progress bar (no warnings)."""
    assert script.name in TASKS, f"choose tasks for a short run of {script.name}"
    run = short_run(script.path, task)
    assert run.code == 0, run.stderr
    assert run.files == {script.name, "runs"}
    assert [line for line in run.stderr.replace("\r", "\n").split("\n") if line.strip() and "%|" not in line] == []
    assert "mujoco" not in run.stdout.lower()
    assert len(run.metrics) > 10


def resolve(file: Path, python: str, **environment: str) -> subprocess.CompletedProcess:
    """Choose versions for a requirements file, or for the PEP 723 block of a script, on one Python."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-python-downloads", "--no-header"]
    command += ["--no-annotate", "--python-version", python, str(file)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_block_of_a_script_resolves(script, python):
    assert ">=3.11" in script.block["requires-python"]
    found = resolve(script.path, python)
    assert found.returncode == 0, found.stderr
    assert names(script.block["dependencies"]) <= names(found.stdout.splitlines())


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pinned_requirements_resolve(python):
    path = sync.ROOT / "requirements.txt"
    found = resolve(path, python)
    assert found.returncode == 0, found.stderr
    pins = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    chosen = set(found.stdout.splitlines())
    assert {f"{Requirement(pin).name}{Requirement(pin).specifier}" for pin in pins} <= chosen


def test_what_cannot_be_resolved_is_found(tmp_path):
    path = tmp_path / "requirements.txt"
    path.write_text("numpy>=2\nnumpy<2\n")
    assert "unsatisfiable" in resolve(path, "3.11").stderr
    path.write_text("numpy>=2\n")
    nowhere = {"UV_INDEX_URL": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0", "UV_CACHE_DIR": str(tmp_path)}
    assert resolve(path, "3.11", **nowhere).returncode != 0
