"""Train Stable-Baselines3's SAC or TD3 with the hyperparameters of sac.py or td3.py, to compare what is learned.

    python benchmark/sb3.py --algorithm td3 --env-id Pendulum-v1 --total-timesteps 20000 --learning-starts 1000
    python benchmark/run.py --scripts benchmark/sb3.py --name sac --tasks Hopper-v5 --flags "--algorithm sac"

Flags are those of the script; what is not given has the script's default, and the first line that is printed shows
what it became. Evaluation plays the deterministic policy from the same seeds as the script's `evaluate`. The run folder
holds what benchmark/run.py collects; there is no checkpoint, so an interrupted run starts anew.

What remains different. Both: the first update follows one step later; the critics see actions in [-1, 1], not in the
environment's units. SAC: the density is that of the action in [-1, 1], so where the range is another the same target
entropy asks for another policy (Pendulum, range +-2: theirs is 0.69 higher in our units); the log std is clamped to
[-20, 2], not [-5, 2]; the temperature's loss has log(alpha) in place of alpha; the critics' loss is halved, of which
Adam takes no notice. TD3: the first, random actions get the exploration noise, too.
"""

import dataclasses
import importlib
import importlib.metadata
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from common import EVALUATION_RETURN, ROOT, TRAINING_RETURN, commit, refuse, slug, write_json

sys.path.append(str(ROOT))


@dataclass
class Args:
    algorithm: Literal["sac", "td3"] = "sac"
    """Stable-Baselines3's SAC with the flags of sac.py, or its TD3 with those of td3.py."""
    exp_name: str = "sb3"
    """Name of the experiment, part of the run folder's name."""
    seed: int | None = None
    """Seed of everything random; evaluation has generators of its own."""
    device: str | None = None
    """Where the networks live: auto, cpu or cuda."""
    runs_dir: str | None = None
    """Folder in which each run makes its own folder."""
    env_id: str | None = None
    """Gymnasium id, also module:Env-v0."""
    total_timesteps: int | None = None
    """Steps to train."""
    eval_every: int | None = None
    """Steps between two evaluations (one more at step 0 and one at the end); 0 = at the end only."""
    eval_episodes: int | None = None
    """Episodes per evaluation."""
    learning_rate: float | None = None
    """Learning rate of every Adam (sac.py: --policy-lr and --q-lr)."""
    buffer_size: int | None = None
    """Transitions that the replay memory holds."""
    batch_size: int | None = None
    """Transitions per update."""
    learning_starts: int | None = None
    """Steps of uniformly random actions before the first update."""
    hidden_size: int | None = None
    """Width of both hidden layers, in each network."""
    gamma: float | None = None
    """Discount."""
    tau: float | None = None
    """Share of the way that the targets go towards the networks."""
    alpha: float | None = None
    """SAC: initial temperature."""
    autotune: bool | None = None
    """SAC: learn the temperature."""
    target_entropy: float | None = None
    """SAC: entropy at which the temperature is held."""
    policy_frequency: int | None = None
    """TD3: updates of the critics per update of policy and targets."""
    policy_noise: float | None = None
    """TD3: std of the noise on the target's action, in half action ranges."""
    noise_clip: float | None = None
    """TD3: clip range of that noise."""
    exploration_noise: float | None = None
    """TD3: std of the exploration noise, in half action ranges."""


def flags_of_script(args: Args, script: ModuleType):
    """The script's flags: its defaults, and what was given."""
    given = {k: v for k, v in vars(args).items() if v is not None and k != "algorithm"}
    if args.algorithm == "sac" and "learning_rate" in given:  # Stable-Baselines3 has one rate for all
        given["policy_lr"] = given["q_lr"] = given.pop("learning_rate")
    unknown = given.keys() - {field.name for field in dataclasses.fields(script.Args)}
    if args.algorithm == "sac" and "policy_frequency" in given:
        unknown.add("policy_frequency")
    if unknown:
        name = sorted(unknown)[0].replace("_", "-")
        refuse(f"--{name} means nothing to Stable-Baselines3's {args.algorithm.upper()}. Leave it out.")
    return dataclasses.replace(script.Args(), **given)


def hyperparameters(algorithm: str, flags, action_shape: tuple[int, ...]) -> dict:
    """The script's flags in Stable-Baselines3's words. Its actions are [-1, 1] too, so noise has the same unit."""
    from stable_baselines3.common.noise import NormalActionNoise

    same = ("buffer_size", "learning_starts", "batch_size", "gamma", "tau", "seed", "device")
    shared = {name: getattr(flags, name) for name in same}
    shared |= {"train_freq": 1, "gradient_steps": 1, "policy_kwargs": {"net_arch": [flags.hidden_size] * 2}}
    if algorithm == "sac":
        return shared | {
            "learning_rate": flags.policy_lr,
            "ent_coef": f"auto_{flags.alpha}" if flags.autotune else flags.alpha,
            "target_entropy": "auto" if flags.target_entropy is None else flags.target_entropy,
        }
    return shared | {
        "learning_rate": flags.learning_rate,
        "action_noise": NormalActionNoise(np.zeros(action_shape), np.full(action_shape, flags.exploration_noise)),
        "policy_delay": flags.policy_frequency,
        "target_policy_noise": flags.policy_noise,
        "target_noise_clip": flags.noise_clip,
    }


def make_model(algorithm: str, settings: dict, env: gym.Env):
    import stable_baselines3

    print(f"Stable-Baselines3 {stable_baselines3.__version__}, {algorithm.upper()}: {settings}", flush=True)
    return getattr(stable_baselines3, algorithm.upper())("MlpPolicy", env, **settings)


def evaluate(model, env: gym.Env, flags) -> tuple[list[float], list[int]]:
    """Return and length of every episode; episode k starts from the same seed as in the script's `evaluate`."""
    returns, lengths = [0.0] * flags.eval_episodes, [0] * flags.eval_episodes
    for k in range(flags.eval_episodes):
        (obs, _), over = env.reset(seed=(1_000_000 * (flags.seed + 1) + k) % 2**31), False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(model.predict(obs, deterministic=True)[0])
            returns[k], lengths[k], over = returns[k] + float(reward), lengths[k] + 1, terminated or truncated
    return returns, lengths


def config(args: Args, flags, settings: dict) -> dict:
    """What the scripts note, with the hyperparameters in Stable-Baselines3's words."""
    packages = {package.name: package.version for package in importlib.metadata.distributions()}
    asked = {name: vars(flags).get(name, value) for name, value in vars(args).items()}
    plain = {name: x if isinstance(x, int | float | str | dict) else str(x) for name, x in settings.items()}
    return {
        "script": "sb3",
        "flags": asked | plain,
        "versions": packages | {"python": sys.version.split()[0]},
        "commit": commit(),
        "device": torch.cuda.get_device_name() if settings["device"].type == "cuda" else settings["device"].type,
    }


def main(args: Args) -> None:
    script = importlib.import_module(args.algorithm)
    flags = flags_of_script(args, script)
    script.check(flags)
    flags.device = script.choose_device(flags.device)
    from stable_baselines3.common.callbacks import BaseCallback

    train_env, env = (script.make_eval_env(flags, flags.seed) for _ in range(2))
    settings = hyperparameters(args.algorithm, flags, env.action_space.shape)
    model = make_model(args.algorithm, settings, train_env)
    name = f"{slug(flags.env_id)}__{flags.exp_name}__{flags.seed}__{time.time_ns() // 1_000_000}"
    folder = Path(flags.runs_dir, name)
    with script.or_stop(2, f"cannot write in {flags.runs_dir}", "Choose another --runs-dir.", (OSError,)):
        folder.mkdir(parents=True)
    write_json(folder / "config.json", config(args, flags, settings))
    training_returns = []

    with (folder / "metrics.csv").open("w", buffering=1) as metrics:
        metrics.write("step,metric,value\n")

        def log(step: int, kind: str, score: float, length: float) -> None:
            metrics.write(f"{step},{kind},{score!r}\n{step},{kind.replace('return', 'length')},{float(length)!r}\n")

        def evaluation(step: int) -> list[float]:
            returns, lengths = evaluate(model, env, flags)
            log(step, EVALUATION_RETURN, fmean(returns), fmean(lengths))
            return returns

        class Recorder(BaseCallback):
            """Logs every episode as it ends, and evaluates on the way."""

            def _on_step(self) -> bool:
                for episode in (info["episode"] for info in self.locals["infos"] if "episode" in info):
                    log(self.num_timesteps, TRAINING_RETURN, float(episode["r"]), episode["l"])
                    training_returns.append(float(episode["r"]))
                step = self.num_timesteps
                if script.crossed(step - 1, step, flags.eval_every) and step < flags.total_timesteps:
                    evaluation(step)
                return True

        started = time.perf_counter()
        if flags.eval_every:
            evaluation(0)
        model.learn(flags.total_timesteps, callback=Recorder())
        wall, final = time.perf_counter() - started, evaluation(flags.total_timesteps)
    summary = {"steps": flags.total_timesteps, "wall_seconds": wall, "steps_per_second": flags.total_timesteps / wall}
    last = fmean(training_returns[-100:]) if training_returns else None
    write_json(folder / "summary.json", summary | {"last_training_return": last, "final_evaluation": final})
    print(f"{folder}\nevaluation at step {flags.total_timesteps}: {np.mean(final):.1f} +- {np.std(final):.1f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
