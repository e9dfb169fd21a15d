"""Roll trained policies of sac.py and td3.py, and write what they did as a Minari dataset. Nothing needs a network.

    python benchmark/record.py --checkpoint runs/Hopper-v5__sac__1__... --dataset hopper/medium-v0 --steps 100000
    python benchmark/record.py --checkpoint MEDIUM --checkpoint EXPERT --expert EXPERT --dataset hopper/medium-expert-v0
    python benchmark/record.py --checkpoint runs/Hopper-v5__sac__1__... --export hopper_medium.pt

A checkpoint is a run folder, its checkpoint.pt, or what --export made of one: the actor alone, a few hundred kilobytes.
The script that trained it plays: its environment, its network, its actions. The same flags give the same data to the
bit (on one thread). Reference scores for minari.get_normalized_score are the mean return of random actions and that of
an expert; without --expert or --ref-max-score there are none.

Exit codes: 0 written, 2 bad input, 3 the environment broke or the disk is full; after 2 and 3 there is no dataset.
"""

import dataclasses
import importlib
import math
import os
import shlex
import shutil
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import torch
import tyro
from common import ROOT, commit, refuse, sha256
from tqdm import tqdm

sys.path.append(str(ROOT))
SCRIPTS = ("sac", "td3")


@dataclass
class Args:
    checkpoint: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Run folder, checkpoint.pt or policy file. Several, one flag each: every one plays an equal share of the steps."""
    dataset: str = ""
    """Id of the new dataset: (namespace/)name-vN."""
    steps: int = 100_000
    """Steps in the dataset. An episode that they cut is marked as truncated."""
    sample: bool = True
    """Sample the actions (td3.py: add --exploration-noise); otherwise take the policy's mode."""
    exploration_noise: float = 0.1
    """Std of the noise on td3.py's actions, in half action ranges."""
    seed: int = 1
    """Seed of everything random: start of each episode, noise, reference episodes."""
    ref_min_score: float | None = None
    """Mean return of random actions; None = measured with --ref-episodes."""
    ref_max_score: float | None = None
    """Mean return of an expert."""
    expert: str | None = None
    """Checkpoint or policy file whose mode is played for --ref-episodes to measure --ref-max-score."""
    ref_episodes: int = 100
    """Episodes for each reference score that is measured."""
    datasets_dir: Path | None = None
    """Where datasets lie (MINARI_DATASETS_PATH); None = Minari's own folder."""
    author: str = "rl-scripts"
    """Author, for the dataset's metadata."""
    export: Path | None = None
    """Write no dataset but this policy file: the checkpoint with nothing in it but what acting needs."""


# ---------------------------------------------------------------------------------------------------------------------
# Policies
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Policy:
    """A trained actor, and the script whose network, environment and actions it uses."""

    file: Path
    script: ModuleType
    args: object
    checkpoint: dict
    agent: torch.nn.Module

    def make_env(self) -> gym.Env:
        return self.script.make_eval_env(self.args, self.args.seed)

    def play(self, env: gym.Env, seed: int, rng: np.random.Generator | None) -> float:
        """One episode with samples from rng, or with the mode; td3.py has nothing to sample. Returns its return."""
        with self.script.or_stop(3, f"{self.args.env_id} at play", "Mend the environment."):
            return sum(self.script.play(self.agent, env, seed, *((rng,) if self.script.SCRIPT == "sac" else ()))[0])

    def __str__(self) -> str:
        steps = self.checkpoint["run"]["global_step"]
        made = f"{self.script.SCRIPT}.py, seed {self.args.seed}, after {steps} steps"
        return f"{self.file.name} ({made}; sha256 {sha256(self.file)[:16]})"


def load_policy(path: str) -> Policy:
    """The policy of a run folder, a checkpoint or a policy file; the critics keep their first random weights."""
    hint = "Give a run folder or a checkpoint.pt of sac.py or td3.py, or a policy file that --export wrote."
    file = Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path)
    try:
        name = torch.load(file, map_location="cpu", weights_only=True)["script"]
    except Exception as error:  # whatever the file system, the zip reader or the unpickler may say
        refuse(f"{file} is missing or no checkpoint ({type(error).__name__}). {hint}")
    if name not in SCRIPTS:
        refuse(f"{file} is a checkpoint of {name}.py. {hint}")
    script = importlib.import_module(name)
    args, checkpoint, _ = script.load_checkpoint(script.Args(evaluate=str(file)), script.CHANGEABLE)
    try:
        env = script.make_eval_env(args, args.seed)
        env.spec.to_json()
        env.close()
    except Exception as error:
        what = " ".join(str(error).split())
        refuse(f"environment {args.env_id} cannot be made or its spec not stored: {what}. Install or register it.")
    try:
        size, (scale, shift) = math.prod(env.observation_space.shape), script.action_transform(env.action_space)
        agent = script.Agent(size, scale, shift, args if name == "sac" else args.hidden_size)
        agent.actor.load_state_dict(actor_of(checkpoint))
    except Exception as error:
        refuse(f"{file} does not fit {args.env_id} ({type(error).__name__}). Use the one that it was trained on.")
    return Policy(file, script, args, checkpoint, agent)


def actor_of(checkpoint: dict) -> dict[str, torch.Tensor]:
    """The actor's part of the agent's state."""
    state = checkpoint["parts"]["agent"]
    return {name.removeprefix("actor."): value for name, value in state.items() if name.startswith("actor.")}


def export(policy: Policy, path: Path) -> None:
    """Write the checkpoint with the actor alone, and without flags that say where it was made."""
    places = ("runs_dir", "resume", "evaluate", "wandb_entity")
    flags = {name: value for name, value in policy.checkpoint["flags"].items() if name not in places}
    actor = {f"actor.{name}": value.float().clone() for name, value in actor_of(policy.checkpoint).items()}
    state = {key: policy.checkpoint[key] for key in ("format_version", "script")}
    run = {"global_step": policy.checkpoint["run"]["global_step"]}
    state |= {"flags": flags, "run": run, "parts": {"agent": actor}}
    policy.script.write_whole(path, lambda file: torch.save(state, file))
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB, the actor of {policy}")


# ---------------------------------------------------------------------------------------------------------------------
# Playing
# ---------------------------------------------------------------------------------------------------------------------


class Recorder(gym.Wrapper):
    """Keeps the episodes that are played in it, T + 1 observations each, and cuts the last when no steps are left."""

    def __init__(self, env: gym.Env, steps: int, bar: tqdm):
        super().__init__(env)
        self.steps_left, self.bar, self.episodes = steps, bar, []

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        # Observations keep the environment's type, as Minari wants those of its space: readers cast them to float32.
        self.start, self.observations, self.rows = seed, [np.array(obs)], []
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps_left -= 1
        truncated = truncated or (self.steps_left == 0 and not terminated)
        self.observations.append(np.array(obs))
        self.rows.append((np.array(action), np.float32(reward), bool(terminated), bool(truncated)))
        self.bar.update()
        if terminated or truncated:
            keys = ("actions", "rewards", "terminations", "truncations")
            data = {key: np.array(column) for key, column in zip(keys, zip(*self.rows, strict=True), strict=True)}
            self.episodes.append({"seed": self.start, "observations": np.array(self.observations), **data})
        return obs, reward, terminated, truncated, info


class Noise(gym.ActionWrapper):
    """Adds noise to every action as td3.py does in training: in half action ranges, clipped to the range."""

    def __init__(self, env: gym.Env, scale: np.ndarray, sigma: float, rng: np.random.Generator):
        super().__init__(env)
        self.scale, self.sigma, self.rng = scale.reshape(env.action_space.shape), sigma, rng

    def action(self, action: np.ndarray) -> np.ndarray:
        noise = self.sigma * self.rng.standard_normal(action.shape, np.float32)
        return (action + noise * self.scale).astype(action.dtype).clip(self.action_space.low, self.action_space.high)


def roll(policy: Policy, steps: int, args: Args, stream: int, bar: tqdm) -> list[dict]:
    """The episodes of so many steps; each starts from a seed of its own and has a generator of its own."""
    env = recorder = Recorder(policy.make_env(), steps, bar)
    while recorder.steps_left:
        rng = np.random.default_rng([args.seed, stream, len(recorder.episodes)])
        seed = int(rng.integers(2**31))
        if args.sample and policy.script.SCRIPT == "td3":
            scale, _ = policy.script.action_transform(recorder.action_space)
            env = Noise(recorder, scale, args.exploration_noise, rng)
        policy.play(env, seed, rng if args.sample else None)
    recorder.close()
    return recorder.episodes


def random_return(policy: Policy, env: gym.Env, seed: int, rng: np.random.Generator) -> float:
    """The return of one episode of actions drawn uniformly from the whole range."""
    box, total, over = env.action_space, 0.0, False
    with policy.script.or_stop(3, f"{policy.args.env_id} at random play", "Mend the environment."):
        env.reset(seed=seed)
        while not over:
            obs, reward, terminated, truncated, _ = env.step(rng.uniform(box.low, box.high).astype(box.dtype))
            policy.script.require_finite(obs, reward)
            total, over = total + float(reward), terminated or truncated
    return total


def reference_scores(policy: Policy, expert: Policy | None, args: Args) -> dict[str, float]:
    """What Minari normalises returns with, given or measured; nothing without an expert."""
    low, high = args.ref_min_score, args.ref_max_score
    if high is None and expert is None:
        print("warning: no reference scores. Give --expert or --ref-max-score to have them.", file=sys.stderr)
        return {}
    if low is None:
        env, rng = policy.make_env(), np.random.default_rng([args.seed, 0])
        seeds = (int(rng.integers(2**31)) for _ in range(args.ref_episodes))
        low = float(np.mean([random_return(policy, env, seed, rng) for seed in seeds]))
        env.close()
    if high is None:
        env, rng = expert.make_env(), np.random.default_rng([args.seed, 1])
        high = float(np.mean([expert.play(env, int(rng.integers(2**31)), None) for _ in range(args.ref_episodes)]))
        env.close()
    if not low < high:
        refuse(f"the expert's score {high:g} is not above the random one, {low:g}. Give a better --expert.")
    return {"ref_min_score": low, "ref_max_score": high, "num_episodes_average_score": args.ref_episodes}


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def command(args: Args) -> str:
    """The command that makes the dataset again (where it lies left out)."""
    words = ["python", "benchmark/record.py"]
    for field in dataclasses.fields(args):
        value, flag = getattr(args, field.name), f"--{field.name.replace('_', '-')}"
        if field.name == "checkpoint":
            words += [word for path in value for word in (flag, path)]
        elif value != field.default and field.name != "datasets_dir":
            words += [f"--no-{flag[2:]}"] if value is False else [flag, str(value)]
    return shlex.join(words)


def write(args: Args, folder: Path, policies: list[Policy], shares: list[int], episodes: list[dict], scores: dict):
    """Hand the episodes to Minari, with how they were made; an attempt that fails leaves nothing."""
    import minari
    from minari.data_collector.episode_buffer import EpisodeBuffer

    how = "actions sampled" if args.sample else "mode of the policy"
    if args.sample and any(policy.script.SCRIPT == "td3" for policy in policies):
        how += f" (td3.py: noise {args.exploration_noise} of half the action range)"
    parts = ", ".join(f"{share} steps of {policy}" for share, policy in zip(shares, policies, strict=True))
    env = policies[0].make_env()
    simulators = ["gymnasium"] + ["mujoco"] * ("mujoco" in type(env.unwrapped).__module__)
    no_room = policies[0].script.or_stop(3, f"cannot write {folder}", "Make room, then try again.", (OSError,))
    try:
        with no_room, warnings.catch_warnings(action="ignore"):  # that the author has no e-mail address
            dataset = minari.create_dataset_from_buffers(
                args.dataset,
                [EpisodeBuffer(**episode) for episode in episodes],
                env=env,
                eval_env=env.spec,
                algorithm_name=" + ".join(dict.fromkeys(policy.script.SCRIPT for policy in policies)),
                author=args.author,
                code_permalink=f"benchmark/record.py at commit {commit() or 'unknown'}",
                description=f"{policies[0].args.env_id}, {how}: {parts}. Made by: {command(args)}",
                requirements=[f"{name}=={version(name)}" for name in simulators],
                jpeg_encoding=False,
                **scores,
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    env.close()
    returns = [episode["rewards"].sum(dtype=np.float64) for episode in episodes]
    print(
        f"{folder}: {dataset.total_steps} steps in {len(episodes)} episodes, mean return {np.mean(returns):.1f}", scores
    )


def check_dataset(args: Args) -> Path:
    """The folder that the dataset will have, or a refusal, without making anything."""
    try:
        from minari.dataset.minari_dataset import parse_dataset_id
    except ImportError:
        refuse("Minari is not installed. Run `pip install -r benchmark/requirements.txt`.")
    try:
        parse_dataset_id(args.dataset)
    except (ValueError, TypeError):
        refuse(f"--dataset {args.dataset!r} is no dataset id. Write it as (namespace/)name-vN.")
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")
    folder = root / args.dataset
    if folder.exists():
        refuse(f"dataset {args.dataset} exists in {root}. Choose another --dataset, or delete its folder.")
    nearest = next(path for path in folder.absolute().parents if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        refuse(f"cannot write in {root}. Choose another --datasets-dir.")
    return folder


def check(args: Args) -> None:
    """Refuse flags that cannot be, alone or together."""
    if not args.checkpoint:
        refuse("nothing to play. Give --checkpoint, a run folder or a file.")
    if bool(args.dataset) == bool(args.export):
        refuse("one of --dataset and --export is needed. Give either.")
    target = args.export
    if target and (len(args.checkpoint) > 1 or target.exists() or not target.absolute().parent.is_dir()):
        refuse(
            f"--export writes one policy to a new file in an existing folder, not {args.export}. Choose another name."
        )
    limits = {"steps": max(1, len(args.checkpoint)), "seed": 0, "ref_episodes": 1, "exploration_noise": 0}
    limits |= {"ref_min_score": -1e12, "ref_max_score": -1e12}
    for name, low in limits.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= 1e12:
            refuse(f"--{name.replace('_', '-')} {value} is outside [{low:g}, 1e12]. Choose a value inside.")
    if args.expert and args.ref_max_score is not None:
        refuse("--expert and --ref-max-score say the same. Give one of them.")
    if args.ref_min_score is not None and args.ref_max_score is None and not args.expert:
        refuse("--ref-min-score alone normalises nothing. Give --expert or --ref-max-score, too.")


def main(args: Args) -> None:
    check(args)
    if args.datasets_dir:  # before Minari is imported
        os.environ["MINARI_DATASETS_PATH"] = str(args.datasets_dir.absolute())
    folder = check_dataset(args) if args.dataset else None
    policies = [load_policy(path) for path in args.checkpoint]
    if args.export:
        return export(policies[0], args.export)
    expert = load_policy(args.expert) if args.expert else None
    tasks = sorted({policy.args.env_id for policy in (*policies, *([expert] if expert else []))})
    if len(tasks) > 1:
        refuse(f"the checkpoints are of different environments: {', '.join(tasks)}. Give those of one.")
    scores = reference_scores(policies[0], expert, args)
    ends = np.arange(len(policies) + 1) * args.steps // len(policies)
    shares, episodes = np.diff(ends).tolist(), []
    interval = 0.5 if sys.stderr.isatty() else 10
    with tqdm(total=args.steps, unit="step", mininterval=interval, leave=False) as bar:
        for k, (policy, share) in enumerate(zip(policies, shares, strict=True)):
            episodes += roll(policy, share, args, 2 + k, bar)
    return write(args, folder, policies, shares, episodes, scores)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
