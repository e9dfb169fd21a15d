"""Tests import the scripts from the repository root (or from SCRIPTS_DIR, to try the tests on a changed copy)."""

import functools
import importlib.metadata
import os
import sys
from pathlib import Path

# Before torch is imported: two-thread jobs collapse when anything else runs, and results would depend on the machine.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("WANDB_MODE", "offline")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [os.environ.get("SCRIPTS_DIR") or str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmark")]

import pytest  # noqa: E402
import torch  # noqa: E402
from harness import Process  # noqa: E402
from script_cases import SCRIPTS  # noqa: E402
from toy_envs import Line  # noqa: E402

torch.set_num_threads(1)


class Package(importlib.metadata.PathDistribution):
    """An installed package whose metadata is read once: every run wants all, which takes longer than to train."""

    metadata = functools.cached_property(lambda self: super().metadata)


@pytest.fixture(scope="session")
def packages() -> list[importlib.metadata.Distribution]:
    found = list(importlib.metadata.distributions())
    for package in found:
        if type(package) is importlib.metadata.PathDistribution:
            package.__class__ = Package
    return found


@pytest.fixture
def empty_folder(tmp_path, monkeypatch, packages):
    """The test runs in an empty folder, and no toy environment has seen anything."""
    real = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **how: real(**how) if how else iter(packages))
    monkeypatch.setattr(Line, "seen", [])
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=SCRIPTS, ids=str)
def script(request, empty_folder, monkeypatch):
    """Each script in turn, in an empty folder."""
    request.param.shrink(request.param.module, monkeypatch)
    yield request.param
    Process.end_all()


def pytest_report_header() -> str:
    """Say at the top whether the tests that need CUDA have one."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: the tests that need it are skipped"
    return f"torch {torch.__version__}, CUDA device: {device}"
