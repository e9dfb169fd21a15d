"""What the tests of whole scripts share: a script with its tiny run, what a run left behind, and starting a process."""

import csv
import dataclasses
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sync
import torch

SCRIPTS_DIR = Path(os.environ.get("SCRIPTS_DIR") or sync.ROOT)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORKSERVER = multiprocessing.get_context("forkserver")
IMPORTS = [
    "torch._dynamo", "torch.utils.tensorboard", "stable_baselines3.common.atari_wrappers", "gymnasium", "tqdm", "tyro",
    "pytest",
]  # fmt: skip


@dataclasses.dataclass(kw_only=True, eq=False)
class Script:
    """One script under test and what the tests of the contract must know of it."""

    name: str
    """the script is NAME.py"""
    tiny: dict[str, Any]
    """flags of a run of four units that takes a fraction of a second, on an environment in which nothing is random and
    whose episodes end with the unit: so a resumed run can be compared to the bit"""
    budget: str = "total_timesteps"
    """the flag that says how long to train"""
    unit: int = 64
    """the least budget after which a tiny run trains, logs and can save"""
    updates: int = 8
    """calls of `update` in one unit"""
    parts: set[str]
    """names of what the checkpoint holds besides counters, flags and the random generator's state"""
    varied: dict[str, Any]
    """flags (on top of tiny, as below) of an environment whose episodes differ"""
    process: dict[str, Any]
    """flags of a whole process, where nothing can be put in the place of anything"""
    real: list[dict[str, Any]]
    """flags of runs on what the script is meant for"""
    known: tuple[dict[str, Any], dict[str, float]]
    """flags of an environment whose episodes are all alike, and their return, length, and reward of each step"""
    other_env: str
    """an environment that a checkpoint of a tiny run does not fit"""
    unrenderable: str
    """an environment that gives no video"""
    faults: dict[str, str]
    """environments (two side by side) that break after 70 good steps: a word that the message must hold"""
    evaluation_fault: str
    """one of them that breaks the evaluation, too"""
    poisoned: tuple[str, int, int]
    """a function of targets, the number of one of its calls in the second unit, and how many updates are skipped when
    one number of what this call returns is nan"""
    rate: str = "learning_rate"
    """the flag that charts/learning_rate starts from"""
    schedule: tuple[dict[str, Any], str] | None
    """flags with which something follows a schedule over the budget, and the metric that shows it"""
    loss: str
    """a function of the math whose value is logged as losses/NAME"""
    resume: list[tuple[dict[str, Any], set[str]]]
    """flags with which a run is stopped and resumed, and the metrics that are in mid-course then"""
    changed: dict[str, Any]
    """for each flag a value that changes the metrics of a tiny run, or (such a value, other flags that it needs)"""
    own_flags: set[str] = dataclasses.field(default_factory=set)
    """flags that only the script's own tests try"""
    bad_input: list[tuple[dict[str, Any], str]]
    """flags that are refused, and words of the message; those of all scripts are in test_contract.py"""
    shrink: Callable[[types.ModuleType, pytest.MonkeyPatch], None] = lambda module, monkeypatch: None
    """makes the environments of tests within one process small"""

    @property
    def path(self) -> Path:
        return SCRIPTS_DIR / f"{self.name}.py"

    @functools.cached_property
    def flags(self) -> set[str]:
        return set(sync.Script(self.path).fields)

    @functools.cached_property
    def module(self) -> types.ModuleType:
        return importlib.import_module(self.name)

    def __str__(self) -> str:
        return self.name

    def args(self, **changes):
        return self.module.Args(**{**self.tiny, **changes})

    def units(self, number: int) -> dict[str, int]:
        """The budget's flag."""
        return {self.budget: number * self.unit}

    @functools.cache  # noqa: B019 (there are few scripts, and they stay)
    def plain_rows(self, **changes) -> list[list[str]]:
        """What a run logs; made once, to be compared with others."""
        return rows(self.train(**changes)[1])

    def main(self, **flags) -> dict[str, float]:
        """Run with the script's own defaults: --resume and --evaluate take all else from the checkpoint."""
        return self.module.main(self.module.Args(**flags))

    def train(self, **changes) -> tuple[dict[str, float], Path]:
        """Metrics that main returned and the run's folder."""
        return self.module.main(self.args(**changes)), run_dirs()[-1]

    def stopped(self, capsys, code: int, args) -> str:
        """The one line on stderr with which main ends; a refusal, code 2, has advice and has written nothing."""
        before = files()
        with pytest.raises(SystemExit) as error:
            self.module.main(args)
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert (error.value.code, line[:7]) == (code, "error: "), line
        if code == 2:
            assert files() == before, "a refused run has written something"
            assert line.count(". ") >= 1, f"no advice in: {line}"
        return line

    def refused(self, capsys, **changes) -> str:
        return self.stopped(capsys, 2, self.args(**changes))

    def start(self, **flags) -> "Process":
        """The script as a process of its own in the current folder."""
        return Process(self.path, words(flags))


def files(folder: Path = Path()) -> dict[Path, tuple[int, int]]:
    """Everything in a folder, with size and time of change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def run_dirs(folder: str = "runs") -> list[Path]:
    return sorted(Path(folder).glob("*"), key=lambda path: path.stat().st_mtime_ns)


def rows(run_dir: Path, timing: bool = False) -> list[list[str]]:
    """metrics.csv, without what depends on the clock."""
    with (run_dir / "metrics.csv").open() as file:
        table = list(csv.reader(file))
    assert table[0] == ["step", "metric", "value"]
    return [row for row in table[1:] if timing or not (row[1].startswith("time/") or row[1] == "charts/SPS")]


def values(run_dir: Path, metric: str) -> list[float]:
    return [float(row[2]) for row in rows(run_dir, timing=True) if row[1] == metric]


def checkpoint(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt")


def saved_step(run_dir: Path) -> int:
    return checkpoint(run_dir)["run"]["global_step"]


def read(run_dir: Path, name: str) -> dict:
    return json.loads((run_dir / f"{name}.json").read_text())


def tensors(state: object) -> list[torch.Tensor]:
    """All tensors in nested dictionaries, lists and tuples."""
    if isinstance(state, torch.Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else []
    return [tensor for value in inner for tensor in tensors(value)]


def equal(left: object, right: object) -> bool:
    """Whether the tensors in two states are the same to the bit."""
    pair = tensors(left), tensors(right)
    assert pair[0], "nothing to compare"
    return len(pair[0]) == len(pair[1]) and all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


def wrap(monkeypatch, owner: object, name: str, wrapper: Callable) -> None:
    """Put wrapper(number of the call, from 1; the original; *its arguments) in the place of a function."""
    real, calls = getattr(owner, name), []

    def wrapped(*arguments, **keywords):
        calls.append(None)
        return wrapper(len(calls), real, *arguments, **keywords)

    monkeypatch.setattr(owner, name, wrapped)


def words(flags: dict[str, Any]) -> list[str]:
    """The command line of these flags."""
    line = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        line += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return line


class Process:
    """`python SCRIPT ARGUMENTS`, but forked from a process that has the imports behind it: they take seconds."""

    started: list["Process"] = []

    def __init__(self, path: Path, arguments: list[str]):
        self.folder = tempfile.TemporaryDirectory()
        self.out, self.err = (Path(self.folder.name) / name for name in ("out", "err"))
        FORKSERVER.set_forkserver_preload(IMPORTS)  # before the first process; later it has no effect
        self.process = FORKSERVER.Process(target=run_script, args=(path, arguments, Path.cwd(), self.out, self.err))
        self.process.start()
        Process.started.append(self)

    def send(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    def wait(self, timeout: float = 120) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, "the script did not end"
        return self.process.exitcode, self.out.read_text(), self.err.read_text()

    @classmethod
    def end_all(cls) -> None:
        """Whatever a test has left running."""
        for process in cls.started:
            process.process.kill()
            process.process.join()
        cls.started.clear()


def run_script(path: Path, arguments: list[str], folder: Path, out: Path, err: Path) -> None:
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def wait_until(condition: Callable[[], bool], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
