# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py>=0.12.1,<0.13",
#     "gymnasium>=1.4,<2",
#     "moviepy>=2.1",
#     "numpy>=2.0",
#     "opencv-python-headless>=4.10",
#     "stable-baselines3>=2.9,<3",
#     "tensorboard>=2.18",
#     "torch>=2.11,<3",
#     "tqdm>=4.66",
#     "tyro>=1.0,<2",
#     "wandb>=0.19",
# ]
# ///
"""Proximal Policy Optimization (PPO) for Atari games: images in, one of a few buttons out.

PPO collects a short rollout with the current policy, then improves the policy on it for a few epochs while the
probability ratio between new and old policy is kept from moving far (clip).
    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv:1707.06347
    Mnih et al., "Human-level control through deep reinforcement learning", Nature 518, 2015 (network, preprocessing)
    Machado et al., "Revisiting the Arcade Learning Environment", 2017, arXiv:1709.06009 (--sticky-actions 0.25)

    ratio   = pi(a|s) / pi_old(a|s)
    L       = -mean(min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A)) + c_v * L_V - c_e * entropy
    L_V     = 0.5 * mean((V(s) - R)^2)
    delta_t = r_t + gamma * (1 - terminated_t) * V(s_{t+1}) - V(s_t)
    A_t     = delta_t + gamma * lambda * (1 - done_t) * A_{t+1},   R_t = A_t + V(s_t)

Run:
    python ppo_atari.py                                                 # Breakout, ten million steps
    python ppo_atari.py --env-id ALE/Pong-v5 --total-timesteps 2000000
    torchrun --nproc-per-node 4 ppo_atari.py --num-envs 32              # one process per GPU; all numbers are totals

Expect: on Breakout a score of 20 after a million steps (one seed), on Pong -3.6 and 1.9 after two million (two seeds;
it starts at -20), both still rising, at some 160 steps a second on one core of a virtual AMD EPYC without bf16
instructions and 270 on two.

Differs from the paper (most are the customary details of PPO implementations; docs/ppo_atari.md has the reasons):
    1. The value loss is clipped like the policy's (--no-clip-vloss for the paper's), with its own --vf-clip-coef.
    2. Advantages are normalised per minibatch; the gradient norm is clipped; orthogonal initialisation; Adam eps 1e-5.
    3. Four epochs (the paper: three) of four minibatches; clip range 0.1 throughout (the paper anneals it with the
       learning rate); 0.5 * 0.5 of the value's squared error in the loss (the paper: all of it).
    4. A lost life ends the return (V = 0 after it), but neither the game nor the stack of frames.
    5. At the limit of 108,000 frames the value of the last observation is bootstrapped.
    6. Evaluation samples actions, since the greedy policy can play on forever without scoring in some games.
    7. After --resume new games are started (the emulator's state is not saved); all else continues.

Read `main` first, then "The math".
"""

import collections.abc, contextlib, dataclasses, datetime, functools, importlib.metadata, itertools
import json, math, os, random, re, shlex, signal, subprocess, sys, time, types
from pathlib import Path
from typing import BinaryIO, Literal

import ale_py, gymnasium as gym, numpy as np, torch, torch.distributed as dist, tqdm, tyro
from stable_baselines3.common.atari_wrappers import AtariWrapper
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

gym.register_envs(ale_py), ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
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
    bf16: bool = False
    """bfloat16 autocast in the convolutional network; pays on GPUs and on CPUs with bf16 instructions only"""
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
    log_every: int = 10_240
    """steps between two rows of losses (episodes are always logged)"""
    eval_every: int = 500_000
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
    env_id: str = "ALE/Breakout-v5"
    """gymnasium id, also module:Env-v0"""
    num_envs: int = 8
    """environments stepped side by side"""
    sticky_actions: float = 0.0
    """probability that the emulator repeats the previous action; 0.25 is Machado et al.'s protocol"""
    noop_max: int = 30
    """each game starts with a random number of idle frames up to this (the emulator's pipeline: one fewer)"""
    total_timesteps: int = 10_000_000
    """budget: agent steps, summed over environments (rounded down to whole rollouts)"""

    # Algorithm
    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    anneal_lr: bool = True
    """lower the learning rate linearly; the last update still has 1/iterations of it"""
    adam_eps: float = 1e-5
    """epsilon of Adam"""
    num_steps: int = 128
    """rollout length per environment"""
    gamma: float = 0.99
    """discount (gamma)"""
    gae_lambda: float = 0.95
    """exponent of generalized advantage estimation (lambda)"""
    num_minibatches: int = 4
    """minibatches per epoch; sizes differ by at most one"""
    update_epochs: int = 4
    """passes over each rollout"""
    norm_adv: bool = True
    """normalise advantages to mean 0, std 1 in each minibatch"""
    clip_coef: float = 0.1
    """clip range of the probability ratio (epsilon)"""
    clip_vloss: bool = True
    """clip the value's change, too"""
    vf_clip_coef: float = 0.1
    """clip range of the value's change, in units of the (scaled) return"""
    ent_coef: float = 0.01
    """coefficient of the entropy bonus"""
    ent_coef_end: float | None = None
    """entropy coefficient at the end of training, reached linearly; None = constant"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    max_grad_norm: float = 0.5
    """clip range of the global gradient norm"""
    target_kl: float | None = None
    """end the epochs of a rollout after one whose mean approx_kl is above this (the KL between old and new policy)"""
    clip_reward: float = 1.0
    """clip range of the rewards that the critic learns from"""

    batch_size = property(lambda self: self.num_envs * self.num_steps)
    num_iterations = property(lambda self: self.total_timesteps // self.batch_size)
    render_mode = property(lambda self: "rgb_array" if self.capture_video else None)
    rank = property(lambda self: int(os.getenv("RANK", "0")))  # torchrun says which process this is, and of how many
    world_size = property(lambda self: int(os.getenv("WORLD_SIZE", "1")))
    local_envs = property(lambda self: self.num_envs // self.world_size)


# ---------------------------------------------------------------------------------------------------------------------
# Environment
# ---------------------------------------------------------------------------------------------------------------------
def make_envs(args: Args, num_envs: int, seed: int) -> gym.vector.VectorEnv:
    """The training environments, in SAME_STEP autoreset. Replace it to train on anything else that shows images.

    ale-py's own vector environment: uint8 (num_envs, 4, 84, 84) grey frames, four emulator frames per step, raw
    rewards. With life_loss_info a lost life sets `terminated` but the game goes on (episodic_life would restart it).
    `seed` is for environments that want one when they are made: these get theirs at their reset.
    """
    return gym.make_vec(args.env_id, num_envs, "vector_entry_point", autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
                        life_loss_info=True, reward_clipping=False, repeat_action_probability=args.sticky_actions,
                        noop_max=args.noop_max, num_threads=torch.get_num_threads())


def make_eval_env(args: Args, seed: int, render_mode: str | None = None) -> gym.Env:
    """One whole game per episode, raw score, on the field's reference preprocessing; it can render."""
    env = gym.make(args.env_id, frameskip=1, repeat_action_probability=args.sticky_actions, render_mode=render_mode)
    env = AtariWrapper(env, noop_max=args.noop_max, terminal_on_life_loss=False, clip_reward=False)  # (84, 84, 1)
    env = gym.wrappers.ReshapeObservation(env, env.observation_space.shape[:2])
    return gym.wrappers.FrameStackObservation(env, 4, padding_type="zero")  # (4, 84, 84), as in training


def game_over(terminated: np.ndarray, truncated: np.ndarray, frame: np.ndarray, last_frame: np.ndarray) -> np.ndarray:
    """Where a game has ended and a new one begun, (N,): a lost life is `terminated`, too, but the game's count of
    frames goes on. frame and last_frame are the emulator's episode_frame_number after and before the step, or both 0.
    """
    return truncated | (terminated & (frame <= last_frame))


def require_finite(*arrays: np.ndarray) -> None:
    """Raise before an observation or reward that is nan, or infinite as float32, reaches anything that learns."""
    if not all((np.abs(x) < 3.4e38).all() for x in arrays): raise ValueError(f"observation/reward not finite: {arrays}")


# ---------------------------------------------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------------------------------------------
def layer_init(layer: nn.Linear | nn.Conv2d, std: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias."""
    nn.init.orthogonal_(layer.weight, std), nn.init.zeros_(layer.bias)
    return layer


# differs from ppo_continuous.py: one network for images, with two heads
class Agent(nn.Module):
    """The network of the Nature paper with two heads: logits of the actions, and the state's value."""

    def __init__(self, obs_shape: tuple[int, int, int], num_actions: int, bf16: bool = False):
        super().__init__()
        channels, *side = obs_shape
        for kernel, stride in ((8, 4), (4, 2), (3, 1)): side = [(n - kernel) // stride + 1 for n in side]  # 84: 7
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(channels, 32, 8, 4)), nn.ReLU(), layer_init(nn.Conv2d(32, 64, 4, 2)), nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten(),
            layer_init(nn.Linear(64 * math.prod(side), 512)), nn.ReLU())
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)  # small: at first all actions are equally likely
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.to(memory_format=torch.channels_last)  # convolutions run faster on it, CPU and GPU

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 images (B, C, H, W) to float32 logits (B, A) and values (B,)."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            x = obs.to(self.dtype, memory_format=torch.channels_last).div_(255)
            hidden = self.network(x).float()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------
def rollout_memory(shape: tuple[int, int], obs_shape: tuple[int, ...], num_actions: int, device: torch.device) -> tuple:
    """Arrays (T, N, ...) of one rollout: what the network reads and writes where it is, the rest in NumPy.

    Images stay bytes until they enter the network, and lie in memory as convolutions want them, channels last.
    """
    images = torch.empty((math.prod(shape), *obs_shape), dtype=torch.uint8, device=device)
    observations = images.to(memory_format=torch.channels_last).unflatten(0, shape)
    logits, values = torch.zeros((*shape, num_actions), device=device), torch.zeros(shape, device=device)
    actions, rewards = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    return observations, logits, values, actions, rewards, *np.zeros((2, *shape), bool)  # terminations, dones


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


def categorical_log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """log softmax(logits)[a]: (..., A), (...) -> (...)."""
    return logits.log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """-sum(p log p) of p = softmax(logits): (..., A) -> (...)."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


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


# differs from ppo_continuous.py: the moments are those of all processes' samples
def normalize_advantages(advantages: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """To mean 0 and std 1: (B,) -> (B,)."""
    return (advantages - mean) / (std + 1e-8)


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


def anneal(start: float, end: float | None, iteration: int, num_iterations: int) -> float:
    """Linear from start (iteration 1) towards end, which the iteration after the last would reach; None = constant."""
    return start if end is None else start + (end - start) * (iteration - 1) / num_iterations


# ---------------------------------------------------------------------------------------------------------------------
# Update
# ---------------------------------------------------------------------------------------------------------------------
def update(agent: Agent, optimizer: torch.optim.Adam, minibatch: tuple[Tensor, ...], ent_coef: Tensor,
           args: Args) -> dict[str, Tensor]:
    """One gradient step on one minibatch. Returns detached scalars and never waits for the GPU."""
    # The order is that of `batch` in main: (B, C, H, W), then (B,) each.
    obs, actions, old_logprobs, advantages, returns, old_values = minibatch
    logits, values = agent(obs)  # (B, A), (B,)
    logprobs = categorical_log_prob(logits, actions)
    if args.norm_adv: advantages = normalize_advantages(advantages, *joint_moments(advantages))
    pg_loss = policy_loss(logprobs, old_logprobs, advantages, args.clip_coef)
    v_loss = value_loss(values, old_values, returns, args.vf_clip_coef if args.clip_vloss else None)
    entropy = categorical_entropy(logits).mean()
    loss = pg_loss + args.vf_coef * v_loss - ent_coef * entropy
    logratio = (logprobs - old_logprobs).detach()
    stats = {"losses/policy_loss": pg_loss.detach(), "losses/value_loss": v_loss.detach(),
             "losses/entropy": entropy.detach(), "losses/old_approx_kl": -logratio.mean(),
             "losses/approx_kl": approx_kl(logratio), "losses/clipfrac": clip_fraction(logratio, args.clip_coef)}
    stats["losses/grad_norm"], stats["skipped"] = gradient_step(loss, optimizer, args.max_grad_norm)
    return stats


# differs from ppo_continuous.py: the gradient is the mean over torchrun's processes
@torch.compiler.disable  # a compiled update has its backward pass compiled already; tracing fused Adam only costs time
def gradient_step(loss: Tensor, optimizer: torch.optim.Adam, max_grad_norm: float) -> tuple[Tensor, Tensor]:
    """Backward, average over processes, clip, step. Returns (gradient norm before clipping, 1 if skipped or 0).

    A loss or gradient that is not finite changes nothing: fused Adam skips the step by itself when told so.
    """
    parameters = optimizer.param_groups[0]["params"]
    for p in parameters: p.grad = None
    loss.backward()
    grads, loss = [p.grad for p in parameters], loss.detach()
    if dist.is_initialized():  # all in one message; one process' bad loss or gradient is bad for all
        flat = joint_mean(torch.cat([loss[None], *(grad.flatten() for grad in grads)]))
        loss, *means = flat.split([1, *(grad.numel() for grad in grads)])
        for grad, mean in zip(grads, means, strict=True): grad.copy_(mean.view_as(grad))
    # nn.utils.clip_grad_norm_ written out: for small networks its checks take longer than the sums.
    grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1))
    optimizer.found_inf = 1 - torch.isfinite(loss.squeeze() + grad_norm).float()
    optimizer.step()
    return grad_norm, optimizer.found_inf


# ---------------------------------------------------------------------------------------------------------------------
# Evaluate
# ---------------------------------------------------------------------------------------------------------------------
def evaluate(args: Args, agent: Agent, folder: Path, name: str) -> tuple[list, dict]:
    """Play `--eval-episodes` whole games, sampling actions: (every score, the `eval/*` metrics).

    Game k starts from the same seed in every evaluation. With --capture-video the first one is recorded in `folder`.
    """
    device, rng = agent.actor.weight.device, np.random.default_rng([args.seed, 1])
    scores, lengths = np.zeros((2, args.eval_episodes))
    with or_stop(3, f"{args.env_id} in evaluation", "Mend it, then --resume."), contextlib.ExitStack() as stack:
        games = [make_eval_env(args, args.seed, args.render_mode) for _ in scores]
        # The first episode of the first game: 60 frames a second, of which every fourth is shown.
        if args.capture_video: games[0] = gym.wrappers.RecordVideo(games[0], folder, name_prefix=name, fps=15)
        for game in games: stack.callback(game.close)
        obs = np.stack([game.reset(seed=(1_000_000 * (args.seed + 1) + k) % 2**31)[0] for k, game in enumerate(games)])
        over = np.zeros(args.eval_episodes, bool)
        while not over.all():  # all games side by side, for one forward pass per step
            playing = np.flatnonzero(~over)
            with torch.no_grad(): logits = agent(torch.as_tensor(obs[playing], device=device))[0].cpu().numpy()
            for k, action in zip(playing, sample_actions(logits, rng.gumbel(size=logits.shape)), strict=True):
                obs[k], reward, terminated, truncated, _ = games[k].step(action)
                require_finite(reward)
                over[k], scores[k], lengths[k] = terminated or truncated, scores[k] + reward, lengths[k] + 1
    return scores.tolist(), {"eval/episodic_return": scores.mean(), "eval/episodic_length": lengths.mean()}


def sample_actions(logits: np.ndarray, gumbel_noise: np.ndarray) -> np.ndarray:
    """A sample of softmax(logits) per row is the argmax of logits plus standard Gumbel noise: (N, A) -> (N,)."""
    return (logits + gumbel_noise).argmax(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing
# ---------------------------------------------------------------------------------------------------------------------
def stop(code: int, message: str) -> None:
    """Exit with one line on stderr. 2: refused before anything was written; 3: stopped in training."""
    print("\n" * (code == 3) + f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(code)


# differs from ppo_continuous.py: each of torchrun's processes takes a GPU of its own
def choose_device(name: str) -> torch.device:
    """The device of that name, tried out; auto is cuda or cpu."""
    name = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    with or_stop(2, f"--device {name}", "Use --device cpu, or install a PyTorch built for this device."):
        if name == "cuda": torch.cuda.set_device(int(os.getenv("LOCAL_RANK", "0")))
        return torch.zeros(1, device=name).device


def join_processes(args, device: torch.device, tensors: list[Tensor]) -> None:
    """Under torchrun: meet the other processes and start from the tensors of the first."""
    if args.world_size == 1: return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(days=1))
    for tensor in tensors: dist.broadcast(tensor, 0)


def joint_mean(x: Tensor) -> Tensor:
    """Mean of x over torchrun's processes, in place; x itself without torchrun."""
    if dist.is_initialized(): dist.all_reduce(x.div_(dist.get_world_size()))
    return x


def joint_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sample std of all processes' x, which is (B,) in each."""
    if not dist.is_initialized(): return x.mean(), x.std()
    mean, count = joint_mean(x.mean()), len(x) * dist.get_world_size()
    return mean, (joint_mean((x - mean).square().mean()) * count / (count - 1)).sqrt()


def gather(x: object) -> list:
    """[x of the first process, x of the second, ...]."""
    everyone = [x] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized(): dist.all_gather_object(everyone, x)
    return everyone


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
    if args.num_envs % args.world_size:
        stop(2, f"--num-envs {args.num_envs} cannot be shared among {args.world_size} processes. Use a multiple.")
    check_ranges(args, {
        "num_envs num_steps update_epochs eval_episodes max_skipped_updates": (1, 1e12),
        "learning_rate adam_eps max_grad_norm clip_coef vf_clip_coef clip_reward target_kl": (1e-12, 1e12),
        "ent_coef ent_coef_end vf_coef log_every eval_every checkpoint_every": (0, 1e12),
        "gamma gae_lambda sticky_actions": (0, 1), "noop_max": (0, 30), "seed": (0, 2**31 - 1),
        # One rollout at least, and for each minibatch one sample at least, or two to normalise.
        "total_timesteps": (args.batch_size, 1e12),
        "num_minibatches": (1, args.local_envs * args.num_steps // (1 + args.norm_adv))})
    folder = next(path for path in Path(args.runs_dir, "x").absolute().parents if path.exists())
    # (The slash: a file will not do.)
    if not (args.evaluate or os.access(f"{folder}/", os.W_OK)): stop(2, f"{folder} is not writable. Change --runs-dir.")
    if len(f"{args.env_id}{args.exp_name}".encode()) > 200: stop(2, "the run's name is too long. Shorten --exp-name.")
    with or_stop(2, "--track", "Install wandb, then `wandb login` or set WANDB_MODE=offline."):
        login = importlib.import_module("wandb").login if args.track and not args.evaluate else None
        if login and os.getenv("WANDB_MODE", "online") == "online" and not login(prompt=False): raise PermissionError
    with or_stop(2, "--compile", "Install a C++ compiler (g++), or leave it out."):
        if args.compile and not args.evaluate: torch.compile(torch.sin)(torch.ones(2).to(choose_device(args.device)))
    advice = "Try an Atari game, ALE/Pong-v5 say; dqn.py (vectors) or ppo_continuous.py (continuous actions) for others"
    with or_stop(2, f"--env-id {args.env_id} cannot be used", advice):
        envs, env = make_envs(args, 1, args.seed), make_eval_env(args, args.seed, args.render_mode)
        env.reset(seed=args.seed)
        if args.capture_video: importlib.import_module("moviepy"), env.render()
        envs.close(), env.close()
        obs, act = envs.single_observation_space, envs.single_action_space
        images = obs.dtype == np.uint8 and len(obs.shape) == 3 and min(obs.shape[1:]) >= 36
        if not images or not isinstance(act, gym.spaces.Discrete) or act.start:
            raise TypeError(f"it needs images (channels, height, width) and actions 0, 1, ..., not {obs} and {act}")
        if (env.observation_space.shape, env.action_space) != (obs.shape, act): raise TypeError("evaluation differs")
        if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.SAME_STEP: raise TypeError("not SAME_STEP")
    return choose_device(args.device)


# What may differ from the checkpoint's flags under --resume and --evaluate: budget, device and logging.
CHANGEABLE = set("total_timesteps device bf16 compile track wandb_project_name wandb_entity capture_video log_every "
                 "eval_every eval_episodes checkpoint_every resume evaluate".split())


def main(args: Args) -> dict[str, float]:
    """Train (or, with --evaluate, only evaluate) and return the last value of every metric.

    Under torchrun every process runs this on its share of the environments; only the first one writes.
    """
    # Evaluation may start from other seeds than training did.
    args, checkpoint, run_dir = load_checkpoint(args, CHANGEABLE | ({"seed"} if args.evaluate else set()))
    device, rng = check(args), seed_everything(args.seed, args.torch_deterministic)
    first_env, chief = args.rank * args.local_envs, args.rank == 0
    envs = make_envs(args, args.local_envs, args.seed + first_env)
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)
    agent = Agent(obs_shape, num_actions, args.bf16).to(device)
    # The learning rate is a tensor, so that a compiled update sees it change.
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(args.learning_rate), eps=args.adam_eps, fused=True)
    # What a checkpoint brings back, beside the flags and the generator: counters and seconds here, tensors in parts.
    run = types.SimpleNamespace(iteration=0, global_step=0, skipped_updates=0, last_returns=[],
                                environment_seconds=0.0, update_seconds=0.0, rest_seconds=0.0, wall_seconds=0.0)
    parts = {"agent": agent, "optimizer": optimizer}
    if checkpoint: restore(checkpoint, run, parts, rng)
    if args.evaluate:
        if not chief: return {}
        scores, metrics = evaluate(args, agent, run_dir / "videos", f"evaluate_{time.time_ns()}")
        print(f"{args.env_id}, sticky actions {args.sticky_actions}: mean {np.mean(scores):.2f} of", *scores)
        return metrics

    join_processes(args, device, list(agent.state_dict().values()))
    if chief: run_dir = (logger := Logger(run_dir, args, device, run.global_step)).run_dir
    # reduce-overhead: CUDA graphs on CUDA; on the CPU the same as the default mode.
    step_update = torch.compile(update, mode="reduce-overhead") if args.compile else update
    if chief: print(f"{args.env_id}, sticky actions {args.sticky_actions}: {args.num_iterations} rollouts of "
                    f"{args.batch_size} steps on {args.world_size} x {device} {run_dir}", flush=True)

    rollout = rollout_memory((args.num_steps, args.local_envs), obs_shape, num_actions, device)
    observations, logits, values, actions, rewards, terminations, dones = rollout
    to_device, bad_rows, previous_step = functools.partial(torch.as_tensor, device=device), [], run.global_step
    started, interval = time.perf_counter() - run.wall_seconds, 0.5 if sys.stderr.isatty() else 10
    bar = tqdm.tqdm(total=args.total_timesteps, initial=run.global_step, unit="step", mininterval=interval, leave=False,
               disable=not chief)
    with contextlib.closing(envs), bar, contextlib.ExitStack() as stack:
        if chief: stack.callback(logger.close)
        caught, mend = catch_signals(stack), "Mend the environment, then --resume."
        with or_stop(3, f"{args.env_id} at its reset", mend):
            # (The emulator's seeds are 32-bit, and those of the environments follow this one.)
            obs, infos = envs.reset(seed=(args.seed + first_env + run.global_step) % (2**31 - args.num_envs))
        # (Without its count of frames every done is the end of a game.)
        frame, (scores, lengths) = infos.get("episode_frame_number", 0), np.zeros((2, args.local_envs))
        while True:
            # Between two rollouts: save (at the end and when told to stop, too), evaluate (at step 0 and the end, too).
            last, first = run.iteration >= args.num_iterations, not checkpoint and run.iteration == 0 < args.eval_every
            told_to_stop = list(itertools.chain(*gather(caught)))  # by a signal to any of the processes
            if chief and (last or told_to_stop or crossed(previous_step, run.global_step, args.checkpoint_every)):
                save_checkpoint(run_dir / "checkpoint.pt", args, run, parts, rng)
            if chief and (first or last or crossed(previous_step, run.global_step, args.eval_every)):
                eval_scores, metrics = evaluate(args, agent, run_dir / "videos", f"step_{run.global_step}")
                logger.log(run.global_step, metrics, videos=f"step_{run.global_step}")
            if last or told_to_stop: break

            # Schedules: full at the first iteration; the last still has 1/num_iterations of the way to go.
            run.iteration, previous_step, rollout_start = run.iteration + 1, run.global_step, time.perf_counter()
            rate = anneal(args.learning_rate, 0.0 if args.anneal_lr else None, run.iteration, args.num_iterations)
            optimizer.param_groups[0]["lr"].fill_(rate)
            ent_coef = anneal(args.ent_coef, args.ent_coef_end, run.iteration, args.num_iterations)

            # Rollout. All processes draw the same noise for all environments, and each uses its share: so one
            # generator is all there is to save, and the number of processes may change at --resume.
            finals, episodes = [np.zeros((0, *obs_shape), np.uint8)], []  # finals: last observations at the frame limit
            for t in range(args.num_steps):
                observations[t] = to_device(obs)
                with torch.no_grad(): logits[t], values[t] = agent(observations[t])
                noise = rng.gumbel(size=(args.num_envs, num_actions))[first_env:first_env + args.local_envs]
                actions[t] = sample_actions(logits[t].cpu().numpy(), noise)
                step_start = time.perf_counter()
                with or_stop(3, f"{args.env_id} at step {run.global_step}", mend):
                    obs, rewards[t], terminations[t], truncated, infos = envs.step(actions[t])
                    require_finite(rewards[t])
                run.environment_seconds += time.perf_counter() - step_start
                run.global_step += args.num_envs
                dones[t] = terminations[t] | truncated
                # final_obs has meaning only where a game has ended: at a lost life the next observation is obs.
                finals += [infos["final_obs"][i][None] for i in np.flatnonzero(truncated & ~terminations[t])]
                last_frame, frame = frame, infos.get("episode_frame_number", 0)
                scores, lengths = scores + rewards[t], lengths + 1
                for i in np.flatnonzero(game_over(terminations[t], truncated, frame, last_frame)):
                    episodes.append((run.global_step, float(scores[i]), float(lengths[i])))
                    scores[i], lengths[i] = 0, 0

            # Advantages, from the values of the policy that made the rollout.
            update_start = time.perf_counter()
            with torch.no_grad():
                actions_t, rewards_t, *ends = map(to_device, (actions, rewards, terminations, dones))
                # V of the next row; at the frame limit V of the last observation; after a death compute_gae takes none.
                next_values = torch.cat([values[1:], agent(to_device(obs))[1][None]])
                # finals came step by step, environment by environment: the order of a boolean index over (T, N).
                next_values[to_device(dones & ~terminations)] = agent(to_device(np.concatenate(finals)))[1]
                clipped = rewards_t.clamp(-args.clip_reward, args.clip_reward)  # one scale for all games
                advantages, returns = compute_gae(clipped, values, next_values, *ends, args.gamma, args.gae_lambda)
                old_logprobs = categorical_log_prob(logits, actions_t)
            # Each (T * N, ...):
            batch = [x.flatten(0, 1) for x in (observations, actions_t, old_logprobs, advantages, returns, values)]

            # Epochs: each uses every sample once, in minibatches drawn anew.
            # The coefficient is a tensor, so that a compiled update sees it change.
            coefficient, rows = torch.tensor(ent_coef, device=device), []
            for _ in range(args.update_epochs):
                for minibatch in to_device(rng.permutation(len(batch[0]))).tensor_split(args.num_minibatches):
                    stats = step_update(agent, optimizer, [x[minibatch] for x in batch], coefficient, args)
                    rows.append(torch.stack(tuple(stats.values())))
                kl = torch.stack(rows[-args.num_minibatches:])[:, list(stats).index("losses/approx_kl")].nanmean()
                if args.target_kl and joint_mean(kl) > args.target_kl: break
            table = joint_mean(torch.stack(rows)).cpu().numpy()  # (updates, metrics); the wait, but for --target-kl
            run.update_seconds += time.perf_counter() - update_start

            for row in table:  # the last column says whether the update was skipped, because something was not finite
                bad_rows = [*bad_rows, row] if row[-1] else []
                if len(bad_rows) >= args.max_skipped_updates:
                    what = list(stats)[np.isfinite(bad_rows[0]).argmin()]
                    stop(3, f"{what} went bad first, {len(bad_rows)} updates skipped. Check rewards, --learning-rate.")
            run.skipped_updates += round(float(table[:, -1].sum()))

            # Metrics: losses are means over the last epoch; scores are those of whole games, in the game's own points.
            for step, score, length in sorted(itertools.chain(*gather(episodes))):
                run.last_returns = [*run.last_returns[-99:], score]
                if chief: logger.log(step, {"charts/episodic_return": score, "charts/episodic_length": length})
            run.wall_seconds = time.perf_counter() - started
            run.rest_seconds = run.wall_seconds - run.environment_seconds - run.update_seconds
            if run.iteration == args.num_iterations or crossed(previous_step, run.global_step, args.log_every):
                means = np.ma.masked_invalid(table[-args.num_minibatches:, :-1]).mean(0).filled(np.nan)
                everyones = (gather(x.cpu()) for x in (rewards_t, values, returns))
                all_rewards, all_values, all_returns = (torch.cat(shares, 1) for shares in everyones)
                if chief: logger.log(run.global_step, dict(zip(stats, means, strict=False)) | {
                    "losses/explained_variance": explained_variance(all_values, all_returns),
                    "losses/ent_coef": ent_coef, "losses/value_mean": all_values.mean(),
                    "losses/skipped_updates": run.skipped_updates, "charts/reward_mean": all_rewards.mean(),
                    "charts/reward_min": all_rewards.min(), "charts/reward_max": all_rewards.max(),
                    "charts/SPS": args.batch_size / (time.perf_counter() - rollout_start), "charts/learning_rate": rate,
                    "charts/update_epochs": len(rows) // args.num_minibatches, "time/update": run.update_seconds,
                    "time/environment": run.environment_seconds, "time/rest": run.rest_seconds})
            bar.set_postfix({"return": f"{np.mean(run.last_returns):.1f}" if run.last_returns else "-"}, refresh=False)
            bar.update(args.batch_size)

    if dist.is_initialized(): dist.destroy_process_group()
    how = ["torchrun", "--nproc-per-node", str(args.world_size)] if args.world_size > 1 else ["python"]
    if last and chief:
        summary = {"steps": run.global_step, **{k: v for k, v in vars(run).items() if k.endswith("_seconds")},
                   "steps_per_second": run.global_step / run.wall_seconds, "final_evaluation": eval_scores,
                   "last_training_return": float(np.mean(run.last_returns)) if run.last_returns else None}
        write_whole(run_dir / "summary.json", json.dumps(summary, indent=2))
        print(f"evaluation at step {run.global_step}, sticky actions {args.sticky_actions}: {np.mean(eval_scores):.1f} "
              f"+- {np.std(eval_scores):.1f}")
    elif chief: print("saved. Continue:", shlex.join([*how, sys.argv[0], "--resume", str(run_dir)]), flush=True)
    if told_to_stop: raise SystemExit(128 + told_to_stop[0])
    return {"global_step": run.global_step, **(logger.last if chief else {})}


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
