"""Tests import the scripts from the repository root (or from SCRIPTS_DIR, to try the tests on a changed copy)."""

import os
import sys
from pathlib import Path

# Before torch is imported: two-thread jobs collapse when anything else runs, and results would depend on the machine.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("WANDB_MODE", "offline")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [os.environ.get("SCRIPTS_DIR") or str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmark")]

import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_report_header() -> str:
    """Say at the top whether the tests that need CUDA have one."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: the tests that need it are skipped"
    return f"torch {torch.__version__}, CUDA device: {device}"
