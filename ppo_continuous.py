# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]>=1.4,<2",
#     "moviepy>=2.1",
#     "mujoco>=4.0,<5",
#     "mujoco-core>=4.0,<5",
#     "numpy>=2.0",
#     "tensorboard>=2.18",
#     "torch>=2.11,<3",
#     "tqdm>=4.66",
#     "tyro>=1.0,<2",
#     "wandb>=0.19",
# ]
# ///
"""Proximal Policy Optimization (PPO) for continuous actions.

PPO collects a short rollout with the current policy, then improves the policy on it for a few epochs while the
probability ratio between new and old policy is kept from moving far (clip) or is pulled back (KL penalty).
    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv:1707.06347
    Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv:1506.02438

    ratio   = pi(a|s) / pi_old(a|s)
    L_pi    = -mean(min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A))  (penalty: -mean(ratio * A) + beta * KL)
    L_V     = 0.5 * mean((V(s) - R)^2)
    delta_t = r_t + gamma * (1 - terminated_t) * V(s_{t+1}) - V(s_t)
    A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1},   R_t = A_t + V(s_t)

Run:
    python ppo_continuous.py                                            # HalfCheetah-v5, one million steps
    python ppo_continuous.py --env-id Hopper-v5 --seed 3 --capture-video
    python ppo_continuous.py --resume runs/HalfCheetah-v5__ppo_continuous__1__1700000000

Expect: see the results table of docs/ppo_continuous.md (five MuJoCo tasks, three seeds, one CPU thread).

Differs from the paper (most are the customary details of PPO implementations; docs/ppo_continuous.md has the reasons):
    1. Observations are normalised by running statistics and clipped; rewards are divided by the running std of the
       discounted return and clipped.
    2. The value loss is clipped like the policy's (--no-clip-vloss for the paper's), with its own --vf-clip-coef.
    3. Advantages are normalised per minibatch; the gradient norm is clipped; orthogonal initialisation; Adam eps 1e-5.
    4. A time limit is no death: the value of the true last observation is bootstrapped there.
    5. The policy lives in units in which a bounded action range is [-1, 1]; the sample is clipped for the environment
       only, and its log-probability is that of the unclipped sample.
    6. After --resume the environments start new episodes (their inner state is not saved); all else continues.

Read `main` first, then "The math".
"""

import contextlib
import csv
import dataclasses
import importlib.metadata
import json
import math
import os
import pickle
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
FORMAT_VERSION = 1


@dataclass
class Args:
    # Run
    exp_name: str = SCRIPT
    """name of the experiment, part of the run folder's name"""
    seed: int = 1
    """seed of everything random; evaluation has generators of its own"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where the networks live; auto takes CUDA when there is one, never mps"""
    torch_deterministic: bool = True
    """use deterministic PyTorch kernels where there is a choice"""
    compile: bool = False
    """torch.compile the update (CUDA graphs on CUDA); needs a C++ compiler on the CPU"""
    runs_dir: str = "runs"
    """folder in which each run makes its own folder"""
    track: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "rl-scripts"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team or user"""
    capture_video: bool = False
    """record the first episode of each evaluation into the run's videos/"""
    log_every: int = 2048
    """steps between two rows of losses (episodes are always logged)"""
    eval_every: int = 100_000
    """steps between two evaluations (one more at step 0 and one at the end); 0 = at the end only"""
    eval_episodes: int = 10
    """episodes per evaluation"""
    checkpoint_every: int = 100_000
    """steps between two checkpoints (one more at the end); 0 = at the end only"""
    keep_checkpoints: int = 1
    """checkpoints to keep: the newest is checkpoint.pt, with more than 1 also checkpoint_STEP.pt"""
    max_skipped_updates: int = 10
    """stop when this many updates in a row were skipped because loss or gradient was not finite"""
    resume: str | None = None
    """continue the run of this checkpoint file or run folder, with its flags, in its folder"""
    evaluate: str | None = None
    """no training: evaluate this checkpoint file or run folder and print the returns"""

    # Environment
    env_id: str = "HalfCheetah-v5"
    """gymnasium id, also module:Env-v0"""
    num_envs: int = 1
    """environments stepped side by side"""
    total_timesteps: int = 1_000_000
    """budget: agent steps, summed over environments (rounded down to whole rollouts)"""

    # Algorithm
    learning_rate: float = 3e-4
    """learning rate of Adam"""
    anneal_lr: bool = True
    """lower the learning rate linearly; the last update still has 1/iterations of it"""
    adam_eps: float = 1e-5
    """epsilon of Adam"""
    num_steps: int = 2048
    """rollout length per environment"""
    gamma: float = 0.99
    """discount (gamma)"""
    gae_lambda: float = 0.95
    """exponent of generalized advantage estimation (lambda)"""
    num_minibatches: int = 32
    """minibatches per epoch; sizes differ by at most one"""
    update_epochs: int = 10
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise advantages to mean 0, std 1 in each minibatch"""
    clip_coef: float = 0.2
    """clip range of the probability ratio (epsilon)"""
    clip_vloss: bool = True
    """clip the value's change, too"""
    vf_clip_coef: float = 0.2
    """clip range of the value's change, in units of the (scaled) return"""
    ent_coef: float = 0.0
    """coefficient of the entropy bonus"""
    ent_coef_end: float | None = None
    """entropy coefficient at the end of training, reached linearly; None = constant"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """clip range of the global gradient norm"""
    target_kl: float | None = None
    """end the epochs of a rollout after one whose mean approx_kl is above this; with --kl-penalty the KL aimed at"""
    kl_penalty: bool = False
    """PPO-Penalty: unclipped surrogate plus an adaptive multiple of KL(old, new); aims at --target-kl (None = 0.01)"""
    kl_coef: float = 1.0
    """initial coefficient of the KL penalty (beta)"""
    norm_obs: bool = True
    """normalise observations by their running mean and std"""
    clip_obs: float = 5.0
    """clip range of normalised observations"""
    norm_reward: bool = True
    """divide rewards by the running std of the discounted return"""
    clip_reward: float = 10.0
    """clip range of scaled rewards"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


# ---------------------------------------------------------------------------------------------------------------------
# Environment
# ---------------------------------------------------------------------------------------------------------------------
def make_envs(args: Args, num_envs: int, seed: int) -> gym.vector.VectorEnv:
    """The training environments: a vector environment in SAME_STEP autoreset. Replace it to train on anything else."""
    prepare_mujoco()
    envs = gym.make_vec(
        args.env_id,
        num_envs=num_envs,
        vectorization_mode="sync",
        # copy=False: step() writes into the array that it returned before, which has been used by then.
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP, "copy": False},
        # An environment may reuse one observation array; without the copy its final observation would show the reset's.
        wrappers=[lambda env: gym.wrappers.TransformObservation(env, np.copy, env.observation_space)],
    )
    envs.action_space.seed(seed)
    return envs


def make_eval_env(args: Args, seed: int, render_mode: str | None = None) -> gym.Env:
    """One environment for evaluation and videos, apart from the training environments."""
    prepare_mujoco()
    env = gym.make(args.env_id, render_mode=render_mode)
    env.action_space.seed(seed)
    return env


def prepare_mujoco() -> None:
    """Render through EGL without a display; keep MuJoCo's warnings out of a MUJOCO_LOG.TXT in the user's folder."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    with contextlib.suppress(ImportError):
        import mujoco

        # gymnasium's own HalfCheetah model triggers the settotalmass notice at every construction.
        mujoco.set_mju_user_warning(lambda text: None if "settotalmass" in text else warnings.warn(text, stacklevel=1))


def action_transform(space: gym.spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """(scale, shift), both flat: policy units to the environment's, [-1, 1] to [low, high] where both are finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        width = space.high.ravel() - space.low.ravel()  # infinite too for a range as wide as the type
    bounded = np.isfinite(width)
    center = np.where(bounded, space.low.ravel() / 2 + space.high.ravel() / 2, 0)
    return np.where(bounded, width / 2, 1).astype(space.dtype), center.astype(space.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------------------------------------------
def layer_init(layer: nn.Linear, std: float = math.sqrt(2)) -> nn.Linear:
    """Orthogonal weights of gain `std`, zero bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, last_std: float, hidden: int = 64) -> nn.Sequential:
    return nn.Sequential(
        layer_init(nn.Linear(inputs, hidden)),
        nn.Tanh(),
        layer_init(nn.Linear(hidden, hidden)),
        nn.Tanh(),
        layer_init(nn.Linear(hidden, outputs), last_std),
    )


class Actor(nn.Module):
    """Diagonal Gaussian policy: the mean depends on the observation, the log std does not."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.mean = mlp(obs_dim, action_dim, last_std=0.01)  # small: the first actions are the noise's
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """(..., obs_dim) -> mean (..., action_dim), log_std (action_dim,)"""
        return self.mean(obs), self.log_std


class Critic(nn.Module):
    def __init__(self, obs_dim: int):
        super().__init__()
        self.value = mlp(obs_dim, 1, last_std=1.0)

    def forward(self, obs: Tensor) -> Tensor:
        """(..., obs_dim) -> (...)"""
        return self.value(obs).squeeze(-1)


def numpy_policy(network: nn.Sequential):
    """A NumPy copy of the network as it is now: for one observation at a time PyTorch takes three times as long."""
    layers = []
    for module in network:
        if isinstance(module, nn.Linear):
            weight, bias = (p.detach().cpu().numpy().copy() for p in (module.weight.T, module.bias))
            layers.append(lambda x, weight=weight, bias=bias: x @ weight + bias)
        elif isinstance(module, nn.Tanh):
            layers.append(np.tanh)
        else:
            raise TypeError(f"numpy_policy knows no {type(module).__name__}: add it here")

    def forward(x: np.ndarray) -> np.ndarray:
        for layer in layers:
            x = layer(x)
        return x

    return forward


# ---------------------------------------------------------------------------------------------------------------------
# Memory: running statistics (the rollout itself is a few arrays in main)
# ---------------------------------------------------------------------------------------------------------------------
class RunningMeanStd:
    """Mean and population variance of all rows seen so far, in float64 (Chan et al.'s update: exact for any split)."""

    def __init__(self, shape: tuple[int, ...] = ()):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 0

    def update(self, x: np.ndarray | Tensor) -> None:
        """Count every row of x, (..., *shape)."""
        x = x.detach().cpu().numpy() if isinstance(x, Tensor) else x
        x = np.asarray(x, dtype=np.float64).reshape(-1, *self.mean.shape)
        count, batch_mean = len(x), np.add.reduce(x, 0) / len(x)
        total, delta, deviation = self.count + count, batch_mean - self.mean, x - batch_mean
        squares = np.add.reduce(deviation * deviation, 0) + delta * delta * (self.count * count / total)
        self.var = (self.var * self.count + squares) / total
        self.mean = self.mean + delta * (count / total)
        self.count = total

    def normalize(self, x: np.ndarray | Tensor, clip: float | None = None) -> np.ndarray | Tensor:
        """(x - mean) / sqrt(var + 1e-8), clipped to +-clip; x itself before the first update."""
        std = np.sqrt(self.var + 1e-8) if self.count else self.var
        if isinstance(x, Tensor):
            mean, std = (torch.as_tensor(s, device=x.device) for s in (self.mean, std))
            y = ((x - mean) / std).to(torch.promote_types(x.dtype, torch.float32))
            return y if clip is None else y.clamp(-clip, clip)
        y = ((x - self.mean) / std).astype(np.result_type(x, np.float32))
        return y if clip is None else y.clip(-clip, clip)

    def state_dict(self) -> dict:
        return {"mean": torch.tensor(self.mean), "var": torch.tensor(self.var), "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.mean, self.var, self.count = state["mean"].numpy(), state["var"].numpy(), state["count"]


class RewardScaler:
    """Divides rewards by the std of the discounted return so far. No mean is taken off: that would change the task."""

    def __init__(self, num_envs: int, gamma: float):
        self.gamma, self.returns, self.rms = gamma, np.zeros(num_envs), RunningMeanStd()

    def update(self, rewards: np.ndarray, dones: np.ndarray) -> np.ndarray:
        """Scaled rewards, (N,). The return of a step that ends an episode counts in full and then starts at zero."""
        self.returns = self.returns * self.gamma + rewards
        self.rms.update(self.returns)
        self.returns[dones] = 0
        return rewards / np.sqrt(self.rms.var + 1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# The math
# ---------------------------------------------------------------------------------------------------------------------
def compute_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminations: Tensor,
    dones: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, arXiv:1506.02438 eq. 16. All (T, N); returns (advantages, returns).

    delta_t = r_t + gamma * V(s_{t+1}) - V(s_t), without V(s_{t+1}) where the episode terminated.
    A_t = delta_t + gamma * lambda * A_{t+1}, cut where the episode ended for any reason (dones).
    next_values[t] is V of the observation that step t led to: at a truncation the episode's last, not the reset's.
    """
    next_values = next_values.masked_fill(terminations.bool(), 0)
    deltas = rewards + gamma * next_values - values  # (T, N)
    decays = gamma * gae_lambda * (1 - dones.to(values.dtype))  # (T, N)
    advantage, advantages = torch.zeros_like(values[0]), []
    for delta, decay in zip(reversed(deltas.unbind()), reversed(decays.unbind()), strict=True):
        advantage = delta + decay * advantage  # (N,)
        advantages.append(advantage)
    advantages = torch.stack(advantages[::-1])
    return advantages, advantages + values


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log N(a; mean, std), summed over dimensions: (..., D) -> (...)."""
    z = (actions - mean) * torch.exp(-log_std)
    return -0.5 * z.square().sum(-1) - (log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """sum(log std + 0.5 log(2 pi e)): (..., D) -> (...)."""
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def gaussian_kl(mean: Tensor, log_std: Tensor, new_mean: Tensor, new_log_std: Tensor) -> Tensor:
    """KL(N(mean, std) || N(new_mean, new_std)) of diagonal Gaussians: (..., D) -> (...)."""
    variance_ratio = torch.exp(2 * (log_std - new_log_std))
    shift = ((mean - new_mean) * torch.exp(-new_log_std)).square()
    return (new_log_std - log_std + 0.5 * (variance_ratio + shift - 1)).sum(-1)


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_coef: float | None) -> Tensor:
    """Clipped surrogate, arXiv:1707.06347 eq. 7, as a loss: -mean(min(ratio * A, clip(ratio) * A)); None = eq. 6."""
    ratio = torch.exp(logprobs - old_logprobs)  # (B,)
    if clip_coef is None:
        return -(ratio * advantages).mean()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    """0.5 * mean((V - R)^2); with a clip the larger of that and the error of V_old + clip(V - V_old). All (B,)."""
    errors = (values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns).square())
    return 0.5 * errors.mean()


def normalize_advantages(advantages: Tensor) -> Tensor:
    """To mean 0 and (sample) std 1: (B,) -> (B,)."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def approx_kl(logratio: Tensor) -> Tensor:
    """Estimate of KL(old, new) from actions of the old policy: mean(ratio - 1 - log ratio), never negative ("k3")."""
    return (torch.expm1(logratio) - logratio).mean()


def clip_fraction(logratio: Tensor, clip_coef: float) -> Tensor:
    """Share of samples whose ratio has left [1 - clip_coef, 1 + clip_coef]."""
    return (torch.expm1(logratio).abs() > clip_coef).float().mean()


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R): 1 is perfect, 0 no better than a constant; nan where the returns do not vary."""
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - (returns - values).var(correction=0) / variance, torch.nan)


def adapt_kl_coef(kl_coef: float, kl: float, target_kl: float) -> float:
    """PPO-Penalty's rule, arXiv:1707.06347 section 4: double beta above 1.5 * target, halve it below target / 1.5."""
    if kl > 1.5 * target_kl:
        return kl_coef * 2
    return kl_coef / 2 if kl < target_kl / 1.5 else kl_coef


def anneal(start: float, end: float, iteration: int, num_iterations: int) -> float:
    """Linear from start (iteration 1) towards end, which the iteration after the last would reach."""
    return start + (end - start) * (iteration - 1) / num_iterations


# ---------------------------------------------------------------------------------------------------------------------
# Update
# ---------------------------------------------------------------------------------------------------------------------
def update(
    actor: Actor,
    critic: Critic,
    optimizer: torch.optim.Adam,
    minibatch: tuple[Tensor, ...],
    old_log_std: Tensor,
    ent_coef: Tensor,
    kl_coef: Tensor,
    args: Args,
) -> dict[str, Tensor]:
    """One gradient step on one minibatch. Returns detached scalars and never waits for the GPU."""
    obs, actions, old_mean, old_logprobs, advantages, returns, old_values = minibatch  # (B, ...)
    mean, log_std = actor(obs)
    logprobs = gaussian_log_prob(actions, mean, log_std)
    if args.norm_adv:
        advantages = normalize_advantages(advantages)
    pg_loss = policy_loss(logprobs, old_logprobs, advantages, None if args.kl_penalty else args.clip_coef)
    v_loss = value_loss(critic(obs), old_values, returns, args.vf_clip_coef if args.clip_vloss else None)
    entropy = gaussian_entropy(log_std)
    loss = pg_loss + args.vf_coef * v_loss - ent_coef * entropy
    if args.kl_penalty:
        loss = loss + kl_coef * gaussian_kl(old_mean, old_log_std, mean, log_std).mean()

    logratio = (logprobs - old_logprobs).detach()
    stats = {
        "losses/policy_loss": pg_loss.detach(),
        "losses/value_loss": v_loss.detach(),
        "losses/entropy": entropy.detach(),
        "losses/old_approx_kl": -logratio.mean(),
        "losses/approx_kl": approx_kl(logratio),
        "losses/clipfrac": clip_fraction(logratio, args.clip_coef),
    }
    stats["losses/grad_norm"], stats["skipped"] = gradient_step(loss, optimizer, args.max_grad_norm)
    return stats


@torch.compiler.disable  # backward is compiled with the forward pass; tracing through fused Adam only costs time
def gradient_step(loss: Tensor, optimizer: torch.optim.Adam, max_grad_norm: float) -> tuple[Tensor, Tensor]:
    """Backward, clip, step. Returns (gradient norm before clipping, 1 if the step was skipped or 0).

    A loss or gradient that is not finite changes nothing: fused Adam skips the step by itself when told so.
    """
    optimizer.zero_grad()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_grad_norm)
    optimizer.found_inf = 1 - torch.isfinite(loss.detach() + grad_norm).float()
    optimizer.step()
    return grad_norm, optimizer.found_inf


# ---------------------------------------------------------------------------------------------------------------------
# Evaluate
# ---------------------------------------------------------------------------------------------------------------------
def evaluate(
    args: Args, actor: Actor, obs_rms: RunningMeanStd, videos: Path | None = None, prefix: str = "eval"
) -> tuple[list[float], list[int]]:
    """Play `--eval-episodes` with the mean action and frozen statistics; returns each episode's return and length.

    Episode k starts from the same seed in every evaluation. With a videos folder the first episode is recorded.
    """
    env = make_eval_env(args, args.seed, "rgb_array" if videos else None)
    if videos:
        env = gym.wrappers.RecordVideo(env, str(videos), lambda k: k == 0, name_prefix=prefix, disable_logger=True)
    space, policy, (scale, shift) = env.action_space, numpy_policy(actor.mean), action_transform(env.action_space)
    returns, lengths = [], []
    for episode in range(args.eval_episodes):
        obs, _ = env.reset(seed=1_000_000 * (args.seed + 1) + episode)
        episode_return, length, done = 0.0, 0, False
        while not done:
            normalized = obs_rms.normalize(np.ravel(obs), args.clip_obs) if args.norm_obs else np.ravel(obs)
            action = policy(normalized.astype(np.float32)) * scale + shift
            action = action.reshape(space.shape).clip(space.low, space.high)
            obs, reward, terminated, truncated, _ = env.step(action)
            episode_return, length, done = episode_return + float(reward), length + 1, terminated or truncated
        returns.append(episode_return)
        lengths.append(length)
    env.close()
    return returns, lengths


def summarize(returns: list[float], lengths: list[int]) -> dict[str, float]:
    """The `eval/*` metrics of one evaluation."""
    return {
        "eval/episodic_return": float(np.mean(returns)),
        "eval/episodic_return_std": float(np.std(returns)),
        "eval/episodic_length": float(np.mean(lengths)),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing
# ---------------------------------------------------------------------------------------------------------------------
def stop(code: int, message: str) -> NoReturn:
    """Exit with one line on stderr. 2: refused before anything was written; 3: stopped in training."""
    print(f"error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if (name == "cuda" and not torch.cuda.is_available()) or (name == "mps" and not torch.backends.mps.is_available()):
        stop(2, f"--device {name}: PyTorch finds no such device. Use --device cpu, or install a PyTorch built for it.")
    return torch.device(name)


def seed_everything(seed: int, deterministic: bool) -> np.random.Generator:
    """Seed the global generators (used while networks are made) and return the one that training draws from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    return np.random.default_rng(seed)


def check_ranges(args, ranges: dict[str, tuple[float, float]]) -> None:
    """Refuse a flag outside its closed range (a nan is outside every range); None passes."""
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            stop(2, f"--{name.replace('_', '-')} {value} is outside [{low}, {high}]. Choose a value inside.")


def check_writable(folder: str) -> None:
    """Refuse a folder that could not be made or written, without making it."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    if not path.is_dir() or not os.access(path, os.W_OK):
        stop(2, f"--runs-dir {folder}: {path} is no folder that can be written. Choose another --runs-dir.")


def describe_run(args, device: torch.device) -> dict:
    """What config.json holds: flags, versions of Python and of every imported package, device, git commit."""
    owners = importlib.metadata.packages_distributions()
    packages = sorted({name for module in {m.split(".")[0] for m in sys.modules} for name in owners.get(module, [])})
    git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        commit = None  # git is not installed
    return {
        "script": SCRIPT,
        "flags": dataclasses.asdict(args),
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{device.type} {platform.machine()}",
        "commit": commit,
    }


def new_run_dir(args) -> Path:
    name = f"{args.env_id}__{args.exp_name}__{args.seed}".replace("/", "-")
    second = int(time.time())
    while (run_dir := Path(args.runs_dir) / f"{name}__{second}").exists():
        second += 1
    run_dir.mkdir(parents=True)
    return run_dir


class Logger:
    """Writes metrics to metrics.csv (step,metric,value), TensorBoard and, with --track, Weights & Biases."""

    def __init__(self, run_dir: Path, args, config: dict, resume_step: int | None = None):
        path, rows = run_dir / "metrics.csv", [["step", "metric", "value"]]
        if resume_step is not None and path.exists():  # cut what was logged after the checkpoint
            with open(path, newline="") as file:
                logged = [row for row in csv.reader(file) if len(row) == 3 and row[0].isdigit()]
            rows += [row for row in logged if int(row[0]) <= resume_step]
        write_whole(path, "".join(",".join(row) + "\n" for row in rows).encode())
        write_whole(run_dir / "config.json", json.dumps(config, indent=2).encode())
        self.file = open(path, "a")  # noqa: SIM115
        self.tensorboard = SummaryWriter(run_dir, purge_step=None if resume_step is None else resume_step + 1)
        self.wandb = None
        if args.track:
            import wandb

            self.wandb = wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                id=run_dir.name.replace(":", "-")[-128:],
                name=run_dir.name,
                config=config,
                dir=run_dir,
                resume="allow",
            )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.file.write(f"{step},{name},{float(value)!r}\n")
            self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log({**metrics, "global_step": step})

    def flush(self) -> None:
        self.file.flush()
        self.tensorboard.flush()

    def log_videos(self, videos: Path, prefix: str) -> None:
        """wandb does not find gymnasium's videos by itself."""
        if self.wandb:
            import wandb

            for path in sorted(videos.glob(f"{prefix}*.mp4")):
                self.wandb.log({"videos": wandb.Video(str(path), format="mp4")})

    def close(self) -> None:
        self.file.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def write_whole(path: Path, content: bytes | dict) -> None:
    """Replace a file in one step (a dict through torch.save): a kill leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file) if isinstance(content, dict) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        stop(3, f"cannot write {path}: {error}. The file that was there before is whole; make room, then --resume.")


def save_checkpoint(run_dir: Path, state: dict, step: int, keep: int) -> None:
    write_whole(run_dir / "checkpoint.pt", state)
    if keep > 1:
        shutil.copyfile(run_dir / "checkpoint.pt", run_dir / f"checkpoint_{step}.pt")
        old = sorted(run_dir.glob("checkpoint_*.pt"), key=lambda path: int(path.stem.split("_")[1]))
        for path in old[:-keep]:
            path.unlink()


def load_checkpoint(path: str) -> tuple[dict, Path]:
    """A checkpoint of this script from a file or a run folder, and the run folder. Refuses anything else."""
    file = Path(path) / "checkpoint.pt" if Path(path).is_dir() else Path(path)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        stop(2, f"no checkpoint at {file}. Give a checkpoint file or the folder of a run that has saved one.")
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        what = f"{file} is no checkpoint that can be read ({type(error).__name__})"
        stop(2, f"{what}. Give a checkpoint.pt of {SCRIPT}.py.")
    if not isinstance(state, dict) or "script" not in state:
        stop(2, f"{file} is no checkpoint of these scripts. Give a checkpoint.pt of {SCRIPT}.py.")
    if state["script"] != SCRIPT:
        stop(2, f"{file} is a checkpoint of {state['script']}.py. Use that script, or a checkpoint of {SCRIPT}.py.")
    if state.get("format_version") != FORMAT_VERSION:
        stop(2, f"{file} has format {state.get('format_version')}, not {FORMAT_VERSION}. Use the script that wrote it.")
    return state, file.parent


def restore_args(args, flags: dict, changeable: set[str]):
    """The flags of a checkpoint, with those changed that were given and may be; others that differ are refused.

    A flag counts as given when it differs from its default.
    """
    restored = {}
    for field in dataclasses.fields(args):
        given, saved = getattr(args, field.name), flags.get(field.name, field.default)
        is_given = given != field.default
        if is_given and given != saved and field.name not in changeable:
            flag = field.name.replace("_", "-")
            what = f"--{flag} {given} conflicts with the checkpoint's {saved}"
            stop(2, f"{what}. Leave --{flag} out, or start a new run.")
        restored[field.name] = given if is_given and field.name in changeable else saved
    return type(args)(**restored)


@contextlib.contextmanager
def catch_signals():
    """Collect SIGINT and SIGTERM in a list that the training loop looks at; a second one quits at once."""
    caught = []

    def handler(signum, frame):
        if caught:
            raise SystemExit(128 + signum)
        caught.append(signum)
        print("\nstopping after this iteration (once more to quit at once)", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    old = {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for signum, previous in old.items():
            signal.signal(signum, previous)


def crossed(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]; never for 0."""
    return every > 0 and before // every < after // every


# ---------------------------------------------------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------------------------------------------------
# What may differ from the checkpoint's flags under --resume and --evaluate: budget, device and logging.
CHANGEABLE = set(
    "total_timesteps device compile track wandb_project_name wandb_entity capture_video log_every eval_every "
    "eval_episodes checkpoint_every keep_checkpoints resume evaluate".split()
)


EPISODE_METRICS = ("charts/episodic_return", "charts/episodic_length")  # have a row per episode, at its own step


def check(args: Args) -> None:
    """Refuse, with exit code 2 and before anything is written, whatever can be known to be wrong before training."""
    at_least_one = "num_envs total_timesteps num_steps num_minibatches update_epochs eval_episodes keep_checkpoints"
    positive = "clip_coef vf_clip_coef clip_obs clip_reward target_kl learning_rate adam_eps max_grad_norm"
    ranges = {
        **dict.fromkeys(f"{at_least_one} max_skipped_updates".split(), (1, 2**40)),
        **dict.fromkeys(positive.split(), (1e-12, 1e12)),
        **dict.fromkeys("log_every eval_every checkpoint_every".split(), (0, 2**40)),
        **dict.fromkeys("ent_coef ent_coef_end vf_coef kl_coef".split(), (0, 1e12)),
        **dict.fromkeys("gamma gae_lambda".split(), (0, 1)),
        "seed": (0, 2**31 - 1),
    }
    check_ranges(args, ranges)
    if args.total_timesteps < args.batch_size:
        what = f"--total-timesteps {args.total_timesteps} is less than one rollout of {args.batch_size} steps"
        stop(2, f"{what} (--num-envs times --num-steps). Raise it, or lower --num-steps.")
    smallest = args.batch_size // args.num_minibatches
    if smallest < 1 or (smallest == 1 and args.norm_adv):
        what = f"--num-minibatches {args.num_minibatches} leaves {smallest} of {args.batch_size} samples in a minibatch"
        stop(2, f"{what}. Lower it (--norm-adv needs two samples, --no-norm-adv one).")
    check_writable(args.runs_dir)
    choose_device(args.device)
    try:
        envs = make_envs(args, 1, args.seed)
    except Exception as error:
        what = f"cannot make --env-id {args.env_id}: {type(error).__name__}: {error}"
        stop(2, f"{what}. Choose an id that gymnasium knows, or module:Env-v0 for a module that registers it.")
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    mode = envs.metadata.get("autoreset_mode", AutoresetMode.SAME_STEP)
    envs.close()
    if not isinstance(action_space, gym.spaces.Box) or action_space.dtype.kind != "f":
        what = f"{args.env_id} has action space {action_space}, this script needs a Box of floats"
        stop(2, f"{what}. Use dqn.py or ppo_atari.py for discrete actions, or wrap the environment.")
    if not isinstance(observation_space, gym.spaces.Box):
        what = f"{args.env_id} has observation space {observation_space}, this script needs a Box"
        stop(2, f"{what}. Wrap the environment in gymnasium.wrappers.FlattenObservation.")
    if len(observation_space.shape) == 3 and observation_space.dtype == np.uint8:
        stop(2, f"{args.env_id} observes images, this script has no convolutions. See ppo_atari.py.")
    if mode != AutoresetMode.SAME_STEP:
        stop(2, f"make_envs resets in {mode}. Pass autoreset_mode=AutoresetMode.SAME_STEP.")
    if args.capture_video:
        try:
            import moviepy  # noqa: F401

            env = make_eval_env(args, args.seed, "rgb_array")
            env.reset(seed=args.seed)
            env.render()
            env.close()
        except Exception as error:
            what = f"--capture-video cannot render {args.env_id}: {type(error).__name__}: {error}"
            stop(2, f"{what}. Install moviepy and EGL (Debian: libegl1), set MUJOCO_GL=osmesa, or leave the flag out.")


def main(args: Args) -> dict[str, float]:
    """Train (or, with --evaluate, only evaluate) and return the last value of every metric."""
    checkpoint, run_dir = None, None
    if args.resume and args.evaluate:
        stop(2, "--resume and --evaluate exclude each other. Give one of them.")
    if args.resume or args.evaluate:
        checkpoint, run_dir = load_checkpoint(args.resume or args.evaluate)
        args = restore_args(args, checkpoint["flags"], CHANGEABLE | ({"seed"} if args.evaluate else set()))
    check(args)
    device = choose_device(args.device)
    rng = seed_everything(args.seed, args.torch_deterministic)

    envs = make_envs(args, args.num_envs, args.seed)
    space = envs.single_action_space
    obs_dim, action_dim = math.prod(envs.single_observation_space.shape), math.prod(space.shape)
    scale, shift = action_transform(space)
    actor, critic = Actor(obs_dim, action_dim).to(device), Critic(obs_dim).to(device)
    learning_rate = torch.tensor(args.learning_rate)  # a tensor, so that a compiled update sees it change
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate, eps=args.adam_eps, fused=True)
    obs_rms, reward_scaler = RunningMeanStd((obs_dim,)), RewardScaler(args.num_envs, args.gamma)
    recent_returns = deque(maxlen=100)
    iteration, global_step, skipped_updates, kl_coef = 0, 0, 0, args.kl_coef
    seconds = {"environment": 0.0, "update": 0.0, "wall": 0.0}

    if checkpoint:
        try:
            for name, part in (("actor", actor), ("critic", critic), ("optimizer", optimizer)):
                part.load_state_dict(checkpoint[name])
            obs_rms.load_state_dict(checkpoint["obs_rms"])
            reward_scaler.rms.load_state_dict(checkpoint["reward_rms"])
            rng.bit_generator.state = checkpoint["rng"]
            iteration, global_step = checkpoint["iteration"], checkpoint["global_step"]
            skipped_updates, kl_coef = checkpoint["skipped_updates"], checkpoint["kl_coef"]
            recent_returns.extend(checkpoint["recent_returns"])
            seconds.update(checkpoint["seconds"])
        except (KeyError, RuntimeError, ValueError, AttributeError) as error:
            what = f"the checkpoint in {run_dir} does not fit {args.env_id}: {error!r:.200}"
            stop(2, f"{what}. Use the environment it was trained on.")
        optimizer.param_groups[0]["lr"] = learning_rate

    if args.evaluate:
        envs.close()
        videos, prefix = run_dir / "videos" if args.capture_video else None, f"evaluate_{int(time.time())}"
        returns, lengths = evaluate(args, actor, obs_rms, videos, prefix)
        print("returns:", " ".join(f"{r:.2f}" for r in returns))
        print(f"mean {np.mean(returns):.2f} +- {np.std(returns):.2f} over {len(returns)} episodes of {args.env_id}")
        return summarize(returns, lengths)

    if run_dir is None:
        run_dir = new_run_dir(args)
    videos = run_dir / "videos" if args.capture_video else None
    logger = Logger(run_dir, args, describe_run(args, device), global_step if checkpoint else None)
    resume_command = f"python {os.path.relpath(__file__)} --resume {shlex.quote(str(run_dir))}"
    step_update = update
    if args.compile:
        step_update = torch.compile(update, mode="reduce-overhead" if device.type == "cuda" else None)
    print(f"{args.env_id}: {args.num_iterations} iterations of {args.batch_size} steps on {device}, in {run_dir}")

    # One rollout, (T, N, ...). Only the policy's mean is needed while acting; values and log-probabilities of the
    # whole rollout are computed afterwards in one pass of each network.
    shape = (args.num_steps, args.num_envs)
    observations = np.zeros((*shape, obs_dim), dtype=np.float32)
    actions = np.zeros((*shape, action_dim), dtype=np.float32)
    raw_rewards, rewards = np.zeros(shape), np.zeros(shape, dtype=np.float32)
    terminations, truncations = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    obs_clip = args.clip_obs if args.norm_obs else None

    def normalize(raw: np.ndarray) -> np.ndarray:
        return obs_rms.normalize(raw.reshape(-1, obs_dim), obs_clip).astype(np.float32)

    def to_device(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(device)

    def save() -> None:
        logger.flush()
        state = {
            "format_version": FORMAT_VERSION,
            "script": SCRIPT,
            "flags": dataclasses.asdict(args) | {"resume": None, "evaluate": None},
            "iteration": iteration,
            "global_step": global_step,
            "skipped_updates": skipped_updates,
            "kl_coef": kl_coef,
            "seconds": dict(seconds),
            "recent_returns": list(recent_returns),
            "actor": actor.state_dict(),
            "critic": critic.state_dict(),
            "optimizer": optimizer.state_dict(),
            "obs_rms": obs_rms.state_dict(),
            "reward_rms": reward_scaler.rms.state_dict(),
            "rng": rng.bit_generator.state,
        }
        save_checkpoint(run_dir, state, global_step, args.keep_checkpoints)

    def run_evaluation() -> list[float]:
        returns, lengths = evaluate(args, actor, obs_rms, videos, f"step_{global_step}")
        metrics.update(summarize(returns, lengths))
        logger.log(global_step, summarize(returns, lengths))
        logger.log_videos(run_dir / "videos", f"step_{global_step}")
        return returns

    metrics: dict[str, float] = {}
    skipped_in_row = 0
    started = time.perf_counter() - seconds["wall"]
    bar = {"unit": "step", "unit_scale": True, "mininterval": 0.5 if sys.stderr.isatty() else 10}
    with catch_signals() as caught, tqdm(total=args.total_timesteps, initial=global_step, **bar) as progress:
        if args.eval_every and not checkpoint:
            run_evaluation()
        raw_obs, _ = envs.reset(seed=args.seed + global_step)
        episode_returns, episode_lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, dtype=int)
        while iteration < args.num_iterations and not caught:
            iteration += 1
            rollout_start, previous_step = time.perf_counter(), global_step

            # Schedules: full at the first iteration, still 1/num_iterations of the way from the end at the last.
            if args.anneal_lr:
                learning_rate.fill_(anneal(args.learning_rate, 0.0, iteration, args.num_iterations))
            ent_coef_end = args.ent_coef if args.ent_coef_end is None else args.ent_coef_end
            ent_coef = anneal(args.ent_coef, ent_coef_end, iteration, args.num_iterations)

            # Rollout: act with a Gaussian around the mean of the policy as it is now.
            policy, std = numpy_policy(actor.mean), actor.log_std.detach().exp().cpu().numpy()
            final_observations, reward_terms = [], defaultdict(float)
            for step in range(args.num_steps):
                if args.norm_obs:
                    obs_rms.update(raw_obs)
                observations[step] = normalize(raw_obs)
                noise = rng.standard_normal(actions[step].shape, dtype=np.float32)
                actions[step] = policy(observations[step]) + std * noise
                # The sample is kept as it is, since its log-probability is wanted; the environment gets it clipped.
                env_actions = (actions[step] * scale + shift).reshape(-1, *space.shape).clip(space.low, space.high)

                step_start = time.perf_counter()
                try:
                    raw_obs, reward, terminated, truncated, infos = envs.step(env_actions)
                except Exception as error:
                    where = f"{args.env_id} raised {error!r} at step {global_step}"
                    stop(3, f"{where}. Mend the environment; after a checkpoint, {resume_command} continues.")
                seconds["environment"] += time.perf_counter() - step_start
                global_step += args.num_envs

                done = terminated | truncated
                bootstrapped = truncated & ~terminated  # where both flags are set the episode really ended
                final_obs = np.stack(infos["final_obs"][bootstrapped]) if bootstrapped.any() else None
                for name, array in (("observation", raw_obs), ("reward", reward), ("final observation", final_obs)):
                    if array is not None and not np.isfinite(array).all():
                        where = f"{name} of {args.env_id} number {np.argwhere(~np.isfinite(array))[0][0]} is not finite"
                        stop(3, f"{where} at step {global_step}. Mend the environment; {resume_command} continues.")
                terminations[step], truncations[step], raw_rewards[step] = terminated, truncated, reward
                if args.norm_reward:
                    rewards[step] = reward_scaler.update(reward, done).clip(-args.clip_reward, args.clip_reward)
                else:
                    rewards[step] = reward
                if final_obs is not None:  # a time limit: the value of the last observation will be bootstrapped
                    final_observations.append(normalize(final_obs))

                for info in (infos, infos.get("final_info", {})):  # the environment's own parts of the reward
                    for name, values in info.items():
                        if name.startswith("reward_") and values.dtype.kind in "fiu":
                            reward_terms[f"rewards/{name.removeprefix('reward_')}"] += float(values.sum())
                episode_returns += reward
                episode_lengths += 1
                for env in np.flatnonzero(done):
                    recent_returns.append(float(episode_returns[env]))
                    metrics["charts/episodic_return"] = recent_returns[-1]
                    metrics["charts/episodic_length"] = int(episode_lengths[env])
                    logger.log(global_step, {name: metrics[name] for name in EPISODE_METRICS})
                    episode_returns[env], episode_lengths[env] = 0, 0

            # Advantages, from the values of the policy that made the rollout.
            update_start = time.perf_counter()
            with torch.no_grad():
                obs_t, actions_t = to_device(observations), to_device(actions)  # (T, N, obs_dim), (T, N, action_dim)
                old_mean, old_log_std = actor(obs_t)[0], actor.log_std.detach().clone()
                old_logprobs = gaussian_log_prob(actions_t, old_mean, old_log_std)  # (T, N)
                values = critic(obs_t)  # (T, N)
                next_values = torch.cat([values[1:], critic(to_device(normalize(raw_obs)))[None]])
                if final_observations:
                    rows = to_device(truncations & ~terminations)
                    next_values[rows] = critic(to_device(np.concatenate(final_observations)))
                terminations_t, dones_t = to_device(terminations), to_device(terminations | truncations)
                advantages, returns = compute_gae(
                    to_device(rewards), values, next_values, terminations_t, dones_t, args.gamma, args.gae_lambda
                )
            batch = [
                x.flatten(0, 1) for x in (obs_t, actions_t, old_mean, old_logprobs, advantages, returns, values)
            ]  # each (T * N, ...)

            # Epochs: each uses every sample once, in minibatches drawn anew.
            ent_coef_t, kl_coef_t = (torch.tensor(c, dtype=torch.float32, device=device) for c in (ent_coef, kl_coef))
            rows = []
            for _ in range(args.update_epochs):
                order = to_device(rng.permutation(args.batch_size))
                epoch_start = len(rows)
                for minibatch in zip(*(x[order].tensor_split(args.num_minibatches) for x in batch), strict=True):
                    stats = step_update(actor, critic, optimizer, minibatch, old_log_std, ent_coef_t, kl_coef_t, args)
                    rows.append(torch.stack(tuple(stats.values())))
                if args.target_kl is not None and not args.kl_penalty:
                    kl_column = list(stats).index("losses/approx_kl")
                    if torch.stack(rows[epoch_start:])[:, kl_column].nanmean() > args.target_kl:
                        break
            table = torch.stack(rows).cpu().numpy()  # (updates, metrics): the only wait for the GPU in the iteration
            if args.kl_penalty:
                with torch.no_grad():
                    kl = gaussian_kl(old_mean, old_log_std, *actor(obs_t)).mean().item()
                kl_coef = adapt_kl_coef(kl_coef, kl, 0.01 if args.target_kl is None else args.target_kl)
            seconds["update"] += time.perf_counter() - update_start

            # Updates that were skipped because something was not finite.
            skipped = table[:, -1] > 0
            for row, was_skipped in zip(table, skipped, strict=True):
                skipped_in_row = skipped_in_row + 1 if was_skipped else 0
                skipped_updates += int(was_skipped)
                if skipped_in_row == 1:
                    first_bad = next((n for n, v in zip(stats, row, strict=True) if not np.isfinite(v)), "the loss")
                if skipped_in_row >= args.max_skipped_updates:
                    what = (
                        f"{skipped_in_row} updates in a row were not finite, {first_bad} first, at step {global_step}"
                    )
                    stop(3, f"{what}. Lower --learning-rate or look at the rewards; {resume_command} goes back.")

            # Metrics: losses are means over the last epoch.
            now = time.perf_counter()
            seconds["wall"] = now - started
            last_epoch = table[epoch_start:][~skipped[epoch_start:]]
            if len(last_epoch):
                metrics.update(zip(list(stats)[:-1], last_epoch.mean(0)[:-1].tolist(), strict=True))
            metrics |= {
                "losses/explained_variance": explained_variance(values, returns).item(),
                "losses/value_mean": values.mean().item(),
                "losses/policy_std": actor.log_std.detach().exp().mean().item(),
                "losses/ent_coef": ent_coef,
                "losses/kl_coef": kl_coef,
                "losses/skipped_updates": skipped_updates,
                "charts/learning_rate": float(optimizer.param_groups[0]["lr"]),
                "charts/update_epochs": (epoch_start + args.num_minibatches) / args.num_minibatches,
                "charts/reward_mean": raw_rewards.mean(),
                "charts/reward_min": raw_rewards.min(),
                "charts/reward_max": raw_rewards.max(),
                "charts/SPS": args.batch_size / (now - rollout_start),
                "time/environment": seconds["environment"],
                "time/update": seconds["update"],
                "time/rest": seconds["wall"] - seconds["environment"] - seconds["update"],
            }
            metrics |= {name: total / args.batch_size for name, total in reward_terms.items()}
            last = iteration == args.num_iterations
            if last or crossed(args.log_every, previous_step, global_step):
                own_rows = {n for n in metrics if n in EPISODE_METRICS or n.startswith("eval/")}
                logger.log(global_step, {n: v for n, v in metrics.items() if n not in own_rows})
            progress.set_postfix({"return": f"{np.mean(recent_returns):.1f}" if recent_returns else "-"}, refresh=False)
            progress.update(args.batch_size)
            if not last and crossed(args.eval_every, previous_step, global_step):
                run_evaluation()
            if last or caught or crossed(args.checkpoint_every, previous_step, global_step):
                save()

        if caught:
            logger.close()
            print(f"saved at step {global_step}; continue with: {resume_command}", flush=True)
            raise SystemExit(128 + caught[0])

    final_returns = run_evaluation()
    summary = {
        "steps": global_step,
        "wall_seconds": seconds["wall"],
        "steps_per_second": global_step / seconds["wall"],
        "environment_seconds": seconds["environment"],
        "update_seconds": seconds["update"],
        "rest_seconds": seconds["wall"] - seconds["environment"] - seconds["update"],
        "last_training_return": float(np.mean(recent_returns)) if recent_returns else None,
        "final_evaluation": final_returns,
    }
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=2).encode())
    logger.close()
    envs.close()
    print(f"evaluation at step {global_step}: {np.mean(final_returns):.1f} +- {np.std(final_returns):.1f}")
    return metrics | {"global_step": global_step}


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
