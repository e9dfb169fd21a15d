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
"""Twin Delayed Deep Deterministic policy gradient (TD3), and DDPG: off-policy control of continuous actions.

Critics learn the value of replayed actions; a deterministic policy follows their slope. Where they are too high the
policy finds it out and goes there, so TD3 adds three fixes to DDPG, each with a switch of its own.
    Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", 2018, arXiv:1802.09477
    Lillicrap et al., "Continuous control with deep reinforcement learning" (DDPG), 2015, arXiv:1509.02971

    a'        = clip(mu'(s') + clip(noise, -c, c), low, high)         target smoothing  (--no-target-smoothing: mu'(s'))
    y         = r + gamma * (1 - terminated) * min_i Q'_i(s', a')     clipped double Q  (--no-clipped-double-q: Q'_1)
    L_Q       = sum_i mean((Q_i(s, a) - y)^2)
    L_mu      = -mean(Q_1(s, mu(s))), every second update             delayed policy    (--no-delayed-policy: every one)
    targets  <- targets + tau * (networks - targets), with each update of the policy

Run:
    python td3.py                                                # HalfCheetah-v5, one million steps
    python td3.py --env-id Pendulum-v1 --total-timesteps 20000 --learning-starts 1000
    python td3.py --no-clipped-double-q --no-delayed-policy --no-target-smoothing --noise ou        # DDPG

Expect: on Pendulum-v1 an evaluation of about -150 after 20,000 steps with --learning-starts 1000 (five seeds), on
HalfCheetah-v5 of 1100 to 3700 after 100,000 with --learning-starts 5000 (three seeds), at 101 steps a second on one
core of a virtual AMD EPYC and 148 on two with --compile; docs/td3.md has the tables.

Differs from the paper ("Details that matter" in docs/td3.md has the reasons):
    1. Noise is given in units of half the action range, so that one number fits all environments.
    2. The target's action is clipped to the action range, as in the authors' code.
    3. The first 25,000 steps are random (there 10,000 or 1,000, by task).
    4. A time limit is no death: only `terminated` ends the return.
    5. Networks of 256-256, batches of 256, rate 3e-4 (there 400-300, 100, 1e-3).
    6. All three switches off is the update of DDPG with our sizes and rates (there 400-300, batches of 64, rates 1e-4
       and 1e-3, tau 0.001, noise 0.2), without its batch normalisation and weight decay.
    7. After --resume the environments start new episodes. Without --checkpoint-replay the memory is filled with
       --learning-starts steps of the current policy before the next update. All else continues.

Read `main` first, then "The math".
"""

import collections.abc, contextlib, copy, dataclasses, functools, importlib.metadata, json, math
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
    log_every: int = 1000
    """steps between two rows of losses (episodes are always logged)"""
    eval_every: int = 25_000
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
    buffer_size: int = 1_000_000
    """transitions that the replay memory holds, the newest"""
    checkpoint_replay: bool = False
    """save the replay memory with the newest checkpoint, as replay_<step>.npz; cql.py and iql.py read it"""
    batch_size: int = 256
    """transitions per update"""
    learning_starts: int = 25_000
    """steps of uniformly random actions before the first update"""
    utd_ratio: float = 1.0
    """critic updates per environment step, summed over environments (update-to-data ratio)"""
    clipped_double_q: bool = True
    """the target takes the smaller of two critics; otherwise the first one alone"""
    delayed_policy: bool = True
    """update policy and targets at every --policy-frequency-th update only; otherwise at each"""
    policy_frequency: int | None = 2
    """critic updates per policy update; None = as many as there are per step (--utd-ratio, at least 1)"""
    target_smoothing: bool = True
    """add clipped noise to the target's action"""
    policy_noise: float = 0.2
    """std of the noise on the target's action, in half action ranges"""
    noise_clip: float = 0.5
    """clip range of the noise on the target's action, in half action ranges"""
    noise: Literal["gaussian", "ou"] = "gaussian"
    """exploration noise: independent, or an Ornstein-Uhlenbeck process (theta 0.15) that each episode starts at zero"""
    exploration_noise: float = 0.1
    """std of the exploration noise (of its increments with ou), in half action ranges"""
    exploration_noise_end: float | None = None
    """exploration noise at the end of training, reached linearly from step 0 on; None = constant"""
    hidden_size: int = 256
    """width of both hidden layers, in each network"""
    gamma: float = 0.99
    """discount (gamma)"""
    tau: float = 0.005
    """share of the way that the targets go towards their networks at each of their updates (tau)"""
    max_grad_norm: float = math.inf
    """clip range of the global gradient norm"""

    render_mode = property(lambda self: "rgb_array" if self.capture_video else None)
    critics_per_policy_update = property(lambda self: self.policy_frequency or max(1, round(self.utd_ratio)))


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
# differs from sac.py: deterministic
class Actor(nn.Module):
    """One action per observation, squashed by tanh to the action range."""

    def __init__(self, obs_dim: int, scale: np.ndarray, shift: np.ndarray, hidden: int):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, hidden),
                                     nn.ReLU(inplace=True), nn.Linear(hidden, len(scale)))
        self.scale, self.shift = (nn.Buffer(torch.as_tensor(x, dtype=torch.float32)) for x in (scale, shift))

    def forward(self, obs: Tensor) -> Tensor:
        """(B, obs_dim) -> (B, D)."""
        return self.network(obs).tanh() * self.scale + self.shift


# differs from sac.py: always two critics, no layer normalisation
class Critics(nn.Module):
    """Two independent estimates of Q(s, a), initialised as nn.Linear is; a hidden layer of both is one product."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: int):
        super().__init__()
        def uniform(n: int, *shape: int) -> Tensor: return torch.empty(2, *shape).uniform_(-1, 1) / math.sqrt(n)
        self.weights = nn.ParameterList(uniform(n, n, hidden) for n in (obs_dim + action_dim, hidden))
        self.biases = nn.ParameterList(uniform(n, 1, hidden) for n in (obs_dim + action_dim, hidden))
        self.out_weight, self.out_bias = nn.Parameter(uniform(hidden, 1, hidden)), nn.Parameter(uniform(hidden, 1))

    def forward(self, obs: Tensor, actions: Tensor, number: int = 2) -> Tensor:
        """(B, obs_dim), (B, D) -> (E, B), of both critics or, with number 1, of the first."""
        x = torch.cat([obs, actions], -1).expand(number, -1, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            if number < 2: weight, bias = weight[:1], bias[:1]  # (a slice of both would cost time in the backward pass)
            x = torch.baddbmm(bias, x, weight).relu_()  # (E, B, hidden) = (E, 1, hidden) + (E, B, n) @ (E, n, hidden)
        # Faster on the CPU than a matrix product of width 1.
        return (x * self.out_weight[:number]).sum(-1) + self.out_bias[:number]


# differs from ppo_continuous.py, ppo_atari.py, sac.py: an actor and critics, targets of both
class Agent(nn.Module):
    """All that is learned, and the slowly following targets."""

    def __init__(self, obs_dim: int, scale: np.ndarray, shift: np.ndarray, hidden: int):
        super().__init__()
        self.actor, self.critics = Actor(obs_dim, scale, shift, hidden), Critics(obs_dim, len(scale), hidden)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------
class ReplayMemory:
    """The newest transitions of each environment, (rows, num_envs, ...), in a ring."""

    def __init__(self, size: int, num_envs: int, obs_dim: int, action_dim: int, device: torch.device):
        self.rows, self.num_envs, self.steps, self.device = size // num_envs, num_envs, 0, device
        numbers = {"observations": (obs_dim,), "actions": (action_dim,), "rewards": (), "next_observations": (obs_dim,)}
        flags = {"terminations": (), "truncations": ()}
        self.data = {k: torch.zeros((self.rows, num_envs, *shape), dtype=kind, device=device)
                     for kind, shapes in ((torch.float32, numbers), (torch.bool, flags)) for k, shape in shapes.items()}

    def __len__(self) -> int:
        """Transitions that are there."""
        return min(self.steps, self.rows) * self.num_envs

    def add(self, *step: np.ndarray) -> None:
        """One step of all environments, (num_envs, ...) each, in the order of self.data."""
        for x, new in zip(self.data.values(), step, strict=True): x[self.steps % self.rows] = torch.as_tensor(new)
        self.steps += 1

    def sample(self, rng: np.random.Generator, batch_size: int) -> list[Tensor]:
        """Transitions drawn uniformly with replacement, (B, ...) each, in the order of self.data."""
        # Counted from the oldest, so that a memory that was saved and loaded gives the same.
        ages, oldest = rng.integers(0, len(self), batch_size), max(0, self.steps - self.rows) * self.num_envs
        chosen = torch.as_tensor((oldest + ages) % (self.rows * self.num_envs), device=self.device)
        return [x.flatten(0, 1).index_select(0, chosen) for x in self.data.values()]

    def save(self, path: Path) -> None:
        """NPZ of all transitions, the oldest first, with the environment that each came from."""
        rows, overwritten = min(self.steps, self.rows), max(0, self.steps - self.rows)
        arrays = {k: x[:rows].roll(-overwritten, 0).flatten(0, 1).cpu().numpy() for k, x in self.data.items()}
        arrays["env_ids"] = np.tile(np.arange(self.num_envs, dtype=np.int32), rows)
        write_whole(path, lambda file: np.savez(file, **arrays))

    def load(self, path: Path) -> None:
        with np.load(path) as file: saved = {k: file[k].reshape(-1, *x.shape[1:]) for k, x in self.data.items()}
        for k, x in self.data.items(): x[:len(saved[k])], self.steps = torch.as_tensor(saved[k]), len(saved[k])


# ---------------------------------------------------------------------------------------------------------------------
# The math
# ---------------------------------------------------------------------------------------------------------------------
def smoothed_target_action(action: Tensor, noise: Tensor, noise_clip: Tensor | float, low: Tensor | float,
                           high: Tensor | float) -> Tensor:
    """clip(action + clip(noise, +-noise_clip), low, high), arXiv:1802.09477 algorithm 1. In action units, (B, D)."""
    return torch.clamp(action + torch.clamp(noise, -noise_clip, noise_clip), low, high)


def td_target(rewards: Tensor, terminations: Tensor, next_q: Tensor, gamma: float) -> Tensor:
    """r + gamma * Q'(s', a'), without the latter at a termination. All (B,)."""
    return rewards + gamma * next_q.masked_fill(terminations.bool(), 0)


def ornstein_uhlenbeck(state: np.ndarray, noise: np.ndarray, sigma: float, theta: float = 0.15) -> np.ndarray:
    """One step of a random walk that is drawn back to zero: x - theta * x + sigma * N(0, 1), arXiv:1509.02971."""
    return state - theta * state + sigma * noise


def anneal(start: float, end: float | None, iteration: int, num_iterations: int) -> float:
    """Linear from start (iteration 1) towards end, which the iteration after the last would reach; None = constant."""
    return start if end is None else start + (end - start) * (iteration - 1) / num_iterations


def qf_loss(q: Tensor, target: Tensor) -> Tensor:
    """Sum over critics of the mean squared error: (E, B), (B,) -> ()."""
    return (q - target).square().mean(-1).sum()


# differs from ppo_continuous.py, ppo_atari.py, sac.py: the critic alone
def policy_loss(q: Tensor) -> Tensor:
    """-mean(Q(s, mu(s))), arXiv:1802.09477 algorithm 1, (B,)."""
    return -q.mean()


def discounted_return(rewards: list[float], tail: float, gamma: float) -> float:
    """sum_t gamma^t r_t + gamma^T tail: what Q(s_0, a_0) estimates, after one episode."""
    total = tail
    for reward in reversed(rewards): total = reward + gamma * total
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Update
# ---------------------------------------------------------------------------------------------------------------------
def update(agent: Agent, optimizers: dict[str, torch.optim.Adam], batch: list[Tensor], noise: Tensor,
           train_policy: bool, args: Args) -> dict[str, Tensor]:
    """One step of the critics and, if wanted, of policy and targets. Detached scalars; no waiting for the GPU."""
    obs, actions, rewards, next_obs, terminations, _ = batch  # (B, ...); noise is standard normal, (B, D)
    scale, shift = agent.actor.scale, agent.actor.shift
    with torch.no_grad():
        next_actions = agent.target_actor(next_obs)
        if args.target_smoothing:  # noise of each sample's own, scaled to the action range
            next_actions = smoothed_target_action(next_actions, noise * args.policy_noise * scale,
                                                  args.noise_clip * scale, shift - scale, shift + scale)
        next_q = agent.target_critics(next_obs, next_actions)  # (2, B)
        target = td_target(rewards, terminations, next_q.amin(0) if args.clipped_double_q else next_q[0], args.gamma)
    loss = qf_loss(q := agent.critics(obs, actions), target)  # q: (2, B)
    loss.backward(inputs=list(agent.critics.parameters()))
    loss, q = loss.detach(), q.detach()  # a compiled graph ends below and can hand on no graph of its own
    grad_norm, skipped = gradient_step(loss, optimizers["critic"], args.max_grad_norm)
    # (The mean is taken after the step: if an update without the policy computed nothing from here on, torch.compile
    # would skip the rest of this function for good, with the policy's part.)
    stats = {"losses/qf_loss": loss, "losses/qf_values": q.mean(), "losses/qf_grad_norm": grad_norm}
    if not train_policy: return stats | {"skipped": skipped}

    loss = policy_loss(agent.critics(obs, agent.actor(obs), number=1))  # the slope of the first critic alone
    stats["losses/actor_loss"] = loss.detach()
    loss.backward(inputs=list(agent.actor.parameters()))  # the critics are constants here
    stats["losses/actor_grad_norm"], bad = gradient_step(loss.detach(), optimizers["policy"], args.max_grad_norm)
    with torch.no_grad():
        for slow, fast in ((agent.target_critics, agent.critics), (agent.target_actor, agent.actor)):
            torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), args.tau)
    return stats | {"skipped": torch.maximum(skipped, bad)}


# differs from ppo_continuous.py, ppo_atari.py: the backward pass, which asks for some gradients only, is in update()
@torch.compiler.disable  # tracing fused Adam only costs time
def gradient_step(loss: Tensor, optimizer: torch.optim.Adam, max_grad_norm: float) -> tuple[Tensor, Tensor]:
    """After the backward pass: clip (the optimizer's first group), step, and forget the gradients.

    Returns (gradient norm before clipping, 1 if the step was skipped or 0). A loss or gradient that is not finite
    changes nothing: fused Adam skips the step by itself when told so.
    """
    # nn.utils.clip_grad_norm_ written out: for small networks its checks take longer than the sums.
    grads = [p.grad for p in optimizer.param_groups[0]["params"]]
    grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    if max_grad_norm < math.inf: torch._foreach_mul_(grads, (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1))
    optimizer.found_inf = 1 - torch.isfinite(loss + grad_norm).float()
    optimizer.step(), optimizer.zero_grad()
    return grad_norm, optimizer.found_inf


# ---------------------------------------------------------------------------------------------------------------------
# Evaluate
# ---------------------------------------------------------------------------------------------------------------------
def evaluate(args: Args, agent: Agent, folder: Path, name: str) -> tuple[list, dict]:
    """Play `--eval-episodes` without exploration noise: (every return, the `eval/*` metrics).

    q_overestimation is the mean of the critics at the first state and action less the discounted return that followed.
    Episode k starts from the same seed in every evaluation. With --capture-video the first one is recorded in `folder`.
    """
    returns, lengths, errors = [], [], []
    with or_stop(3, f"{args.env_id} in evaluation", "Mend it, then --resume."), contextlib.ExitStack() as stack:
        env = make_eval_env(args, args.seed, args.render_mode)
        if args.capture_video: env = gym.wrappers.RecordVideo(env, folder, lambda k: k == 0, name_prefix=name)
        stack.callback(env.close)
        for k in range(args.eval_episodes):
            rewards, first_q, tail = play(agent, env, (1_000_000 * (args.seed + 1) + k) % 2**31)
            returns.append(sum(rewards)), lengths.append(len(rewards))
            errors.append(first_q - discounted_return(rewards, tail, args.gamma))
    return returns, {"eval/episodic_return": np.mean(returns), "eval/episodic_length": np.mean(lengths),
                     "eval/q_overestimation": np.mean(errors)}


# differs from sac.py: no samples, no entropy
@torch.no_grad()
def play(agent: Agent, env: gym.Env, seed: int) -> tuple[list, float, float]:
    """One episode: rewards (T,), Q of the first action, and the value of what a time limit cut off."""
    box, device, q, rewards = env.action_space, agent.actor.scale.device, [], []
    (obs, _), terminated, truncated = env.reset(seed=seed), False, False
    while True:
        require_finite(obs, *rewards[-1:])
        x = torch.as_tensor(obs.reshape(1, -1), dtype=torch.float32, device=device)
        action = agent.actor(x)
        q.append(agent.critics(x, action).mean().item())
        if terminated or truncated: return rewards, q[0], 0.0 if terminated else q[-1]
        action = action.cpu().numpy().reshape(box.shape).astype(box.dtype)
        obs, reward, terminated, truncated, _ = env.step(action.clip(box.low, box.high))
        rewards.append(float(reward))


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
        "num_envs eval_episodes max_skipped_updates batch_size": (1, 1e12),
        "policy_frequency hidden_size": (1, 1e12), "learning_rate": (1e-12, 1e12),
        "max_grad_norm": (1e-12, math.inf), "utd_ratio": (0, 1e4), "log_every": (1, 1e12),
        "eval_every checkpoint_every": (0, 1e12),
        "exploration_noise exploration_noise_end": (0, 1e6), "noise_clip": (1e-12, 1e6),
        # (More, once clipped, is no noise but two points.)
        "policy_noise": (0, 10 * args.noise_clip if args.target_smoothing else 1e6),
        "gamma": (0, 1), "tau": (1e-12, 1), "seed": (0, 2**31 - 1),
        # One step at least; a memory that gets as full as learning wants it.
        "total_timesteps buffer_size": (args.num_envs, 1e12),
        "learning_starts": (1, args.buffer_size // max(1, args.num_envs) * args.num_envs)})
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
        if not np.isfinite(act.high / 2 - act.low / 2).all(): raise TypeError(f"unbounded {act}: see ppo_continuous.py")
        if (env.observation_space.shape, env.action_space) != (obs.shape, act): raise TypeError("evaluation differs")
        if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.SAME_STEP: raise TypeError("not SAME_STEP")
    return choose_device(args.device)


# What may differ from the checkpoint's flags under --resume and --evaluate: budget, device and logging.
CHANGEABLE = set("total_timesteps device compile track wandb_project_name wandb_entity capture_video log_every "
                 "eval_every eval_episodes checkpoint_every checkpoint_replay resume evaluate".split())


def main(args: Args) -> dict[str, float]:
    """Train (or, with --evaluate, only evaluate) and return the last value of every metric."""
    # Evaluation may start from other seeds than training did.
    args, checkpoint, run_dir = load_checkpoint(args, CHANGEABLE | ({"seed"} if args.evaluate else set()))
    device, rng = check(args), seed_everything(args.seed, args.torch_deterministic)
    torch.set_flush_denormal(True)  # momenta of dead ReLUs decay to numbers so small that CPUs are slow with them
    envs = make_envs(args, args.num_envs, args.seed)
    space, (scale, shift) = envs.single_action_space, action_transform(envs.single_action_space)
    obs_dim, action_dim = math.prod(envs.single_observation_space.shape), math.prod(space.shape)
    with or_stop(2, "networks and memory cannot be made", "Lower --hidden-size or --buffer-size."):
        agent = Agent(obs_dim, scale, shift, args.hidden_size).to(device)
        memory = ReplayMemory(args.buffer_size, args.num_envs, obs_dim, action_dim, device)
    optimizers = {name: torch.optim.Adam(network.parameters(), args.learning_rate, fused=True)
                  for name, network in (("critic", agent.critics), ("policy", agent.actor))}
    # What a checkpoint brings back, beside the flags and the generator: counters and seconds here, tensors in parts.
    run = types.SimpleNamespace(global_step=0, updates=0, owed_updates=0.0, skipped_updates=0, last_returns=[],
                                environment_seconds=0.0, update_seconds=0.0, rest_seconds=0.0, wall_seconds=0.0)
    parts = {"agent": agent, **{f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()}}
    if checkpoint: restore(checkpoint, run, parts, rng)
    if args.evaluate:
        returns, metrics = evaluate(args, agent, run_dir / "videos", f"evaluate_{time.time_ns()}")
        print(f"{args.env_id}: mean {np.mean(returns):.2f} of", *(f"{r:.2f}" for r in returns))
        return metrics

    if checkpoint and (replay := checkpoint["folder"] / f"replay_{run.global_step}.npz").exists():
        with or_stop(2, f"{replay} cannot be read", "Delete it: the memory is then filled anew."): memory.load(replay)
    elif checkpoint and args.checkpoint_replay: print(f"warning: {replay} is missing; refilling", file=sys.stderr)
    logger = Logger(run_dir, args, device, run.global_step)
    # One graph for a loss and its gradients (without, those of the critics in the policy's loss are computed, too).
    if args.compile: torch._dynamo.config.trace_autograd_ops = True
    # reduce-overhead: CUDA graphs on CUDA; on the CPU the same as the default mode.
    run_dir, step_update = logger.run_dir, torch.compile(update, mode="reduce-overhead") if args.compile else update
    budget = args.total_timesteps // args.num_envs * args.num_envs
    size, last_size = sum(x.nbytes for x in memory.data.values()) >> 20, len(memory) + budget - run.global_step
    print(f"{args.env_id}: {budget} steps, replay memory of {size} MiB, on {device} {run_dir}", flush=True)
    if last_size < args.learning_starts: print("warning: learning never starts (--learning-starts)", file=sys.stderr)

    to_device, bad_rows, previous_step = functools.partial(torch.as_tensor, device=device), [], run.global_step
    started, interval = time.perf_counter() - run.wall_seconds, 0.5 if sys.stderr.isatty() else 10
    bar = tqdm.tqdm(total=args.total_timesteps, initial=run.global_step, unit="step", mininterval=interval, leave=False)
    with contextlib.closing(envs), contextlib.closing(logger), bar, contextlib.ExitStack() as stack:
        caught, mend = catch_signals(stack), "Mend the environment, then --resume."
        with or_stop(3, f"{args.env_id} at its reset", mend):
            require_finite(obs := envs.reset(seed=(args.seed + run.global_step) % 2**31)[0])
        walk = np.zeros((args.num_envs, action_dim))  # the exploration noise, in half action ranges
        # sums, steps: of the running episodes, their rewards' sums and their lengths
        obs, (sums, steps) = obs.reshape(-1, obs_dim).astype(np.float32), np.zeros((2, args.num_envs))
        while True:
            # Save (at the end and when told to stop, too) and evaluate (at step 0 and the end, too).
            last, first = run.global_step >= budget, not checkpoint and run.global_step == 0 < args.eval_every
            if (told_to_stop := bool(caught)) or last or crossed(previous_step, run.global_step, args.checkpoint_every):
                # The memory first, under a name of its own: whenever this is cut short, a pair that fits is left.
                replay = run_dir / f"replay_{run.global_step}.npz"
                if args.checkpoint_replay: memory.save(replay)
                save_checkpoint(run_dir / "checkpoint.pt", args, run, parts, rng)
                for old in {*run_dir.glob("replay_*")} - {replay} if args.checkpoint_replay else (): old.unlink()
            if first or last or crossed(previous_step, run.global_step, args.eval_every):
                eval_returns, metrics = evaluate(args, agent, run_dir / "videos", f"step_{run.global_step}")
                logger.log(run.global_step, metrics, videos=f"step_{run.global_step}")
            if last or told_to_stop: break  # (told while it evaluated, only after it has saved above)

            previous_step, interval_start = run.global_step, time.perf_counter()
            rows, all_rewards, reward_terms = [], [], collections.Counter()
            # Steps until it is time to log, evaluate or save; told to stop, one of them.
            while run.global_step < budget and not (caught and all_rewards) and not crossed(
                    previous_step, run.global_step, args.log_every, args.eval_every, args.checkpoint_every):
                # Act: with noise around the policy's action, but at first at random over the whole action range.
                sigma = anneal(args.exploration_noise, args.exploration_noise_end, run.global_step + 1, budget)
                noise = rng.standard_normal((args.num_envs, action_dim), np.float32)  # of each environment's own
                walk = ornstein_uhlenbeck(walk, noise, sigma) if args.noise == "ou" else sigma * noise
                with torch.no_grad(): actions = agent.actor(to_device(obs)).cpu().numpy() + walk * scale
                if run.global_step < args.learning_starts: actions = rng.uniform(-1, 1, actions.shape) * scale + shift
                env_actions = actions.reshape(-1, *space.shape).astype(space.dtype).clip(space.low, space.high)
                step_start = time.perf_counter()
                with or_stop(3, f"{args.env_id} at step {run.global_step}", mend):
                    next_obs, rewards, terminations, truncations, infos = envs.step(env_actions)
                    require_finite(next_obs, rewards, *(x for x in infos.get("final_obs", ()) if x is not None))
                run.environment_seconds += time.perf_counter() - step_start
                run.global_step += args.num_envs

                # Store what the step led to: where an episode ended its last observation, not the reset's.
                dones, next_obs = terminations | truncations, next_obs.reshape(-1, obs_dim).astype(np.float32)
                led_to = next_obs.copy()
                for i in np.flatnonzero(dones): led_to[i] = infos["final_obs"][i].ravel()
                memory.add(obs, env_actions.reshape(-1, action_dim), rewards, led_to, terminations, truncations)
                # The environment's own parts of the reward. Where an episode ended, infos already tell of the reset.
                for info, which in ((infos, ~dones), (infos.get("final_info", {}), dones)):
                    for key in (k for k in info if str(k)[:7] == "reward_" and np.asarray(info[k]).dtype.kind in "fiu"):
                        reward_terms[f"rewards/{key[7:]}"] += info[key][which].sum()
                all_rewards.append(rewards.copy())
                obs, sums, steps = next_obs, sums + rewards, steps + 1
                for i in np.flatnonzero(dones):
                    logger.log(run.global_step, {"charts/episodic_return": sums[i], "charts/episodic_length": steps[i]})
                    run.last_returns = [*run.last_returns[-99:], float(sums[i])]
                    sums[i], steps[i], walk[i] = 0, 0, 0
                    bar.set_postfix({"return": f"{np.mean(run.last_returns):.1f}"}, refresh=False)
                bar.update(args.num_envs)

                # Learn: as many updates as this step calls for.
                update_start = time.perf_counter()
                if len(memory) >= args.learning_starts: run.owed_updates += args.utd_ratio * args.num_envs
                while run.owed_updates >= 1:
                    run.owed_updates, run.updates = run.owed_updates - 1, run.updates + 1
                    noise = to_device(rng.standard_normal((args.batch_size, action_dim), np.float32))
                    train_policy = not args.delayed_policy or run.updates % args.critics_per_policy_update == 0
                    batch = memory.sample(rng, args.batch_size)
                    stats = step_update(agent, optimizers, batch, noise, train_policy, args)
                    rows.append(dict(zip(stats, torch.stack(tuple(stats.values())), strict=True)))
                run.update_seconds += time.perf_counter() - update_start

            # Metrics: losses are means over the interval, read at its end only: reading waits for the GPU.
            skips = torch.stack([row["skipped"] for row in rows] or [torch.zeros(())]).tolist()
            for row, skipped in zip(rows, skips, strict=False):  # skipped: something was not finite
                # A good update of the critics alone says nothing about the policy: it ends no row of bad ones.
                bad_rows = [*bad_rows, row] if skipped else [] if "losses/actor_loss" in row else bad_rows
                if len(bad_rows) >= args.max_skipped_updates:
                    what = next((k for k, value in bad_rows[0].items() if not value.isfinite()), "a gradient")
                    stop(3, f"{what} went bad first, {len(bad_rows)} updates skipped. Check rewards, learning rates.")
            run.skipped_updates += int(sum(skips))
            run.wall_seconds = time.perf_counter() - started
            run.rest_seconds = run.wall_seconds - run.environment_seconds - run.update_seconds
            means = {name: torch.stack([row[name] for row in rows if name in row]).nanmean()
                     for name in {name: 0 for row in rows for name in row if name != "skipped"}}
            number = np.size(all_rewards)
            logger.log(run.global_step, means | {
                "losses/skipped_updates": run.skipped_updates, "charts/updates": run.updates,
                "charts/learning_rate": args.learning_rate, "charts/exploration_noise": sigma,
                "charts/reward_mean": np.mean(all_rewards), "charts/reward_min": np.min(all_rewards),
                "charts/reward_max": np.max(all_rewards),
                "charts/SPS": number / (time.perf_counter() - interval_start), "time/rest": run.rest_seconds,
                "time/environment": run.environment_seconds, "time/update": run.update_seconds,
                **{name: total / number for name, total in reward_terms.items()}})

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
