"""Training speed of our scripts and of pip-installable peers, measured side by side.

    pip install -r benchmark/peers.txt
    python benchmark/speed.py                                 every workload
    python benchmark/speed.py --workloads ppo_continuous

Sides take turns (ours, peer, ours, peer, ...), each repetition in a fresh process, with one thread and with two.
Measured is the steady state, training included, default hyperparameters, no evaluation and no checkpoint: the speed of
each window of steps (for PPO one rollout and the training on it) after a warm-up of three. Once for the whole loop, and
once for the updates alone: the same steps over the time spent in updates. A process counts with the median of its
windows, a side with the median of its processes. Ratios are ours / peer, for each number of threads and for each side's
best. Close everything else: a two-thread run collapses when another process holds a core.
"""

import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import tyro
from common import (
    ROOT,
    SPEED,
    UPDATE_SECONDS,
    commit,
    hardware,
    insert_table,
    now,
    read_json,
    read_metrics,
    refuse,
    sha256,
    write_json,
)

WARM_UP = 3  # windows left out at the start
OFF_POLICY_WINDOW = WARM_UP_STEPS = 250  # steps of SAC and TD3: a window; random ones at the start, inside the warm-up
PARTS = {"loop": "whole loop", "update": "updates alone"}
Speeds = dict[str, list[float]]  # "loop" and "update": steps per second of each window


@dataclass
class Args:
    workloads: tuple[str, ...] = ()
    """Workloads to measure (none given: all)."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of threads (OMP_NUM_THREADS) to measure with."""
    repetitions: int = 3
    """Fresh processes per side and number of threads."""
    windows: int = 10
    """Windows measured in each process, after the warm-up."""
    device: str = "auto"
    """Device of both sides: auto, cpu or cuda."""
    results_dir: Path = Path("benchmark/results/speed")
    """Where <script>.json is written."""
    table: Path | None = None
    """Put the medians and ratios between this file's markers results:speed."""
    peer: str = ""
    """Run this peer once and print its windows as JSON (how the measurement starts its own processes)."""


# ---------------------------------------------------------------------------------------------------------------------
# Peers: each trains for `windows` windows and returns the speeds of every one
# ---------------------------------------------------------------------------------------------------------------------


def sb3_speeds(model, windows: int, window: int) -> Speeds:
    """Train a model of Stable-Baselines3, whose rollouts (PPO: of a window, else of a step) and updates take turns."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        """Adds up the time spent between rollouts, and notes it with the time of day after every window of steps."""

        def __init__(self):
            super().__init__()
            self.notes, self.updating, self.rollout_end = [], 0.0, time.perf_counter()

        def _on_rollout_start(self) -> None:
            now = time.perf_counter()
            self.updating += now - self.rollout_end
            if self.num_timesteps % window == 0:
                self.notes.append((now, self.updating))

        def _on_rollout_end(self) -> None:
            self.rollout_end = time.perf_counter()

        def _on_training_end(self) -> None:
            self._on_rollout_start()

        def _on_step(self) -> bool:
            return True

    clock = Clock()
    model.learn(windows * window, callback=clock)
    times, updating = zip(*clock.notes, strict=True)
    return {"loop": speeds_of(times, window), "update": speeds_of(updating, window)}


def speeds_of(seconds: Iterable[float], window: int) -> list[float]:
    """Steps per second between neighbouring readings of a clock; 0 where it stood still (no update was made)."""
    return [window / (end - start) if end > start else 0.0 for start, end in itertools.pairwise(seconds)]


def sb3_ppo_halfcheetah(windows: int, device: str) -> Speeds:
    """Stable-Baselines3's PPO with its defaults, rollouts of 2048 steps."""
    from stable_baselines3 import PPO

    return sb3_speeds(PPO("MlpPolicy", "HalfCheetah-v5", seed=1, device=device), windows, 2048)


def sb3_ppo_breakout(windows: int, device: str) -> Speeds:
    """Stable-Baselines3's PPO with its own Atari wrappers and our hyperparameters, rollouts of 8 x 128 steps."""
    import ale_py  # noqa: F401  registers the games
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    game = {"frameskip": 1, "repeat_action_probability": 0.0}
    envs = VecFrameStack(make_atari_env("ALE/Breakout-v5", n_envs=8, seed=1, env_kwargs=game), n_stack=4)
    model = PPO(
        "CnnPolicy",
        envs,
        2.5e-4,
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        clip_range=0.1,
        clip_range_vf=0.1,
        ent_coef=0.01,
        vf_coef=0.5,
        seed=1,
        device=device,
    )
    return sb3_speeds(model, windows, 8 * 128)


def sb3_sac_halfcheetah(windows: int, device: str) -> Speeds:
    """Stable-Baselines3's SAC, whose defaults are ours but for the warm-up."""
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", "HalfCheetah-v5", learning_starts=WARM_UP_STEPS, seed=1, device=device)
    return sb3_speeds(model, windows, OFF_POLICY_WINDOW)


def sb3_td3_defaults(windows: int, device: str) -> Speeds:
    """Stable-Baselines3's TD3 as it comes: wider networks (400-300), no exploration noise."""
    from stable_baselines3 import TD3

    model = TD3("MlpPolicy", "HalfCheetah-v5", learning_starts=WARM_UP_STEPS, seed=1, device=device)
    return sb3_speeds(model, windows, OFF_POLICY_WINDOW)


def sb3_td3_halfcheetah(windows: int, device: str) -> Speeds:
    """Stable-Baselines3's TD3 with our networks, learning rate and exploration noise."""
    import numpy as np
    from stable_baselines3 import TD3
    from stable_baselines3.common.noise import NormalActionNoise

    model = TD3(
        "MlpPolicy",
        "HalfCheetah-v5",
        3e-4,
        learning_starts=WARM_UP_STEPS,
        policy_kwargs={"net_arch": [256, 256]},
        action_noise=NormalActionNoise(np.zeros(6), np.full(6, 0.1)),
        seed=1,
        device=device,
    )
    return sb3_speeds(model, windows, OFF_POLICY_WINDOW)


# ---------------------------------------------------------------------------------------------------------------------
# Workloads
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Workload:
    """One script with flags, variants of it with more flags, and the peers that do the same work."""

    script: str
    window: int  # steps a window, the unit of the script's budget; also its logging interval
    flags: list[str]
    peers: dict[str, Callable[[int, str], Speeds]]
    variants: dict[str, list[str]] = field(default_factory=lambda: {"ours": []})
    packages: list[str] = field(default_factory=list)  # whose versions are recorded, beside those of the script's run
    budget_flag: str = "--total-timesteps"

    def command(self, windows: int, device: str, variant: str = "ours") -> list[str]:
        """Our side's command, as a reader would type it; 0 switches evaluation and checkpoints off."""
        budget = [self.budget_flag, str(windows * self.window), "--log-every", str(self.window)]
        quiet = ["--eval-every", "0", "--checkpoint-every", "0", "--eval-episodes", "1", "--device", device]
        return ["python", f"{self.script}.py", *self.flags, *self.variants[variant], *budget, *quiet]


WORKLOADS = {
    "ppo_continuous": Workload(
        script="ppo_continuous",
        window=2048,
        flags=["--env-id", "HalfCheetah-v5", "--num-envs", "1"],
        peers={"sb3_ppo_halfcheetah": sb3_ppo_halfcheetah},
        variants={"ours": [], "ours --compile": ["--compile"]},
        packages=["stable-baselines3", "torch", "gymnasium", "mujoco", "numpy"],
    ),
    "ppo_atari": Workload(
        script="ppo_atari",
        window=1024,
        flags=["--env-id", "ALE/Breakout-v5", "--num-envs", "8"],
        peers={"sb3_ppo_breakout": sb3_ppo_breakout},
        variants={"ours": [], "ours --compile": ["--compile"]},
        packages=["stable-baselines3", "torch", "gymnasium", "ale-py", "numpy"],
    ),
    **{
        script: Workload(
            script=script,
            window=OFF_POLICY_WINDOW,
            flags=["--env-id", "HalfCheetah-v5", "--learning-starts", str(WARM_UP_STEPS)],
            peers={peer.__name__: peer for peer in peers},
            variants={"ours": [], "ours --compile": ["--compile"]},
            packages=["stable-baselines3", "torch", "gymnasium", "mujoco", "numpy"],
        )
        for script, peers in (("sac", [sb3_sac_halfcheetah]), ("td3", [sb3_td3_halfcheetah, sb3_td3_defaults]))
    },
}
PEERS = {name: peer for workload in WORKLOADS.values() for name, peer in workload.peers.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def in_fresh_process(command: list[str], threads: int, folder: str) -> str:
    """Run to the end with that many threads, in a folder that may be littered; returns what was printed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        refuse(f"`{shlex.join(command)}` ended with {run.returncode}: {run.stderr.strip()[-500:]}. Repair it first.")
    return run.stdout


def our_speeds(
    workload: Workload, windows: int, device: str, threads: int, variant: str = "ours"
) -> tuple[Speeds, str]:
    """What the script itself logged, once a window, and the name of the device that it used."""
    with tempfile.TemporaryDirectory(prefix="speed_") as folder:
        _, _, *flags = workload.command(windows, device, variant)
        in_fresh_process([sys.executable, str(ROOT / f"{workload.script}.py"), *flags], threads, folder)
        (run,) = Path(folder, "runs").iterdir()
        metrics = read_metrics(run, SPEED, UPDATE_SECONDS)
        updating = speeds_of([0.0, *(seconds for _, seconds in metrics[UPDATE_SECONDS])], workload.window)
        return {"loop": [v for _, v in metrics[SPEED]], "update": updating}, read_json(run / "config.json")["device"]


def peer_speeds(peer: str, windows: int, device: str, threads: int) -> Speeds:
    """A peer's, from a process of its own."""
    script = str(Path(__file__).resolve())
    command = [sys.executable, script, "--peer", peer, "--windows", str(windows), "--device", device]
    with tempfile.TemporaryDirectory(prefix="speed_") as folder:
        return json.loads(in_fresh_process(command, threads, folder).splitlines()[-1])


def measure(workload: Workload, args: Args) -> list[dict]:
    """Every measurement, in the order in which it was made: ours and each peer in turn."""
    measurements = []
    for repetition in range(1, args.repetitions + 1):
        for threads in args.threads:
            for side in (*workload.variants, *workload.peers):
                load, windows, device = os.getloadavg()[0], args.windows + WARM_UP, args.device
                if side in workload.variants:
                    speeds, device = our_speeds(workload, windows, device, threads, side)
                else:
                    speeds = peer_speeds(side, windows, device, threads)
                entry = {"side": side, "threads": threads, "repetition": repetition, "device": device}
                entry |= {part: round(statistics.median(speeds[part][WARM_UP:]), 1) for part in PARTS}
                print(
                    f"{side:<24} {threads} threads, repetition {repetition}: {entry['loop']:9.1f} per second",
                    flush=True,
                )
                entry |= {f"{part}_windows": [round(speed, 1) for speed in speeds[part]] for part in PARTS}
                measurements.append(entry | {"load_before": round(load, 2)})
    return measurements


def medians_of(measurements: list[dict], part: str) -> dict[str, dict[str, float]]:
    """side -> number of threads -> median over the repetitions, and under `best` the highest of these."""
    speeds: dict[str, dict[str, list[float]]] = {}
    for entry in measurements:
        speeds.setdefault(entry["side"], {}).setdefault(str(entry["threads"]), []).append(entry[part])
    medians = {side: {t: statistics.median(s) for t, s in threads.items()} for side, threads in speeds.items()}
    return {side: threads | {"best": max(threads.values())} for side, threads in medians.items()}


def ratios_of(medians: dict[str, dict[str, float]], peers: Iterable[str]) -> dict[str, dict[str, float]]:
    """ "variant / peer" -> number of threads, and `best` -> the variant's median over the peer's."""
    ours = {side: speeds for side, speeds in medians.items() if side not in peers}
    return {
        f"{side} / {peer}": {key: round(speeds[key] / medians[peer][key], 2) for key in speeds}
        for peer in peers
        for side, speeds in ours.items()
    }


def table_of(parts: dict[str, dict], versions: dict) -> str:
    """Medians and ratios of the whole loop and of the updates alone, for the terminal and for a page."""
    columns = list(next(iter(parts["loop"]["medians"].values())))
    names = [column if column == "best" else f"{column} thread{'s' * (column != '1')}" for column in columns]
    rows = [["", *names], ["---"] * (len(columns) + 1)]
    for part, title in PARTS.items():
        for side, speeds in parts[part]["medians"].items():
            rows.append([f"{side}, {title}", *(f"{speeds[column]:,.0f}" for column in columns)])
        for pair, values in parts[part]["ratios"].items():
            rows.append([f"{pair}, {title}", *(f"**{values[column]:.2f}**" for column in columns)])
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{used}."


def warn_if_busy() -> None:
    """Timings of a machine that does something else are worth little."""
    load = os.getloadavg()[0]
    if load > 0.5:
        print(
            f"warning: the load is {load:.2f} before the start. Timings will be off; stop what runs.", file=sys.stderr
        )


def main(args: Args) -> None:
    """Measure the workloads, print medians and ratios, and keep every measurement."""
    unknown = set(args.workloads) - set(WORKLOADS)
    if unknown:
        refuse(f"no workload {', '.join(sorted(unknown))}. There are: {', '.join(WORKLOADS)}.")
    warn_if_busy()
    for name in args.workloads or WORKLOADS:
        workload = WORKLOADS[name]
        measurements = measure(workload, args)
        medians = {part: medians_of(measurements, part) for part in PARTS}
        parts = {p: {"medians": m, "ratios": ratios_of(m, workload.peers)} for p, m in medians.items()}
        path = args.results_dir / f"{workload.script}.json"
        entry = {
            "date": now(),
            "commit": commit(),
            "script_sha256": sha256(ROOT / f"{workload.script}.py"),
            "hardware": hardware(measurements[0]["device"]),
            "versions": {"python": sys.version.split()[0]}
            | {package: version(package) for package in workload.packages},
            "command": f"python benchmark/speed.py --workloads {name} "
            f"--repetitions {args.repetitions} --windows {args.windows}",
            "our_command": shlex.join(workload.command(args.windows + WARM_UP, args.device)),
            "unit": f"steps per second, windows of {workload.window} steps, the first {WARM_UP} left out",
            **parts,
            "measurements": measurements,
        }
        write_json(path, read_json(path) | {name: entry})
        print(f"\n{name}\n{table_of(parts, entry['versions'])}\n")
        if args.table:
            insert_table(args.table, "speed", table_of(parts, entry["versions"]))


if __name__ == "__main__":
    arguments = tyro.cli(Args, description=__doc__)
    if arguments.peer:
        print(json.dumps(PEERS[arguments.peer](arguments.windows, arguments.device)))
    else:
        main(arguments)
