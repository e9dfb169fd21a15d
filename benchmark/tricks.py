"""What each speed trick of a script gives, each measured alone, beside the plain way of doing the same.

    OMP_NUM_THREADS=1 python benchmark/tricks.py --script ppo_continuous
    OMP_NUM_THREADS=1 python benchmark/tricks.py --script ppo_atari --table docs/ppo_atari.md

The two ways take turns in short windows, and a way counts with its best window, in processor time: what other processes
take away is mostly left out. Sizes are those of the script's defaults (HalfCheetah-v5, Breakout).
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import ROOT, commit, hardware, insert_table, now, write_json

sys.path.insert(0, str(ROOT))

import numpy as np
import ppo_atari as atari
import ppo_continuous as ppo
import torch

OBS_DIM, ACTION_DIM, STEPS, MINIBATCH = 17, 6, 2048, 64
IMAGE, NUM_BUTTONS, IMAGES = (4, 84, 84), 4, 256


def best_times(ways: list[Callable], calls: int, rounds: int = 15) -> list[float]:
    """Microseconds of processor time per call of each way."""
    best = [float("inf")] * len(ways)
    for way in ways:
        for _ in range(calls):
            way()
    for _ in range(rounds):
        for index, way in enumerate(ways):
            start = time.process_time()
            for _ in range(calls):
                way()
            best[index] = min(best[index], (time.process_time() - start) / calls * 1e6)
    return best


def acting() -> tuple[Callable, Callable]:
    """The policy's mean for one observation: PyTorch, NumPy."""
    network = ppo.Agent(OBS_DIM, ACTION_DIM).actor_mean
    policy, obs = ppo.numpy_policy(network), np.zeros((1, OBS_DIM), np.float32)

    @torch.no_grad()
    def plain() -> np.ndarray:
        return network(torch.from_numpy(obs)).numpy()

    return plain, lambda: policy(obs)


def values_afterwards() -> tuple[Callable, Callable]:
    """Values of a rollout of 2048 steps: one by one while acting, in one pass afterwards."""
    critic, obs = ppo.Agent(OBS_DIM, ACTION_DIM).critic, torch.randn(STEPS, 1, OBS_DIM)

    @torch.no_grad()
    def plain() -> list[torch.Tensor]:
        return [critic(row) for row in obs]

    @torch.no_grad()
    def trick() -> torch.Tensor:
        return critic(obs)

    return plain, trick


def gaussian() -> tuple[Callable, Callable]:
    """Log-probability of a minibatch, forward and backward: torch.distributions, written out."""
    actions, mean = torch.randn(MINIBATCH, ACTION_DIM), torch.randn(MINIBATCH, ACTION_DIM, requires_grad=True)
    log_std = torch.zeros(ACTION_DIM, requires_grad=True)

    def plain() -> None:
        torch.distributions.Normal(mean, log_std.exp().expand_as(mean)).log_prob(actions).sum(-1).mean().backward()

    return plain, lambda: ppo.gaussian_log_prob(actions, mean, log_std).mean().backward()


def adam() -> tuple[Callable, Callable]:
    """One step of Adam: PyTorch's default, fused."""
    steps = []
    for fused in (None, True):
        agent = ppo.Agent(OBS_DIM, ACTION_DIM)
        for parameter in agent.parameters():
            parameter.grad = torch.randn_like(parameter)
        steps.append(torch.optim.Adam(agent.parameters(), 3e-4, eps=1e-5, fused=fused).step)
    return steps[0], steps[1]


def clipped_step() -> tuple[Callable, Callable]:
    """Forward, backward, clip and step: with PyTorch's zero_grad and clip_grad_norm_, with `gradient_step`."""
    obs = torch.randn(MINIBATCH, OBS_DIM)

    def plain(loss: torch.Tensor, optimizer: torch.optim.Adam, max_grad_norm: float) -> None:
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_grad_norm)
        optimizer.found_inf = 1 - torch.isfinite(loss.detach() + norm).float()
        optimizer.step()

    def way(step: Callable) -> Callable:
        agent = ppo.Agent(OBS_DIM, ACTION_DIM)
        optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(3e-4), eps=1e-5, fused=True)
        heads = (lambda: agent.actor_mean(obs).mean(), lambda: agent.critic(obs).mean(), agent.actor_log_std.mean)
        return lambda: step(sum(head() for head in heads), optimizer, 0.5)

    return way(plain), way(ppo.gradient_step)


def compiled() -> tuple[Callable, Callable]:
    """A whole update: eager, --compile."""
    ways = []
    for function in (ppo.update, torch.compile(ppo.update)):
        agent, rows = ppo.Agent(OBS_DIM, ACTION_DIM), (OBS_DIM, ACTION_DIM, ACTION_DIM, None, None, None, None)
        optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(3e-4), eps=1e-5, fused=True)
        batch = tuple(torch.randn(MINIBATCH, *([] if width is None else [width])) for width in rows)
        arguments = (agent, optimizer, batch, torch.zeros(ACTION_DIM), torch.zeros(2), ppo.Args())
        ways.append(lambda function=function, arguments=arguments: function(*arguments))
    return ways[0], ways[1]


def atari_environments() -> tuple[Callable, Callable]:
    """One step of eight games of Breakout: wrappers in Python, ale-py's vector environment."""
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    game = {"frameskip": 1, "repeat_action_probability": 0.0}
    python = VecFrameStack(make_atari_env("ALE/Breakout-v5", n_envs=8, seed=1, env_kwargs=game), n_stack=4)
    ours = atari.make_envs(atari.Args(), 8, 1)
    python.reset(), ours.reset(seed=1)
    rng = np.random.default_rng(1)
    return lambda: python.step(rng.integers(0, 4, 8)), lambda: ours.step(rng.integers(0, 4, 8))


def image_update(agent: torch.nn.Module, channels_last: bool, function: Callable = atari.update) -> Callable:
    """A whole update of ppo_atari.py; the images lie in memory as the rollout has them, or plane by plane."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.randint(0, 255, (1024, *IMAGE), dtype=torch.uint8).to(memory_format=layout)
    rows = [images, torch.randint(0, NUM_BUTTONS, (1024,)), torch.full((1024,), -1.4), *torch.randn(3, 1024)]
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(2.5e-4), eps=1e-5, fused=True)
    arguments, coefficient = atari.Args(), torch.tensor(0.01)

    def step() -> None:
        chosen = torch.randint(0, 1024, (IMAGES,))
        function(agent, optimizer, [x[chosen] for x in rows], coefficient, arguments)

    return step


class Planes(atari.Agent):
    """The same network in PyTorch's usual layout, images divided out of place."""

    def __init__(self):
        super().__init__(IMAGE, NUM_BUTTONS)
        self.to(memory_format=torch.contiguous_format)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.network(obs.float() / 255)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def layout() -> tuple[Callable, Callable]:
    """A whole update: plane by plane, channels last."""
    return image_update(Planes(), False), image_update(atari.Agent(IMAGE, NUM_BUTTONS), True)


def image_layout() -> tuple[Callable, Callable]:
    """A whole update with a channels-last network: images turned at each update, and once when they are stored."""
    return tuple(image_update(atari.Agent(IMAGE, NUM_BUTTONS), once) for once in (False, True))


def bf16() -> tuple[Callable, Callable]:
    """A whole update: float32, --bf16."""
    return tuple(image_update(atari.Agent(IMAGE, NUM_BUTTONS, bf16), True) for bf16 in (False, True))


def compiled_images() -> tuple[Callable, Callable]:
    """A whole update: eager, --compile."""
    functions = (atari.update, torch.compile(atari.update))
    return tuple(image_update(atari.Agent(IMAGE, NUM_BUTTONS), True, function) for function in functions)


TRICKS = {
    "ppo_continuous": {
        "act in NumPy (`numpy_policy`), one observation": (acting, 300),
        "values after the rollout, 2048 steps": (values_afterwards, 2),
        "Gaussian written out (`gaussian_log_prob`), forward and backward": (gaussian, 100),
        "fused Adam, one step": (adam, 100),
        "clip written out (`gradient_step`), forward to step": (clipped_step, 60),
        "`--compile`, a whole update": (compiled, 60),
    },
    "ppo_atari": {
        "ale-py's vector environment, 8 games, one step": (atari_environments, 20),
        "channels last, a whole update": (layout, 1),
        "of that: images stored channels last": (image_layout, 1),
        "`--compile`, a whole update": (compiled_images, 1),
        "`--bf16`, a whole update": (bf16, 1),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=TRICKS, default="ppo_continuous")
    parser.add_argument("--table", type=Path, help="put the table between this file's markers results:tricks")
    parser.add_argument("--results-dir", type=Path, default=Path("benchmark/results/speed"))
    arguments = parser.parse_args()
    rows, lines = [], ["| Trick | plain, us | with it, us | times |", "|---|---|---|---|"]
    for name, (make, calls) in TRICKS[arguments.script].items():
        plain, trick = best_times(list(make()), calls)
        rows.append({"trick": name, "plain_us": round(plain, 1), "trick_us": round(trick, 1)})
        lines.append(f"| {name} | {plain:,.0f} | {trick:,.0f} | {plain / trick:.1f} |")
        print(lines[-1], flush=True)
    entry = {"date": now(), "commit": commit(), "hardware": hardware("cpu"), "threads": torch.get_num_threads()}
    entry |= {"torch": torch.__version__, "rows": rows}
    write_json(arguments.results_dir / f"{arguments.script}_tricks.json", entry)
    if arguments.table:
        insert_table(arguments.table, "tricks", "\n".join(lines))


if __name__ == "__main__":
    main()
