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

Expect: on HalfCheetah-v5 a training return of 2100 to 4700 after one million steps (three seeds); with --compile
13 to 20 minutes on one core of a virtual AMD EPYC; docs/ppo_continuous.md has the other tasks.

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

import collections.abc, contextlib, dataclasses, functools, importlib.metadata, json, math
import os, random, re, shlex, signal, subprocess, sys, time, types
from pathlib import Path
from typing import BinaryIO, Literal

import gymnasium as gym, numpy as np, torch, tqdm, tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

SCRIPT, FORMAT = Path(__file__).stem, 1


@dataclasses.dataclass
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
    max_skipped_updates: int = 10
    """stop when this many updates in a row were skipped because loss or gradient was not finite"""
    resume: str | None = None
    """continue the run of this checkpoint file or run folder, with its flags, in its folder; of the flags given here
    those count that differ from their default"""
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
    """end the epochs of a rollout after one whose mean approx_kl is above this (the KL between old and new policy)"""
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
    """clip range of the rewards that the critic learns from"""

    batch_size = property(lambda self: self.num_envs * self.num_steps)
    num_iterations = property(lambda self: self.total_timesteps // self.batch_size)
    render_mode = property(lambda self: "rgb_array" if self.capture_video else None)



# ---------------------------------------------------------------------------------------------------------------------
# Environment
# ---------------------------------------------------------------------------------------------------------------------
def make_envs(args: Args, num_envs: int, seed: int) -> gym.vector.VectorEnv:
    """The training environments: a vector environment in SAME_STEP autoreset. Replace it to train on anything else.

    `seed` is for those that want one when they are made: gymnasium's get theirs at their reset.
    """
    # An environment may reuse one observation array: without the copy its final observation would show the reset's.
    makers = [lambda: gym.wrappers.TransformObservation(make_env(args), np.copy, None)] * num_envs
    # The vector environment itself need not copy: what step() returned has been used when the next step overwrites it.
    return gym.vector.SyncVectorEnv(makers, copy=False, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def make_eval_env(args: Args, seed: int, render_mode: str | None = None) -> gym.Env:
    """One environment for evaluation and videos, apart from the training environments."""
    return make_env(args, render_mode)


def make_env(args: Args, render_mode: str | None = None) -> gym.Env:
    """One environment. MuJoCo renders through EGL without a display and leaves no MUJOCO_LOG.TXT where it runs."""
    if args.capture_video and sys.platform == "linux" and not os.getenv("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # before mujoco is imported, and only then: EGL may be missing
    with contextlib.suppress(ImportError):
        import mujoco

        # gymnasium's own HalfCheetah model causes the settotalmass notice at every construction.
        mujoco.set_mju_user_warning(lambda text: None if "settotalmass" in text else print(text, file=sys.stderr))
    return gym.make(args.env_id, **({"render_mode": render_mode} if render_mode else {}))


def require_finite(*arrays: np.ndarray) -> None:
    """Raise before an observation or reward that is nan, or infinite as float32, reaches anything that learns."""
    if not all((np.abs(x) < 3.4e38).all() for x in arrays): raise ValueError(f"observation/reward not finite: {arrays}")


def action_transform(space: gym.spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """(scale, shift), flat: from the policy's units to the environment's, [-1, 1] to [low, high] where finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        half, middle = (space.high - space.low).ravel() / 2, (space.high / 2 + space.low / 2).ravel()
    bounded = np.isfinite(half)  # a range as wide as the float type is no range either
    return np.where(bounded, half, 1).astype(space.dtype), np.where(bounded, middle, 0).astype(space.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------------------------------------------
def layer_init(layer: nn.Linear | nn.Conv2d, std: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias."""
    nn.init.orthogonal_(layer.weight, std), nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, last_std: float, hidden: int = 64) -> nn.Sequential:
    return nn.Sequential(layer_init(nn.Linear(inputs, hidden)), nn.Tanh(), layer_init(nn.Linear(hidden, hidden)),
                         nn.Tanh(), layer_init(nn.Linear(hidden, outputs), last_std))


class Agent(nn.Module):
    """Diagonal Gaussian policy, whose log std does not depend on the observation, and state value; nothing shared."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.actor_mean = mlp(obs_dim, action_dim, last_std=0.01)  # small: at first the noise decides
        self.actor_log_std = nn.Parameter(torch.zeros(action_dim))
        self.critic = nn.Sequential(*mlp(obs_dim, 1, last_std=1.0), nn.Flatten(-2))  # (..., N, obs_dim) -> (..., N)


def numpy_policy(network: nn.Sequential):
    """A NumPy copy of the network as it is now: PyTorch takes five times as long for one observation."""
    if [type(layer) for layer in network] != [nn.Linear, *[nn.Tanh, nn.Linear] * (len(network) // 2)]:
        raise TypeError(f"numpy_policy knows Linear and Tanh by turns, not {network}: teach it the new layer")
    *hidden, last = [[p.detach().cpu().numpy().T.copy() for p in layer.parameters()] for layer in network[::2]]

    def forward(x: np.ndarray) -> np.ndarray:
        for weight, bias in hidden: x = np.tanh(x @ weight + bias)
        return x @ last[0] + last[1]

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
        x = np.asarray(x.numpy(force=True) if isinstance(x, Tensor) else x, np.float64).reshape(-1, *self.mean.shape)
        # (A single row, the step of a single environment, is the frequent case and its own mean.)
        batch_mean, squares = (x[0], 0.0) if len(x) == 1 else (x.mean(0), x.var(0) * len(x))
        total, delta = self.count + len(x), batch_mean - self.mean
        self.var = (self.var * self.count + (squares + delta * delta * (self.count * len(x) / total))) / total
        self.mean, self.count = self.mean + delta * (len(x) / total), total

    def normalize(self, x: np.ndarray | Tensor, clip: float | None = None) -> np.ndarray | Tensor:
        """(x - mean) / sqrt(var + 1e-8), clipped to +-clip; x itself before the first update."""
        if isinstance(x, Tensor): return torch.as_tensor(self.normalize(x.numpy(force=True), clip), device=x.device)
        y = (x - self.mean) / (np.sqrt(self.var + 1e-8) if self.count else 1)
        return (y if clip is None else y.clip(-clip, clip)).astype(np.result_type(x, np.float32))

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
        self.returns = self.returns * self.gamma + np.asarray(rewards)
        self.rms.update(self.returns)
        self.returns = np.where(dones, 0.0, self.returns)
        return rewards / np.sqrt(self.rms.var + 1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# The math
# ---------------------------------------------------------------------------------------------------------------------
def compute_gae(rewards: Tensor, values: Tensor, next_values: Tensor, terminations: Tensor, dones: Tensor,
                gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, arXiv:1506.02438 eq. 16. All (T, N); returns (advantages, returns).

    delta_t = r_t + gamma * V(s_{t+1}) - V(s_t), without V(s_{t+1}) where the episode terminated.
    A_t = delta_t + gamma * lambda * A_{t+1}, cut where the episode ended for any reason (dones).
    next_values[t] is V of the observation that step t led to: at a truncation the episode's last, not the reset's.
    """
    deltas = rewards + gamma * next_values.masked_fill(terminations.bool(), 0) - values  # (T, N)
    decays = gamma * gae_lambda * (1 - dones.to(values.dtype))  # (T, N)
    backwards = [torch.zeros_like(deltas[0])]  # A_T, A_{T-1}, ..., A_0, each (N,)
    for delta, decay in zip(deltas.flip(0), decays.flip(0), strict=True): backwards += [delta + decay * backwards[-1]]
    advantages = torch.stack(backwards[:0:-1])  # (T, N)
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
    shift = ((mean - new_mean) * torch.exp(-new_log_std)).square()
    return (new_log_std - log_std + 0.5 * (torch.exp(2 * (log_std - new_log_std)) + shift - 1)).sum(-1)


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_coef: float | None) -> Tensor:
    """Clipped surrogate, arXiv:1707.06347 eq. 7, as a loss: -mean(min(ratio * A, clip(ratio) * A)); None = eq. 6."""
    ratio = torch.exp(logprobs - old_logprobs)  # (B,)
    if clip_coef is None: return -(ratio * advantages).mean()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    """0.5 * mean((V - R)^2); with a clip the larger of that and the error of V_old + clip(V - V_old). All (B,)."""
    errors = (values - returns).square()
    if clip_coef is None: return 0.5 * errors.mean()
    clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max(errors, (clipped - returns).square()).mean()


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
    return kl_coef * 2 if kl > 1.5 * target_kl else kl_coef / 2 if kl < target_kl / 1.5 else kl_coef


def anneal(start: float, end: float | None, iteration: int, num_iterations: int) -> float:
    """Linear from start (iteration 1) towards end, which the iteration after the last would reach; None = constant."""
    return start if end is None else start + (end - start) * (iteration - 1) / num_iterations


# ---------------------------------------------------------------------------------------------------------------------
# Update
# ---------------------------------------------------------------------------------------------------------------------
def update(agent: Agent, optimizer: torch.optim.Adam, minibatch: tuple[Tensor, ...], old_log_std: Tensor,
           coefficients: Tensor, args: Args) -> dict[str, Tensor]:
    """One gradient step on one minibatch. Returns detached scalars and never waits for the GPU."""
    # The order is that of `batch` in main. Each is (B, ...) but old_log_std (D,): it does not depend on the sample.
    obs, actions, old_mean, old_logprobs, advantages, returns, old_values = minibatch
    mean, log_std = agent.actor_mean(obs), agent.actor_log_std
    logprobs = gaussian_log_prob(actions, mean, log_std)
    if args.norm_adv: advantages = normalize_advantages(advantages)
    pg_loss = policy_loss(logprobs, old_logprobs, advantages, None if args.kl_penalty else args.clip_coef)
    v_loss = value_loss(agent.critic(obs), old_values, returns, args.vf_clip_coef if args.clip_vloss else None)
    entropy, (ent_coef, kl_coef) = gaussian_entropy(log_std), coefficients
    loss = pg_loss + args.vf_coef * v_loss - ent_coef * entropy
    if args.kl_penalty: loss = loss + kl_coef * gaussian_kl(old_mean, old_log_std, mean, log_std).mean()
    logratio = (logprobs - old_logprobs).detach()
    stats = {"losses/policy_loss": pg_loss.detach(), "losses/value_loss": v_loss.detach(),
             "losses/entropy": entropy.detach(), "losses/old_approx_kl": -logratio.mean(),
             "losses/approx_kl": approx_kl(logratio), "losses/clipfrac": clip_fraction(logratio, args.clip_coef)}
    stats["losses/grad_norm"], stats["skipped"] = gradient_step(loss, optimizer, args.max_grad_norm)
    return stats


@torch.compiler.disable  # a compiled update has its backward pass compiled already; tracing fused Adam only costs time
def gradient_step(loss: Tensor, optimizer: torch.optim.Adam, max_grad_norm: float) -> tuple[Tensor, Tensor]:
    """Backward, clip, step. Returns (gradient norm before clipping, 1 if the step was skipped or 0).

    A loss or gradient that is not finite changes nothing: fused Adam skips the step by itself when told so.
    """
    parameters = optimizer.param_groups[0]["params"]
    for p in parameters: p.grad = None
    loss.backward()
    # nn.utils.clip_grad_norm_ written out: for small networks its checks take longer than the sums.
    grads = [p.grad for p in parameters]
    grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1))
    optimizer.found_inf = 1 - torch.isfinite(loss.detach() + grad_norm).float()
    optimizer.step()
    return grad_norm, optimizer.found_inf


# ---------------------------------------------------------------------------------------------------------------------
# Evaluate
# ---------------------------------------------------------------------------------------------------------------------
def evaluate(args: Args, agent: Agent, normalize: collections.abc.Callable, folder: Path, name: str) -> tuple:
    """Play `--eval-episodes` with the mean action and frozen statistics: (every return, the `eval/*` metrics).

    Episode k starts from the same seed in every evaluation. With --capture-video the first one is recorded in `folder`.
    """
    returns, lengths = np.zeros((2, args.eval_episodes))
    with or_stop(3, f"{args.env_id} in evaluation", "Mend it, then --resume."), contextlib.ExitStack() as stack:
        env = make_eval_env(args, args.seed, args.render_mode)
        if args.capture_video: env = gym.wrappers.RecordVideo(env, folder, lambda k: k == 0, name_prefix=name)
        stack.callback(env.close)
        box, policy = env.action_space, numpy_policy(agent.actor_mean)
        scale, shift = action_transform(box)
        for k in range(args.eval_episodes):
            (obs, _), done = env.reset(seed=(1_000_000 * (args.seed + 1) + k) % 2**31), False
            require_finite(obs)
            while not done:
                action = policy(normalize(obs)) * scale + shift
                obs, reward, terminated, truncated, _ = env.step(action.reshape(box.shape).clip(box.low, box.high))
                require_finite(obs, reward)
                done, returns[k], lengths[k] = terminated or truncated, returns[k] + reward, lengths[k] + 1
    return returns.tolist(), {"eval/episodic_return": returns.mean(), "eval/episodic_length": lengths.mean()}


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing
# ---------------------------------------------------------------------------------------------------------------------
def stop(code: int, message: str) -> None:
    """Exit with one line on stderr. 2: refused before anything was written; 3: stopped in training."""
    print("\n" * (code == 3) + f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def choose_device(name: str) -> torch.device:
    """The device of that name, tried out; auto is cuda or cpu."""
    name = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    with or_stop(2, f"--device {name}", "Use cpu, or a PyTorch for it."): return torch.zeros(1, device=name).device


def seed_everything(seed: int, deterministic: bool) -> np.random.Generator:
    """Seed the global generators (used while networks are made) and return the one that training draws from."""
    for seeder in (random.seed, np.random.seed, torch.manual_seed): seeder(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic CUDA kernels ask for
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # else each new tensor is filled first, to no use
    return np.random.default_rng(seed)


def check_ranges(args, ranges: dict[str, tuple[float, float]]) -> None:
    """Refuse flags outside their closed range (a nan is outside of all). A key names several; None passes."""
    for name, (low, high) in ((name, bounds) for names, bounds in ranges.items() for name in names.split()):
        value = getattr(args, name)
        if not low <= (low if value is None else value) <= high:
            stop(2, f"--{name.replace('_', '-')} {value} is outside [{low:g}, {high:g}]. Choose a value inside.")


@contextlib.contextmanager
def or_stop(code: int, what: str, advice: str, errors: tuple[type[Exception], ...] = (Exception,)):
    """Turn errors of these types into stop()."""
    try: yield
    except errors as error: stop(code, f"{what}: {error!r}. {advice}")


def writing(path: Path):
    """Stop with exit code 3 when something cannot be written, on a full disk say (torch.save: RuntimeError)."""
    return or_stop(3, f"cannot write {path}", "Older files are whole: make room and --resume.", (OSError, RuntimeError))


def write_whole(path: Path, content: str | collections.abc.Callable[[BinaryIO], None]) -> None:
    """Replace a file in one step by text or by what a function writes: a kill leaves the old one or the new one."""
    with writing(path), contextlib.ExitStack() as stack:
        stack.callback(Path(f"{path}.tmp").unlink, missing_ok=True)
        with open(f"{path}.tmp", "wb") as file:
            content(file) if callable(content) else file.write(content.encode())
            file.flush(), os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)


class Logger:
    """Writes metrics to metrics.csv (step,metric,value), TensorBoard and, with --track, Weights & Biases."""

    def __init__(self, run_dir: Path | None, args, device: torch.device, resume_step: int):
        """Make the folder <env>__<exp_name>__<seed>__<time> and its config.json, or go on in run_dir after a step."""
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1_000_000}".replace("/", "-")
        self.run_dir, self.wandb, self.last = run_dir or Path(args.runs_dir) / name, None, {}
        self.path = self.run_dir / "metrics.csv"
        with writing(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=run_dir is not None)
            self.tensorboard = SummaryWriter(self.run_dir, purge_step=resume_step + 1 if run_dir else None)
        rows = re.findall(r"^\d+,.*\n", self.path.read_text() if self.path.exists() else "", re.MULTILINE)
        write_whole(self.path, "step,metric,value\n" + "".join(r for r in rows if int(r.split(",")[0]) <= resume_step))
        commit = subprocess.getoutput(f"git -C {shlex.quote(str(Path(__file__).resolve().parent))} rev-parse HEAD 2>&-")
        versions = {d.name: d.version for d in importlib.metadata.distributions()} | {"python": sys.version.split()[0]}
        config = {"script": SCRIPT, "flags": vars(args), "versions": versions, "commit": commit or None,
                  "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type}
        write_whole(self.run_dir / "config.json", json.dumps(config, indent=2))
        if args.track:
            self.wandb, name = importlib.import_module("wandb"), self.run_dir.name
            self.wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, config=config, name=name,
                            id=name[-128:].replace(":", "-"), resume="allow", dir=self.run_dir)

    def log(self, step: int, metrics: dict[str, float], videos: str = "") -> None:
        """One row per metric; `videos` is the prefix of what RecordVideo has just written."""
        self.last |= (metrics := {name: float(value) for name, value in metrics.items()})
        with writing(self.path), self.path.open("a") as file:
            file.write("".join(f"{step},{name},{value!r}\n" for name, value in metrics.items()))
            for name, value in metrics.items(): self.tensorboard.add_scalar(name, value, step)
        if self.wandb:  # does not find gymnasium's videos by itself
            for file in self.run_dir.glob(f"videos/{videos}-*.mp4"): metrics[file.stem] = self.wandb.Video(str(file))
            self.wandb.log({**metrics, "global_step": step})

    def close(self) -> None:
        with contextlib.suppress(OSError): self.tensorboard.close()  # on a full disk, which has been reported
        if self.wandb: self.wandb.finish()


def save_checkpoint(path: Path, args, run: types.SimpleNamespace, parts: dict, rng: np.random.Generator) -> None:
    """Flags, counters, random generator and the state_dict of every part."""
    state = {"format_version": FORMAT, "script": SCRIPT, "flags": vars(args), "run": vars(run),
             "parts": {k: part.state_dict() for k, part in parts.items()}, "rng": rng.bit_generator.state}
    write_whole(path, functools.partial(torch.save, state))


def load_checkpoint(args, changeable: set[str]) -> tuple:
    """(flags, checkpoint, run folder) of --resume or --evaluate, a file or a run folder; (args, None, None) without.

    The checkpoint's flags hold, but for changeable ones that were given, that is, differ from their default.
    """
    if args.resume and args.evaluate: stop(2, "--resume and --evaluate exclude each other. Give one of them.")
    if (path := args.evaluate if args.resume is None else args.resume) is None: return args, None, None
    file = Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path)
    hint, ours = f"Give the checkpoint.pt, or the folder, of a run of {SCRIPT}.py.", f"{SCRIPT}.py, format {FORMAT}"
    # Whatever the file system, the zip reader or the unpickler may say:
    with or_stop(2, f"{file} is missing or no checkpoint", hint):
        checkpoint = torch.load(file, map_location="cpu", weights_only=True) | {"folder": file.parent}
        made_by, flags = f"{checkpoint['script']}.py, format {checkpoint['format_version']}", checkpoint["flags"]
    if made_by != ours: stop(2, f"{file} is a checkpoint of {made_by}, not {ours}. {hint}")
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if getattr(args, f.name) != f.default}
    for name in (n for n in given.keys() - changeable if given[n] != flags.get(n)):
        stop(2, f"--{name.replace('_', '-')} {given[name]} is {flags.get(name)} in the checkpoint. Leave it out.")
    known = {name: value for name, value in {**flags, **given, "resume": None}.items() if hasattr(args, name)}
    # A checkpoint that lies in its run's folder goes on there; a copy of one elsewhere starts a folder of its own.
    at_home = args.evaluate or (file.name == "checkpoint.pt" and (file.parent / "config.json").exists())
    return dataclasses.replace(args, **known), checkpoint, file.parent if at_home else None


def restore(checkpoint: dict, run: types.SimpleNamespace, parts: dict, rng: np.random.Generator) -> None:
    """Put the state of a checkpoint back in place, or refuse one that does not fit."""
    with or_stop(2, "the checkpoint does not fit this environment", "Use the one that it was trained on."):
        for name, part in parts.items(): part.load_state_dict(checkpoint["parts"][name])
        vars(run).update(checkpoint["run"])
        rng.bit_generator.state = checkpoint["rng"]


def catch_signals(stack: contextlib.ExitStack) -> list[int]:
    """Collect SIGINT and SIGTERM in a list that the training loop looks at; another one a second later quits at once.

    (A launcher may send the same one twice: to all processes of a job, and through their parent.)
    """
    caught = []

    def handler(signum: int, frame) -> None:
        if caught and time.monotonic() > caught[1] + 1: sys.exit(128 + signum)
        if not caught: print("\nstopping once it can be resumed (now: once more)", file=sys.stderr, flush=True)
        caught.extend([signum, time.monotonic()])

    with contextlib.suppress(ValueError):  # only the main thread may do this
        for sig in (signal.SIGINT, signal.SIGTERM): stack.callback(signal.signal, sig, signal.signal(sig, handler))
    return caught


def crossed(before: int, after: int, *every: int) -> bool:
    """Whether a multiple of one of these lies in (before, after]; 0 has none."""
    return any(n > 0 and before // n < after // n for n in every)


# ---------------------------------------------------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------------------------------------------------
def check(args: Args) -> torch.device:
    """Refuse, with exit code 2 and before anything is written, whatever can be known to be wrong before training."""
    check_ranges(args, {
        "num_envs num_steps update_epochs eval_episodes max_skipped_updates": (1, 1e12),
        "learning_rate adam_eps max_grad_norm clip_coef vf_clip_coef clip_obs clip_reward target_kl": (1e-12, 1e12),
        "ent_coef ent_coef_end vf_coef kl_coef log_every eval_every checkpoint_every": (0, 1e12),
        "gamma gae_lambda": (0, 1), "seed": (0, 2**31 - 1),
        # One rollout at least, and for each minibatch one sample at least, or two to normalise.
        "total_timesteps": (args.batch_size, 1e12), "num_minibatches": (1, args.batch_size // (1 + args.norm_adv))})
    folder = next(path for path in Path(args.runs_dir, "x").absolute().parents if path.exists())
    # (The slash: a file will not do.)
    if not (args.evaluate or os.access(f"{folder}/", os.W_OK)): stop(2, f"{folder} is not writable. Change --runs-dir.")
    if len(f"{args.env_id}{args.exp_name}".encode()) > 200: stop(2, "the run's name is too long. Shorten --exp-name.")
    with or_stop(2, "--track", "Install wandb, then `wandb login` or set WANDB_MODE=offline."):
        login = importlib.import_module("wandb").login if args.track and not args.evaluate else None
        if login and os.getenv("WANDB_MODE", "online") == "online" and not login(prompt=False): raise PermissionError
    with or_stop(2, "--compile", "Install a C++ compiler (g++), or leave it out."):
        if args.compile and not args.evaluate: torch.compile(torch.sin)(torch.ones(2).to(choose_device(args.device)))
    advice = "Try another, module:Env-v0, dqn.py (discrete), ppo_atari.py (images), FlattenObservation; videos need EGL"
    with or_stop(2, f"--env-id {args.env_id} cannot be used", advice):
        envs, env = make_envs(args, 1, args.seed), make_eval_env(args, args.seed, args.render_mode)
        env.reset(seed=args.seed)
        if args.capture_video: importlib.import_module("moviepy"), env.render()
        envs.close(), env.close()
        obs, act = envs.single_observation_space, envs.single_action_space
        if not all(isinstance(s, gym.spaces.Box) for s in (obs, act)) or len(obs.shape) > 2 or act.dtype.kind != "f":
            raise TypeError(f"it needs a Box of numbers and a Box of floats, not {obs} and {act}")
        if (env.observation_space.shape, env.action_space) != (obs.shape, act): raise TypeError("evaluation differs")
        if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.SAME_STEP: raise TypeError("not SAME_STEP")
    return choose_device(args.device)


# What may differ from the checkpoint's flags under --resume and --evaluate: budget, device and logging.
CHANGEABLE = set("total_timesteps device compile track wandb_project_name wandb_entity capture_video log_every "
                 "eval_every eval_episodes checkpoint_every resume evaluate".split())


def main(args: Args) -> dict[str, float]:
    """Train (or, with --evaluate, only evaluate) and return the last value of every metric."""
    # Evaluation may start from other seeds than training did.
    args, checkpoint, run_dir = load_checkpoint(args, CHANGEABLE | ({"seed"} if args.evaluate else set()))
    device, rng = check(args), seed_everything(args.seed, args.torch_deterministic)
    envs = make_envs(args, args.num_envs, args.seed)
    space, (scale, shift) = envs.single_action_space, action_transform(envs.single_action_space)
    obs_dim, action_dim = math.prod(envs.single_observation_space.shape), math.prod(space.shape)
    agent = Agent(obs_dim, action_dim).to(device)
    # The learning rate is a tensor, so that a compiled update sees it change.
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(args.learning_rate), eps=args.adam_eps, fused=True)
    obs_rms, reward_scaler = RunningMeanStd((obs_dim,)), RewardScaler(args.num_envs, args.gamma)
    # What a checkpoint brings back, beside the flags and the generator: counters and seconds here, tensors in parts.
    run = types.SimpleNamespace(iteration=0, global_step=0, skipped_updates=0, kl_coef=args.kl_coef, last_returns=[],
                                environment_seconds=0.0, update_seconds=0.0, rest_seconds=0.0, wall_seconds=0.0)
    parts = {"agent": agent, "optimizer": optimizer, "obs_rms": obs_rms, "reward_rms": reward_scaler.rms}
    if checkpoint: restore(checkpoint, run, parts, rng)

    def normalize(raw: np.ndarray) -> np.ndarray:
        return obs_rms.normalize(raw.reshape(-1, obs_dim), args.clip_obs if args.norm_obs else None).astype(np.float32)

    if args.evaluate:
        returns, metrics = evaluate(args, agent, normalize, run_dir / "videos", f"evaluate_{time.time_ns()}")
        print(f"{args.env_id}: mean {np.mean(returns):.2f} of", *(f"{r:.2f}" for r in returns))
        return metrics

    logger = Logger(run_dir, args, device, run.global_step)
    # reduce-overhead: CUDA graphs on CUDA; on the CPU the same as the default mode.
    run_dir, step_update = logger.run_dir, torch.compile(update, mode="reduce-overhead") if args.compile else update
    print(f"{args.env_id}: {args.num_iterations} rollouts of {args.batch_size} steps on {device} {run_dir}", flush=True)

    # One rollout, (T, N, ...). Only the policy's mean is needed while acting; values and log-probabilities of the
    # whole rollout are computed afterwards in one pass of each network. The critic learns from the scaled rewards.
    shape = (args.num_steps, args.num_envs)
    observations, actions = (np.zeros((*shape, dim), np.float32) for dim in (obs_dim, action_dim))
    rewards, scaled, terminations, dones = (np.zeros(shape, kind) for kind in (float, np.float32, bool, bool))

    to_device, bad_rows, previous_step = functools.partial(torch.as_tensor, device=device), [], run.global_step
    started, interval = time.perf_counter() - run.wall_seconds, 0.5 if sys.stderr.isatty() else 10
    bar = tqdm.tqdm(total=args.total_timesteps, initial=run.global_step, unit="step", mininterval=interval, leave=False)
    with contextlib.closing(envs), contextlib.closing(logger), bar, contextlib.ExitStack() as stack:
        caught, mend = catch_signals(stack), "Mend the environment, then --resume."
        with or_stop(3, f"{args.env_id} at its reset", mend):
            require_finite(raw_obs := envs.reset(seed=(args.seed + run.global_step) % 2**31)[0])
        sums, steps = np.zeros((2, args.num_envs))  # of the running episodes: their rewards' sums, their lengths
        while True:
            # Between two rollouts: save (at the end and when told to stop, too), evaluate (at step 0 and the end, too).
            last, first = run.iteration >= args.num_iterations, not checkpoint and run.iteration == 0 < args.eval_every
            if (told_to_stop := bool(caught)) or last or crossed(previous_step, run.global_step, args.checkpoint_every):
                save_checkpoint(run_dir / "checkpoint.pt", args, run, parts, rng)
            if first or last or crossed(previous_step, run.global_step, args.eval_every):
                eval_returns, metrics = evaluate(args, agent, normalize, run_dir / "videos", f"step_{run.global_step}")
                logger.log(run.global_step, metrics, videos=f"step_{run.global_step}")
            if last or told_to_stop: break  # (told while it evaluated, only after it has saved above)

            # Schedules: full at the first iteration; the last still has 1/num_iterations of the way to go.
            run.iteration, previous_step, rollout_start = run.iteration + 1, run.global_step, time.perf_counter()
            rate = anneal(args.learning_rate, 0.0 if args.anneal_lr else None, run.iteration, args.num_iterations)
            optimizer.param_groups[0]["lr"].fill_(rate)
            ent_coef = anneal(args.ent_coef, args.ent_coef_end, run.iteration, args.num_iterations)

            # Rollout: act with a Gaussian around the mean of the policy as it is now.
            policy, std = numpy_policy(agent.actor_mean), agent.actor_log_std.detach().exp().cpu().numpy()
            # finals: last observations at time limits
            finals, reward_terms = [np.zeros((0, obs_dim), np.float32)], collections.Counter()
            for t in range(args.num_steps):
                if args.norm_obs: obs_rms.update(raw_obs)
                observations[t] = normalize(raw_obs)
                actions[t] = policy(observations[t]) + std * rng.standard_normal(actions[t].shape, np.float32)
                # The sample is kept as it is, since its log-probability is wanted; the environment gets it clipped.
                env_actions = (actions[t] * scale + shift).reshape(-1, *space.shape).clip(space.low, space.high)
                step_start = time.perf_counter()
                with or_stop(3, f"{args.env_id} at step {run.global_step}", mend):
                    raw_obs, rewards[t], terminations[t], truncated, infos = envs.step(env_actions)
                    require_finite(raw_obs, rewards[t], *(x for x in infos.get("final_obs", ()) if x is not None))
                run.environment_seconds += time.perf_counter() - step_start
                run.global_step += args.num_envs
                dones[t] = terminations[t] | truncated
                scaled[t] = reward_scaler.update(rewards[t], dones[t]).clip(-args.clip_reward, args.clip_reward)
                if not args.norm_reward: scaled[t] = rewards[t]
                # The environment's own parts of the reward. Where an episode ended, infos already tell of the reset.
                for info, which in ((infos, ~dones[t]), (infos.get("final_info", {}), dones[t])):
                    for key in (k for k in info if str(k)[:7] == "reward_" and np.asarray(info[k]).dtype.kind in "fiu"):
                        reward_terms[f"rewards/{key[7:]}"] += info[key][which].sum() / args.batch_size
                sums, steps = sums + rewards[t], steps + 1
                for i in np.flatnonzero(dones[t]):
                    if not terminations[t, i]: finals.append(normalize(infos["final_obs"][i]))  # a time limit
                    logger.log(run.global_step, {"charts/episodic_return": sums[i], "charts/episodic_length": steps[i]})
                    run.last_returns = [*run.last_returns[-99:], float(sums[i])]
                    sums[i], steps[i] = 0, 0

            # Advantages, from the values of the policy that made the rollout.
            update_start = time.perf_counter()
            with torch.no_grad():
                obs, actions_t, rewards_t, *ends = map(to_device, (observations, actions, scaled, terminations, dones))
                old_mean, old_log_std = agent.actor_mean(obs), agent.actor_log_std.clone()
                old_logprobs, values = gaussian_log_prob(actions_t, old_mean, old_log_std), agent.critic(obs)
                # V of the next row; after a time limit V of the last observation; after a death compute_gae takes none.
                next_values = torch.cat([values[1:], agent.critic(to_device(normalize(raw_obs)))[None]])
                # finals came step by step, environment by environment: the order of a boolean index over (T, N).
                next_values[to_device(dones & ~terminations)] = agent.critic(to_device(np.concatenate(finals)))
                advantages, returns = compute_gae(rewards_t, values, next_values, *ends, args.gamma, args.gae_lambda)
            # Each (T * N, ...):
            batch = [x.flatten(0, 1) for x in (obs, actions_t, old_mean, old_logprobs, advantages, returns, values)]

            # Epochs: each uses every sample once, in minibatches drawn anew.
            # The coefficients are a tensor, so that a compiled update sees them change.
            coefficients, rows = torch.tensor([ent_coef, run.kl_coef], device=device), []
            for _ in range(args.update_epochs):
                order = to_device(rng.permutation(args.batch_size))
                for minibatch in zip(*(x[order].tensor_split(args.num_minibatches) for x in batch), strict=True):
                    stats = step_update(agent, optimizer, minibatch, old_log_std, coefficients, args)
                    rows.append(torch.stack(tuple(stats.values())))
                kl = torch.stack(rows[-args.num_minibatches:])[:, list(stats).index("losses/approx_kl")].nanmean()
                if args.target_kl and not args.kl_penalty and kl > args.target_kl: break
            table = torch.stack(rows).cpu().numpy()  # (updates, metrics); the update waits here alone
            if args.kl_penalty:
                kl = gaussian_kl(old_mean, old_log_std, agent.actor_mean(obs), agent.actor_log_std).mean().item()
                run.kl_coef = adapt_kl_coef(run.kl_coef, kl, args.target_kl or 0.01)
            run.update_seconds += time.perf_counter() - update_start

            for row in table:  # the last column says whether the update was skipped, because something was not finite
                bad_rows = [*bad_rows, row] if row[-1] else []
                if len(bad_rows) >= args.max_skipped_updates:
                    what = list(stats)[np.isfinite(bad_rows[0]).argmin()]
                    stop(3, f"{what} went bad first, {len(bad_rows)} updates skipped. Check rewards, --learning-rate.")
            run.skipped_updates += int(table[:, -1].sum())

            # Metrics: losses are means over the last epoch.
            run.wall_seconds = time.perf_counter() - started
            run.rest_seconds = run.wall_seconds - run.environment_seconds - run.update_seconds
            if run.iteration == args.num_iterations or crossed(previous_step, run.global_step, args.log_every):
                means = np.ma.masked_invalid(table[-args.num_minibatches:, :-1]).mean(0).filled(np.nan)
                logger.log(run.global_step, dict(zip(stats, means, strict=False)) | {
                    "losses/explained_variance": explained_variance(values, returns), "losses/ent_coef": ent_coef,
                    "losses/value_mean": values.mean(), "losses/kl_coef": run.kl_coef, "losses/policy_std": std.mean(),
                    "losses/skipped_updates": run.skipped_updates, "charts/reward_mean": rewards.mean(),
                    "charts/reward_min": rewards.min(), "charts/reward_max": rewards.max(),
                    "charts/SPS": args.batch_size / (time.perf_counter() - rollout_start), "charts/learning_rate": rate,
                    "charts/update_epochs": len(rows) // args.num_minibatches, "time/update": run.update_seconds,
                    "time/environment": run.environment_seconds, "time/rest": run.rest_seconds, **reward_terms})
            bar.set_postfix({"return": f"{np.mean(run.last_returns):.1f}" if run.last_returns else "-"}, refresh=False)
            bar.update(args.batch_size)

    if last:
        summary = {"steps": run.global_step, **{k: v for k, v in vars(run).items() if k.endswith("_seconds")},
                   "steps_per_second": run.global_step / run.wall_seconds, "final_evaluation": eval_returns,
                   "last_training_return": float(np.mean(run.last_returns)) if run.last_returns else None}
        write_whole(run_dir / "summary.json", json.dumps(summary, indent=2))
        print(f"evaluation at step {run.global_step}: {np.mean(eval_returns):.1f} +- {np.std(eval_returns):.1f}")
    else: print("saved. Continue:", shlex.join(["python", sys.argv[0], "--resume", str(run_dir)]), flush=True)
    if caught: raise SystemExit(128 + caught[0])
    return {"global_step": run.global_step, **logger.last}


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
