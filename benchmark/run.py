"""Run scripts x tasks x seeds, and keep each run as one small JSON file.

    python benchmark/run.py --scripts ppo_continuous --tasks HalfCheetah-v5 Hopper-v5 --seeds 5
    python benchmark/run.py --scripts ppo_continuous --tasks HalfCheetah-v5 --name envs8 --flags "--num-envs 8"
    python benchmark/run.py --scripts ppo_continuous --tasks HalfCheetah-v5 --patch docs/recipes/NAME.patch

Seeds are 1..N, fixed before the first run, and every run is kept: a failed one leaves a file too. The same command
again skips what is done, resumes what was interrupted, and retries what failed (the failure stays on record). Nothing
that was made with other flags is overwritten or counted: such a task and seed is named and skipped (exit code 1).
To repeat a run that is done, delete both its result file and its folder under --runs-dir.

Exit codes: 0 everything is done, 1 something failed or was skipped, 2 bad input, 130 / 143 interrupted.
"""

import fcntl
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import (
    EVALUATION_RETURN,
    OVERESTIMATION,
    ROOT,
    TRAINING_RETURN,
    commit,
    hardware,
    now,
    read_json,
    read_metrics,
    refuse,
    sha256,
    slug,
    to_json,
    write_json,
)

CURVE_POINTS = 200
RESULT_BYTES = 300_000
INTERRUPTED = (130, 143, -signal.SIGINT, -signal.SIGTERM)
OWN_FLAGS = {"--seed", "--exp-name", "--runs-dir", "--resume", "--evaluate"}


@dataclass
class Args:
    scripts: tuple[str, ...]
    """Scripts to run: a name (`ppo_continuous`) or the path of a .py file."""
    tasks: tuple[str, ...]
    """Tasks to run each script on, given to the script as `--task-flag`."""
    seeds: int = 5
    """Number of seeds: 1..N."""
    workers: int = 2
    """How many runs go on at the same time."""
    threads: int = 1
    """OMP_NUM_THREADS of each run."""
    runs_dir: Path = Path("runs/benchmark")
    """Where the scripts leave their run folders (checkpoints, metrics, logs)."""
    results_dir: Path = Path("benchmark/results")
    """Where the result files go: <results-dir>/<script>/<task>__<seed>.json."""
    flags: str = ""
    """More flags for every run, as one string: --flags "--num-envs 8"."""
    name: str = ""
    """A label for runs with other flags; they go to <results-dir>/<script>+<name>/."""
    patch: Path | None = None
    """A recipe (docs/recipes/X.patch) applied to a temporary copy of the script; results go to <script>+X/."""
    task_flag: str = "--env-id"
    """The script's flag that names the task."""


@dataclass
class Job:
    """One script on one task with one seed, and the files that belong to it."""

    args: Args
    script: Path
    task: str
    seed: int

    @property
    def variant(self) -> str:
        """Script plus the labels of what was changed in it: the result folder and the run's --exp-name."""
        patch = self.args.patch.stem if self.args.patch else ""
        return "+".join(part for part in (self.script.stem, patch, self.args.name) if part)

    @property
    def run_prefix(self) -> str:
        return f"{slug(self.task)}__{self.variant}__{self.seed}"

    @property
    def result_path(self) -> Path:
        return self.args.results_dir / self.variant / f"{slug(self.task)}__{self.seed}.json"

    def launch_path(self, suffix: str) -> Path:
        """Launch record (.json), lock, and the run's captured output: what only run.py writes and reads."""
        return self.args.runs_dir / "launch" / f"{self.run_prefix}{suffix}"

    @property
    def flags(self) -> list[str]:
        return shlex.split(self.args.flags)

    def __str__(self) -> str:
        return f"{self.variant} on {self.task}, seed {self.seed}"


@dataclass
class Running:
    """A started process, with what is needed to judge it when it ends."""

    job: Job
    process: subprocess.Popen
    lock: object
    stderr_start: int
    signals_sent: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# What a run left behind -> one result
# ---------------------------------------------------------------------------------------------------------------------


def learning_curve(episodes: list[tuple[int, float]], steps: int, points: int = CURVE_POINTS) -> list[list[float]]:
    """[last step of the bin, mean return of the episodes that finished in it], for `points` bins of equal width.

    Bin k holds the steps in (k * steps / points, (k + 1) * steps / points]. Bins without an episode are left out, so
    curves of different seeds share their steps and can be averaged.
    """
    bins: dict[int, list[float]] = {}
    for step, value in episodes:
        bins.setdefault(min(max(math.ceil(step * points / steps), 1), points), []).append(value)
    return [[math.floor(k * steps / points), statistics.fmean(bins[k])] for k in sorted(bins)]


def thinned(curve: list, points: int = CURVE_POINTS) -> list:
    """At most `points` entries of the curve, evenly spread, the first and the last always among them."""
    if len(curve) <= points:
        return curve
    return [curve[round(k * (len(curve) - 1) / (points - 1))] for k in range(points)]


def measurements(run: Path | None) -> dict:
    """The numbers of a run, finished or not: counters, times, curves, training and evaluation returns apart."""
    summary = read_json(run / "summary.json") if run else {}
    rows = read_metrics(run, TRAINING_RETURN, EVALUATION_RETURN, OVERESTIMATION) if run else {}
    episodes, evaluations = rows.get(TRAINING_RETURN, []), rows.get(EVALUATION_RETURN, [])
    steps = summary.get("steps") or max((step for step, _ in episodes + evaluations), default=0)
    times = ("wall_seconds", "steps_per_second", "environment_seconds", "update_seconds", "rest_seconds")
    last = [value for _, value in episodes[-100:]]
    final = summary.get("final_evaluation") or []
    ranked = [row for row in evaluations if math.isfinite(row[1])]
    return {
        "steps": steps,
        **{key: summary.get(key) for key in times},
        "training_return": summary.get("last_training_return", statistics.fmean(last) if last else None),
        "final": statistics.fmean(final) if final else None,
        "best": max(ranked, key=lambda row: row[1], default=None),
        "learning_curve": learning_curve(episodes, steps) if steps else [],
        "evaluation_curve": thinned(evaluations),
        "overestimation_curve": thinned(rows.get(OVERESTIMATION, [])),
        "final_evaluation": final,
    }


def result_of(job: Job, run: Path | None, exit_code: int, stderr: list[str]) -> dict:
    """The content of a result file. A run counts as finished when it wrote its summary.json."""
    config = read_json(run / "config.json") if run else {}
    record = read_json(job.launch_path(".json"))
    starts = record.get("starts", [])
    last = starts[-1] if starts else {}
    result = {
        "script": job.script.name,
        "variant": job.variant,
        "task": job.task,
        "seed": job.seed,
        "failed": not finished(run),
        "date": now(),
        "command": reproduction(job, last.get("threads")),
        "patch": last.get("patch"),
        "commit": config.get("commit") or last.get("commit"),
        "script_sha256": last.get("script_sha256"),
        "hardware": hardware(config.get("device")),
        "threads": last.get("threads"),
        "workers": last.get("workers"),
        "starts": starts,
        "versions": config.get("versions", {}),
        "asked_flags": job.flags,
        "flags": config.get("flags", {}),
        **measurements(run),
    }
    if result["failed"]:
        result |= {"exit_code": exit_code, "stderr": stderr}
    return result | {"earlier_failures": failures_so_far(job)}


def failures_so_far(job: Job) -> list[dict]:
    """The failures that the job's present result file has on record: its own, if it is one, and those before it."""
    before = read_json(job.result_path)
    failures = before.get("earlier_failures", [])
    if before.get("failed"):
        failures = [*failures, {key: before[key] for key in ("date", "exit_code", "stderr", "asked_flags", "steps")}]
    return failures


def save(job: Job, result: dict) -> None:
    """Write the result file, refusing one that is too big to be committed."""
    size = len(to_json(result).encode())
    if size > RESULT_BYTES:
        raise ValueError(f"{job.result_path} would have {size} bytes, more than the {RESULT_BYTES} allowed")
    write_json(job.result_path, result)


def stderr_lines(running: Running, count: int = 20) -> list[str]:
    """The last lines of what this start wrote to stderr, progress bars and the machine's own paths cut out."""
    with running.job.launch_path(".stderr.log").open(errors="replace") as file:
        file.seek(running.stderr_start)
        text = file.read().replace(str(ROOT), ".").replace(sys.prefix, "PYTHON").replace(str(Path.home()), "~")
    lines = [line.split("\r")[-1].rstrip()[:200] for line in text.rstrip("\r\n").split("\n")]
    return [line for line in lines if line][-count:]


# ---------------------------------------------------------------------------------------------------------------------
# What to do with a job
# ---------------------------------------------------------------------------------------------------------------------


def folders_of(job: Job) -> list[Path]:
    """Every run folder with the job's name, oldest first (the name ends in the time)."""
    prefix = f"{job.run_prefix}__"
    found = job.args.runs_dir.iterdir() if job.args.runs_dir.exists() else []
    return sorted(path for path in found if path.name.startswith(prefix) and "__" not in path.name[len(prefix) :])


def find_run(job: Job) -> Path | None:
    """The run folder that the job's own starts made: a finished one if there is one, else the newest.

    A folder that was there before the job's first start was made by hand, with flags nobody recorded: not counted.
    """
    foreign = set(read_json(job.launch_path(".json")).get("folders_before", [path.name for path in folders_of(job)]))
    own = [path for path in folders_of(job) if path.name not in foreign]
    return next((path for path in reversed(own) if finished(path)), own[-1] if own else None)


def finished(run: Path | None) -> bool:
    return bool(run and read_json(run / "summary.json"))


def grouped(flags: list[str]) -> list[list[str]]:
    """Flags with their values, in one order and one spelling: `--a=1 --b_c` and `--b-c --a 1` are the same request."""
    groups: list[list[str]] = []
    for token in flags:
        if token.startswith("--"):
            name, *value = token.split("=", 1)
            groups.append([name.replace("_", "-"), *value])
        elif groups:
            groups[-1].append(token)
        else:
            raise ValueError(token)
    return sorted(groups)


def made_with_other_flags(job: Job) -> str | None:
    """The file or folder that belongs to this job's name but was made with other flags than asked for now, if any.

    A start that was refused (exit code 2, no run folder) made nothing, so its flags may be corrected.
    """
    result, record, run = read_json(job.result_path), read_json(job.launch_path(".json")), find_run(job)
    refused = result.get("exit_code") == 2 and run is None
    if result and not refused and grouped(result["asked_flags"]) != grouped(job.flags):
        return str(job.result_path)
    if run and grouped(record["asked_flags"]) != grouped(job.flags):
        return str(run)
    return None


def decide(job: Job) -> str:
    """done, collect (finished, but no result file), resume or start."""
    result, run = read_json(job.result_path), find_run(job)
    if result and not result["failed"]:
        return "done"
    if finished(run):
        return "collect"
    last_start = (read_json(job.launch_path(".json")).get("starts") or [{}])[-1]
    resume_was_refused = last_start.get("resumed") and result.get("exit_code") == 2
    return "resume" if run and (run / "checkpoint.pt").exists() and not resume_was_refused else "start"


def arguments(job: Job) -> list[str]:
    """The flags that decide what is computed."""
    return [job.args.task_flag, job.task, "--seed", str(job.seed), *job.flags]


def reproduction(job: Job, threads: int) -> str:
    """The command with which a reader repeats the run by hand (after `git apply`, if there is a patch)."""
    inside = job.script.is_relative_to(ROOT)  # else a patched copy, or a script from elsewhere
    script = str(job.script.relative_to(ROOT)) if inside else job.script.name
    return f"OMP_NUM_THREADS={threads} " + shlex.join(["python", script, *arguments(job)])


def launch(job: Job, resume: bool, workers: int, lock: object) -> Running:
    """Start or resume the run in a session of its own: a Ctrl-C reaches it once, from here, not twice."""
    record = read_json(job.launch_path(".json"))
    run = find_run(job)
    if run is None:
        record = {"folders_before": [path.name for path in folders_of(job)], "starts": []}
    start = {
        "date": now(),
        "resumed": resume,
        "threads": job.args.threads,
        "workers": workers,
        "commit": commit(),
        "script_sha256": sha256(job.script),
        "patch": job.args.patch.name if job.args.patch else None,
    }
    write_json(job.launch_path(".json"), record | {"asked_flags": job.flags, "starts": [*record["starts"], start]})
    place = ["--exp-name", job.variant, "--runs-dir", str(job.args.runs_dir)]
    flags = ["--resume", str(run)] if resume else [*arguments(job), *place]
    environment = os.environ | {"OMP_NUM_THREADS": str(job.args.threads)}
    with job.launch_path(".stdout.log").open("a") as output, job.launch_path(".stderr.log").open("a") as errors:
        stderr_start = errors.tell()
        process = subprocess.Popen(
            [sys.executable, str(job.script), *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
    return Running(job, process, lock, stderr_start)


def take_lock(job: Job):
    """A lock that the run inherits and keeps while it lives, so that no second process works on the same run folder.

    It outlives a run.py that was killed, as long as the script that it started goes on. None when it is taken.
    """
    path = job.launch_path(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


class Pool:
    """Keeps `workers` runs going, passes signals on to them, and writes a result file as each one ends."""

    def __init__(self, jobs: list[Job], workers: int):
        self.queue, self.total, self.workers = deque(jobs), len(jobs), min(workers, len(jobs))
        self.running: list[Running] = []
        self.problems = 0
        self.signals: list[int] = []

    def say(self, what: str, job: Job, more: str = "") -> None:
        print(f"{what:<9} {job}{f': {more}' if more else ''}", flush=True)

    def stop(self, signum: int, _frame=None) -> None:
        """Signal handler: start nothing more, and have the signal passed on."""
        self.signals.append(signum)

    def pass_signals_on(self) -> None:
        """Send every signal to every run once: at the first a script saves a checkpoint, a second one quits at once."""
        for running in self.running:
            for signum in self.signals[running.signals_sent :]:
                running.process.send_signal(signum)
                running.signals_sent += 1

    def begin(self, job: Job) -> None:
        """Start the job, resume it, collect what it left, or say why none of these."""
        lock = take_lock(job)
        if lock is None:
            self.problems += 1
            return self.say("BUSY", job, "another process is at work on it; skipped")
        other = made_with_other_flags(job)
        if other:
            self.problems += 1
            lock.close()
            return self.say("DIFFERS", job, f"{other} was made with other flags; choose a --name or delete it; skipped")
        what = decide(job)
        if what in ("start", "resume"):
            self.say(what, job)
            return self.running.append(launch(job, what == "resume", self.workers, lock))
        if what == "collect":
            self.collect(job, 0, [])
        else:
            changed = read_json(job.result_path).get("script_sha256") != sha256(job.script)
            self.say("done", job, "before this call" + (", with another version of the script" if changed else ""))
        return lock.close()

    def collect(self, job: Job, exit_code: int, stderr: list[str]) -> None:
        """Write the result file of a run that has ended, unless it was interrupted and will be resumed."""
        run = find_run(job)
        if exit_code in INTERRUPTED and not finished(run):
            self.problems += 1
            return self.say("stopped", job, "the same command resumes it")
        result = result_of(job, run, exit_code, stderr)
        try:
            save(job, result)
        except ValueError as error:
            self.problems += 1
            return self.say("FAILED", job, str(error))
        if result["failed"]:
            self.problems += 1
            return self.say("FAILED", job, f"exit code {exit_code}; {stderr[-1] if stderr else 'nothing on stderr'}")
        returns = f"training return {shown(result['training_return'])}, final evaluation {shown(result['final'])}"
        return self.say("finished", job, f"{shown(result['wall_seconds'], 0)} s, {returns}")

    def reap(self) -> None:
        """Collect the runs that have ended."""
        for running in [running for running in self.running if running.process.poll() is not None]:
            self.running.remove(running)
            self.collect(running.job, running.process.returncode, stderr_lines(running))
            running.lock.close()

    def work(self) -> None:
        """Go through the queue. If this process itself fails, its runs are stopped, with a checkpoint, not orphaned."""
        try:
            while self.running or (self.queue and not self.signals):
                while self.queue and len(self.running) < self.workers and not self.signals:
                    self.begin(self.queue.popleft())
                self.pass_signals_on()
                self.reap()
                time.sleep(0.02)
        finally:
            for running in self.running:
                running.process.terminate()
            for running in self.running:
                running.process.wait()


def shown(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def print_table(jobs: list[Job]) -> None:
    """One line per script and task: mean and standard deviation over the seeds that are done."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for job in jobs:
        groups.setdefault((job.variant, job.task), []).append(read_json(job.result_path))
    print(f"\n{'script':<24} {'task':<28} {'seeds':>7} {'training return':>20} {'final evaluation':>17}")
    for (variant, task), results in groups.items():
        done = [result for result in results if result and not result["failed"]]
        training = [result["training_return"] for result in done if result["training_return"] is not None]
        final = [result["final"] for result in done if result["final"] is not None]
        mean = f"{statistics.fmean(training):.1f}" if training else "-"
        spread = f" +- {statistics.stdev(training):.1f}" if len(training) > 1 else ""
        final_mean = shown(statistics.fmean(final) if final else None)
        print(f"{variant:<24} {task:<28} {f'{len(done)}/{len(results)}':>7} {mean + spread:>20} {final_mean:>17}")


def check(args: Args) -> None:
    """Refuse what cannot work before anything is started."""
    for number in ("seeds", "workers", "threads"):
        if getattr(args, number) < 1:
            refuse(f"--{number} is {getattr(args, number)}. Give at least 1.")
    try:
        given = {group[0] for group in grouped(shlex.split(args.flags))}
    except ValueError as error:
        refuse(f"--flags cannot be read near {error}. Write them as for the script, in one quoted string.")
    clash = given & (OWN_FLAGS | {args.task_flag})
    if clash:
        refuse(f"--flags holds {', '.join(sorted(clash))}. run.py sets these itself.")
    if args.patch and not args.patch.is_file():
        refuse(f"no patch at {args.patch}. Give the path of a file in docs/recipes/.")


def script_path(name: str) -> Path:
    """The script of that name at the top of the repository, or the .py file at that path."""
    path = Path(name).resolve() if name.endswith(".py") else ROOT / f"{name}.py"
    if not path.is_file():
        refuse(f"no script at {name}. Name a script at the top of the repository, or give the path of a .py file.")
    return path


def patched(script: Path, patch: Path, folder: Path) -> Path:
    """A copy with the recipe applied, outside the repository, under the script's name (checkpoints record it)."""
    copy = folder / script.name
    copy.write_bytes(script.read_bytes())
    command = ["git", "apply", f"--include={script.name}", str(patch.resolve())]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0 or copy.read_bytes() == script.read_bytes():
        refuse(f"{patch} does not apply to {script.name}. {run.stderr.strip() or 'It changes nothing there.'}")
    return copy


def joined(argv: list[str]) -> list[str]:
    """`--flags VALUE` as `--flags=VALUE`: tyro would take a VALUE that starts with dashes for a flag of its own."""
    if "--flags" not in argv[:-1]:
        return argv
    at = argv.index("--flags")
    return [*argv[:at], f"--flags={argv[at + 1]}", *argv[at + 2 :]]


def main(args: Args) -> int:
    """Run every job; returns the exit code."""
    check(args)
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        scripts = [script_path(name) for name in args.scripts]
        if args.patch:
            scripts = [patched(script, args.patch, Path(folder).resolve()) for script in scripts]
        seeds = range(1, args.seeds + 1)
        jobs = [Job(args, script, task, seed) for script in scripts for seed in seeds for task in args.tasks]
        pool = Pool(jobs, args.workers)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, pool.stop)
        pool.work()
    print_table(jobs)
    return 128 + pool.signals[0] if pool.signals else int(pool.problems > 0)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__, args=joined(sys.argv[1:]))))
