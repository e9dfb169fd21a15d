"""What the benchmark's tools share: names of files, the machine's description, reading metrics.csv, writing JSON."""

import csv
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
TRAINING_RETURN, EVALUATION_RETURN = "charts/episodic_return", "eval/episodic_return"
OVERESTIMATION = "eval/q_overestimation"
SPEED, UPDATE_SECONDS = "charts/SPS", "time/update"


def slug(task: str) -> str:
    """The task's name as it appears in file names: `ALE/Pong-v5` becomes `ALE-Pong-v5`."""
    return task.replace("/", "-")


def refuse(what: str) -> NoReturn:
    """Stop with one line on stderr and exit code 2: `what` says what is wrong and what to do."""
    print(f"error: {what}", file=sys.stderr)
    raise SystemExit(2)


def now() -> str:
    """The date and time, in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def sha256(path: Path) -> str:
    """The fingerprint of a file: tells which version of a script made a result, committed or not."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def commit() -> str | None:
    """The repository's current commit, or None outside git or before the first commit."""
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None


def hardware(device: str | None = None) -> dict:
    """The machine, as far as it matters for a speed: processor, logical cores, memory and the training device."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": model, "logical_cores": os.cpu_count(), "ram_gib": round(memory, 1), "device": device}


def read_json(path: Path) -> dict:
    """A JSON file's content, or an empty dict when it does not exist or was cut short by a kill."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def write_json(path: Path, content: dict) -> None:
    """Write to a temporary name, then rename, so that a kill leaves the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(to_json(content) + "\n")
    os.replace(temporary, path)


def to_json(value, indent: str = "") -> str:
    """Strict JSON (NaN becomes null) that reads well in a diff: a key a line, but short entries and curves on one."""
    line, inner = json.dumps(plain(value), allow_nan=False), indent + "  "
    if len(line) > 100 and isinstance(value, dict):
        entries = [f"{inner}{json.dumps(key)}: {to_json(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if len(line) > 100 and isinstance(value, list) and isinstance(value[0], dict | str):
        return "[\n" + ",\n".join(inner + to_json(entry, inner) for entry in value) + f"\n{indent}]"
    return line


def plain(value):
    """The value with every number that JSON cannot hold (NaN, infinities) replaced by None."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(run: Path, *names: str) -> dict[str, list[tuple[int, float]]]:
    """The (step, value) rows of the named metrics in a run's metrics.csv, a half-written last line left out."""
    rows = {name: [] for name in names}
    path = run / "metrics.csv"
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.reader(file):
                if len(row) == 3 and row[1] in rows:
                    try:
                        rows[row[1]].append((int(float(row[0])), float(row[2])))
                    except ValueError:  # a row cut short by a kill
                        continue
    return rows


def insert_table(path: Path, name: str, text: str) -> None:
    """Replace what is between the file's markers of that name, so that a page never holds numbers typed by hand."""
    start, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    page = (
        path.read_text() if path.is_file() else refuse(f"no file at {path}. Create it, with the markers {start} {end}.")
    )
    if page.count(start) != 1 or page.count(end) != 1 or page.index(start) > page.index(end):
        refuse(f"{path} must hold {start} once and, after it, {end} once. Add the two markers.")
    before, after = page.split(start)[0], page.split(end)[1]
    path.write_text(f"{before}{start}\n{text}\n{end}{after}")
