"""What is particular to ppo_atari.py: the emulator's facts, the loop around them, the network, several processes."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import ppo_atari as ppo
import ppo_continuous
import pytest
import torch
from ale_py import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from harness import run_dirs
from scipy import stats as scipy_stats
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from torch import nn
from torch.distributions import Categorical

TINY = {
    "env_id": "ALE/Breakout-v5",
    "num_envs": 2,
    "num_steps": 8,
    "total_timesteps": 16,
    "num_minibatches": 1,
    "update_epochs": 1,
    "eval_every": 0,
    "eval_episodes": 1,
    "log_every": 1,
    "checkpoint_every": 0,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def alone(empty_folder, monkeypatch):
    """Every test runs in an empty folder, alone in the world."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def short_evaluation(monkeypatch):
    """Games of evaluation end after three steps, where they are not what is tested."""
    real = ppo.make_eval_env
    monkeypatch.setattr(ppo, "make_eval_env", lambda *given: gym.wrappers.TimeLimit(real(*given), 3))


def args(**changes) -> ppo.Args:
    return ppo.Args(**{**TINY, **changes})


def train(**changes) -> tuple[dict, Path]:
    """Metrics that main returned and the run's folder."""
    return ppo.main(args(**changes)), run_dirs()[-1]


def logged(run_dir: Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) of the rows of metrics.csv."""
    with (run_dir / "metrics.csv").open() as file:
        return [(int(step), float(value)) for step, name, value in list(csv.reader(file))[1:] if name == metric]


def spy(monkeypatch, name: str) -> list:
    """(arguments, result) of every call of the script's function, as they were then."""
    calls, real = [], getattr(ppo, name)

    def call(*given):
        result = real(*given)
        calls.append((tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in given), result))
        return result

    monkeypatch.setattr(ppo, name, call)
    return calls


def close(actual, expected, tolerance=1e-6):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (actual, expected))
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


class Blind(nn.Module):
    """In place of the agent: presses every button equally often; the value is the newest image's first pixel."""

    def __init__(self, obs_shape, num_actions, bf16=False):
        super().__init__()
        self.actor = nn.Linear(1, num_actions)
        nn.init.zeros_(self.actor.bias)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, obs):
        assert obs.dtype == torch.uint8
        return self.actor(torch.zeros(len(obs), 1)), obs[:, -1, 0, 0] * self.scale


class Tracker(Blind):
    """Plays Breakout well enough to reach the rows of 4 and 7 points: the paddle runs after the ball."""

    def forward(self, obs):
        buttons = []
        for image in obs[:, -1].numpy() > 60:
            paddle, ball = np.flatnonzero(image[76, 4:80]).mean(), np.argwhere(image[40:75, 4:80])[:, 1]
            away = ball.mean() - paddle if len(ball) else 0
            buttons.append(1 if not len(ball) else 2 if away > 1 else 3 if away < -1 else 0)
        return self.actor(torch.zeros(len(obs), 1)) + 100 * torch.eye(4)[buttons], obs[:, -1, 0, 0] * self.scale


class Recorder(gym.vector.VectorWrapper):
    """Keeps what went in and came out."""

    made: "Recorder"

    def __init__(self, env):
        super().__init__(env)
        self.actions, self.rewards, self.terminated = [], [], []
        Recorder.made = self

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        result = super().step(actions)
        for kept, x in zip((self.actions, self.rewards, self.terminated), (actions, *result[1:3]), strict=True):
            kept.append(np.array(x))
        return result


# ---- whole games, lost lives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("game", "steps", "agent", "at_least", "points"),
    [
        ("Breakout", 600, Blind, 5, {0, 1}),
        ("Breakout", 1000, Tracker, 2, {0, 1, 4, 7}),
        ("MsPacman", 900, Blind, 3, {0, 10}),
        ("Pong", 1300, Blind, 2, {0, 1, -1}),
        ("Seaquest", 900, Blind, 3, {0, 20}),
    ],
)
def test_logged_scores_are_those_of_whole_games(game, steps, agent, at_least, points, monkeypatch, short_evaluation):
    """Cases 48 and 50: step, environment, raw score and length of every game are what the plain emulator gives.

    The plain one knows nothing of lost lives; the same buttons are pressed in it.
    """
    real = ppo.make_envs
    monkeypatch.setattr(ppo, "Agent", agent)
    monkeypatch.setattr(ppo, "make_envs", lambda *given: Recorder(real(*given)))
    over = spy(monkeypatch, "game_over")
    _, run_dir = train(env_id=f"ALE/{game}-v5", seed=3, num_steps=50, total_timesteps=2 * steps, learning_rate=1e-12)
    found = [(t, n) for t, (_, ended) in enumerate(over) for n in np.flatnonzero(ended)]

    name = {"MsPacman": "ms_pacman"}.get(game, game.lower())
    plain = AtariVectorEnv(name, 2, autoreset_mode=AutoresetMode.SAME_STEP, reward_clipping=False)
    plain = gym.wrappers.vector.RecordEpisodeStatistics(plain)
    plain.reset(seed=3)
    expected, by_hand = [], np.zeros(2)
    for t, actions in enumerate(Recorder.made.actions):
        _, rewards, terminated, truncated, infos = plain.step(actions)
        by_hand += rewards
        for n in np.flatnonzero(terminated | truncated):
            assert infos["episode"]["r"][n] == by_hand[n]
            expected.append((t, int(n), by_hand[n], infos["episode"]["l"][n]))
            by_hand[n] = 0
    assert len(expected) >= at_least and found == [(t, n) for t, n, *_ in expected]
    for metric, column in (("charts/episodic_return", 2), ("charts/episodic_length", 3)):
        rows = [(2 * (game[0] + 1), game[column]) for game in expected]
        assert sorted(logged(run_dir, metric)) == sorted(rows)
    assert set(np.unique(Recorder.made.rewards)) == points
    if game != "Pong":  # where no life is lost
        assert np.sum(Recorder.made.terminated) > 2 * len(expected)


def test_a_lost_life_ends_neither_the_game_nor_the_stack_of_frames():
    """Case 47: Breakout, seed 1; a new game has 5 lives, empty frames and (the rows differ) no meaning in final_obs."""
    envs = ppo.make_envs(args(), 2, 1)
    obs, infos = envs.reset(seed=1)
    lives, frames, rng, lost, games = infos["lives"], infos["episode_frame_number"], np.random.default_rng(1), 0, 0
    for _ in range(500):
        before, was, count = obs, lives, frames
        obs, _, terminated, truncated, infos = envs.step(rng.integers(4, size=2))
        lives, frames = infos["lives"], infos["episode_frame_number"]
        over = ppo.game_over(terminated, truncated, frames, count)
        for n in range(2):
            if over[n]:
                assert terminated[n] and lives[n] == 5 and not obs[n, :3].any() and obs[n, 3].any()
            else:
                assert lives[n] == was[n] - terminated[n]
                assert np.array_equal(obs[n, :3], before[n, 1:])
        lost, games = lost + (terminated & ~over).sum(), games + over.sum()
    assert games >= 2 and lost >= 4 * games
    envs.close()


@pytest.mark.parametrize(
    ("terminated", "truncated", "frame", "last_frame", "over"),
    [
        (False, False, 8, 4, False),
        (True, False, 8, 4, False),  # a lost life
        (True, False, 0, 4, True),
        (True, False, 29, 29, True),  # a new game after as many idle frames as the last one lasted
        (False, True, 0, 4, True),
        (False, True, 8, 4, True),
        (True, True, 8, 4, True),
        (True, False, 0, 0, True),  # an environment that counts no frames
    ],
)
def test_game_over(terminated, truncated, frame, last_frame, over):
    given = (np.array([x, False]) for x in (terminated, truncated))
    assert ppo.game_over(*given, np.array([frame, 4]), np.array([last_frame, 0])).tolist() == [over, False]


# ---- what the loop makes of the flags ------------------------------------------------------------------------------


def image(number: int, shape=(2, 36, 40)) -> np.ndarray:
    """An image that shows which one it is: the first pixel is its number, the others are noise of its own."""
    pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    pixels[:, 0, 0] = number
    return pixels


class Scripted(gym.vector.VectorEnv):
    """Plays tables of shape (T, N). Observation t of environment n is image(15 n + t), a last one image(128 + ...).

    final_obs is a full array, as ale-py's: rows of environments that did not end hold 255s.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, rewards, terminated, truncated, over):
        self.tables, self.num_envs = (rewards, terminated, truncated, over), rewards.shape[1]
        self.single_observation_space = gym.spaces.Box(0, 255, (2, 36, 40), np.uint8)
        self.single_action_space = gym.spaces.Discrete(3)

    def numbers(self) -> np.ndarray:
        return 15 * np.arange(self.num_envs) + self.t

    def reset(self, *, seed=None, options=None):
        self.t, self.frames = 0, np.zeros(self.num_envs, np.int32)
        return np.stack([image(x) for x in self.numbers()]), {"episode_frame_number": self.frames}

    def step(self, actions):
        rewards, terminated, truncated, over = (table[self.t] for table in self.tables)
        infos = {}
        if (terminated | truncated).any():
            infos["final_obs"] = np.full((self.num_envs, 2, 36, 40), 255, np.uint8)
            for n in np.flatnonzero(over):
                infos["final_obs"][n] = image(128 + self.numbers()[n])
        self.t += 1
        self.frames = infos["episode_frame_number"] = np.where(over, 0, self.frames + 4)
        return np.stack([image(x) for x in self.numbers()]), rewards, terminated, truncated, infos


class Careful(Blind):
    """Is never shown what final_obs holds where no game has ended."""

    def forward(self, obs):
        assert not (obs == 255).flatten(1).all(1).any()
        return super().forward(obs)


class Brief(gym.Env):
    """For evaluation beside Scripted: three steps of one point."""

    observation_space, action_space = gym.spaces.Box(0, 255, (2, 36, 40), np.uint8), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return image(0), {}

    def step(self, action):
        self.t += 1
        return image(self.t), 1.0, self.t == 3, False, {}


def by_hand() -> tuple[np.ndarray, ...]:
    """Six steps of three environments."""
    rewards = np.array([[3, 0, -2], [7, 1, 4], [0, 0, -1], [3, -2, 0], [0, 4, 7], [1, 1, 1]], np.int32)
    terminated, truncated, over = np.zeros((3, 6, 3), bool)
    terminated[1, 0] = True  # a lost life
    terminated[2, 1] = over[2, 1] = True  # the end of a game
    truncated[[0, 4, 4], [2, 0, 1]] = over[[0, 4, 4], [2, 0, 1]] = True  # the frame limit, at step 4 in two at once
    terminated[3, 2] = truncated[3, 2] = over[3, 2] = True  # both: a termination
    return rewards, terminated, truncated, over


def at_random(seed: int) -> tuple[np.ndarray, ...]:
    """Twelve steps of six environments; ends of all kinds at the last step, too."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(5, p=[0.5, 0.15, 0.1, 0.15, 0.1], size=(12, 6))
    kinds[-1] = [0, 1, 2, 3, 4, 3]
    terminated, truncated, over = np.isin(kinds, [1, 2, 4]), np.isin(kinds, [3, 4]), np.isin(kinds, [2, 3, 4])
    return rng.integers(-3, 8, (12, 6)), terminated, truncated, over


def play(monkeypatch, tables, **changes) -> tuple[dict, Path]:
    """One run of main over the tables; an observation's value is the number of the image, and nothing is learnt."""
    monkeypatch.setattr(ppo, "Agent", Careful)
    monkeypatch.setattr(ppo, "make_envs", lambda *given: Scripted(*tables))
    monkeypatch.setattr(ppo, "make_eval_env", lambda *given: Brief())
    steps, envs = tables[0].shape
    flags = {"num_envs": envs, "num_steps": steps, "total_timesteps": steps * envs, "learning_rate": 1e-12}
    return train(**{**flags, **changes})


@pytest.mark.parametrize("tables", [by_hand(), *map(at_random, range(4))], ids=["by hand", *range(4)])
@pytest.mark.parametrize("rollouts", [1, 2])
def test_bootstrap_and_cuts(tables, rollouts, monkeypatch):
    """Cases 3, 10, 51 and 57: what main hands to compute_gae.

    A lost life and a death have no bootstrap, the frame limit has the last observation's value (and death wins where
    both flags are set); all of them cut. final_obs is read in the rows of games that ended, and nowhere else.
    """
    calls = spy(monkeypatch, "compute_gae")
    length = len(tables[0]) // rollouts
    play(monkeypatch, tables, num_steps=length, gamma=0.9, gae_lambda=0.8)
    assert len(calls) == rollouts
    rewards, values, following, terminations, dones = (np.concatenate([c[0][i] for c in calls]) for i in range(5))
    raw, terminated, truncated, _ = tables
    steps, envs = raw.shape
    numbers = 15 * np.arange(envs) + np.arange(steps)[:, None]
    assert np.array_equal(values, numbers) and np.array_equal(rewards, np.clip(raw, -1, 1))
    assert np.array_equal(terminations, terminated) and np.array_equal(dones, terminated | truncated)
    expected = np.where(truncated, 128 + numbers, numbers + 1)
    assert np.array_equal(following[~terminated], expected[~terminated])
    for (*_, gamma, gae_lambda), (advantages, returns) in calls:
        assert (gamma, gae_lambda) == (0.9, 0.8) and advantages.shape == returns.shape == (length, envs)


def test_by_hand_values_and_advantages(monkeypatch):
    """gamma = 1, lambda = 0 on the table above: r + V' - V, with V = 0 after a death or a lost life."""
    calls = spy(monkeypatch, "compute_gae")
    play(monkeypatch, by_hand(), gamma=1.0, gae_lambda=0.0)
    advantages, _ = calls[0][1]
    assert advantages[:, 0].tolist() == [2, 1 - 1, 1, 2, 0 + 132 - 4, 2]
    assert advantages[:, 1].tolist() == [1, 2, 0 - 17, 0, 1 + 147 - 19, 2]
    assert advantages[:, 2].tolist() == [-1 + 158 - 30, 2, 0, 0 - 33, 2, 2]


def test_scores_are_raw_and_cross_rollouts(monkeypatch):
    """A lost life logs nothing; scores and lengths run on from rollout to rollout; clipping is for learning only."""
    metrics, run_dir = play(monkeypatch, by_hand(), num_steps=2)
    games = [(3, -2, 1), (9, 1, 3), (12, 3, 3), (15, 13, 5), (15, 2, 2)]  # step, score, length
    assert sorted(logged(run_dir, "charts/episodic_return")) == sorted((step, score) for step, score, _ in games)
    assert sorted(logged(run_dir, "charts/episodic_length")) == sorted((step, length) for step, _, length in games)
    lowest, highest = (logged(run_dir, f"charts/reward_{name}") for name in ("min", "max"))
    assert [x for _, x in lowest] == [-2, -2, 0] and [x for _, x in highest] == [7, 3, 7]
    assert metrics["eval/episodic_return"] == metrics["eval/episodic_length"] == 3
    assert json.loads((run_dir / "summary.json").read_text())["last_training_return"] == pytest.approx(17 / 5)


@pytest.mark.parametrize("clip_reward", [1.0, 0.5, 2.5])
def test_reward_clip(clip_reward, monkeypatch):
    """Case 51: 3 to 1, 0 to 0, -2 to -1."""
    calls = spy(monkeypatch, "compute_gae")
    play(monkeypatch, by_hand(), clip_reward=clip_reward)
    assert calls[0][0][0][0].tolist() == [min(3, clip_reward), 0, max(-2, -clip_reward)]


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_minibatches_hold_the_images_as_they_came(num_minibatches, monkeypatch):
    """uint8, none mixed up by the memory layout, each with its own action, log-probability, advantage and value."""
    updates, gae, chosen = (spy(monkeypatch, name) for name in ("update", "compute_gae", "sample_actions"))
    play(monkeypatch, at_random(7), num_minibatches=num_minibatches)
    obs, actions, logprobs, advantages, returns, values = (
        torch.cat([given[2][i] for given, _ in updates]) for i in range(6)
    )
    assert obs.dtype == torch.uint8 and sorted(values.tolist()) == sorted(gae[0][0][1].flatten().tolist())
    pressed = torch.as_tensor(np.stack([x for _, x in chosen[:12]])).flatten()
    steps, envs = values % 15, torch.div(values, 15, rounding_mode="floor")
    index = (steps * 6 + envs).long()
    for row, value in zip(obs, values, strict=True):
        assert np.array_equal(row, image(int(value)))
    assert torch.equal(actions, pressed[index]) and torch.allclose(logprobs, torch.tensor(1 / 3).log())
    for ours, theirs in zip((advantages, returns), gae[0][1], strict=True):
        assert torch.equal(ours, theirs.flatten()[index])
    assert len(set(pressed.tolist())) == 3


def test_at_the_frame_limit_the_last_observation_is_bootstrapped(monkeypatch, short_evaluation):
    """Case 61: a limit of 400 frames truncates at step 100 and again at 200; the value is that of its last image."""
    made, make_vec, truncations = {}, gym.make_vec, []

    class Watched(Recorder):
        def step(self, actions):
            result = super().step(actions)
            if result[3].any():
                truncations.append(torch.as_tensor(result[4]["final_obs"][result[3]])[:, -1].float().mean((1, 2)))
            return result

    def limited(*given, **named):
        made.update(named)
        return Watched(make_vec(*given, **named, max_num_frames_per_episode=400))

    class Brightness(Blind):
        def forward(self, obs):
            return super().forward(obs)[0], obs[:, -1].float().mean((1, 2)) * self.scale

    monkeypatch.setattr(gym, "make_vec", limited)
    monkeypatch.setattr(ppo, "Agent", Brightness)
    calls = spy(monkeypatch, "compute_gae")
    _, run_dir = train(env_id="ALE/MsPacman-v5", num_steps=210, total_timesteps=420)
    _, _, following, terminations, dones = calls[0][0][:5]
    ends = (dones & ~terminations).nonzero().tolist()
    assert ends[:2] == [[99, 0], [99, 1]]
    assert torch.equal(following[dones & ~terminations], torch.cat(truncations))
    assert [x for _, x in logged(run_dir, "charts/episodic_length")][:2] == [100, 100]
    assert "max_num_frames_per_episode" not in made


def test_the_frame_limit_is_108000_frames_in_both_pipelines():
    envs, env = ppo.make_envs(args(), 1, 1), ppo.make_eval_env(args(), 1)
    assert envs.spec.kwargs["max_num_frames_per_episode"] == 108_000
    assert env.unwrapped.ale.getInt("max_num_frames_per_episode") == 108_000
    envs.close(), env.close()


# ---- the two pipelines ---------------------------------------------------------------------------------------------


def test_training_and_evaluation_see_the_same_game():
    """Same buttons, same rewards, same frames but for the order of greying and flicker removal, same empty stack.

    Ms. Pac-Man, which needs no FIRE. Measured: 37 of 255 at most, on at most 15 of 7056 pixels more than 16.
    """
    flags = args(env_id="ALE/MsPacman-v5", noop_max=0)
    envs, env, rng, over = ppo.make_envs(flags, 1, 1), ppo.make_eval_env(flags, 1), np.random.default_rng(0), False
    assert env.observation_space == envs.single_observation_space and env.action_space == envs.single_action_space
    (train_obs, infos), (eval_obs, _) = envs.reset(seed=1), env.reset(seed=1)
    assert not eval_obs[:3].any() and eval_obs[3].any() and np.array_equal(train_obs[0], eval_obs)
    score, lost = 0, 0
    while not over:
        lives, frame, action = infos["lives"], infos["episode_frame_number"], rng.integers(9, size=1)
        train_obs, rewards, terminated, truncated, infos = envs.step(action)
        eval_obs, reward, over, cut, _ = env.step(int(action[0]))
        ended = ppo.game_over(terminated, truncated, infos["episode_frame_number"], frame)
        assert rewards[0] == reward and ended == [over]
        if not over:
            assert eval_obs.dtype == np.uint8 and not cut and env.unwrapped.ale.lives() == infos["lives"][0]
            difference = np.abs(train_obs[0].astype(int) - eval_obs)
            assert difference.max() <= 40 and (difference > 16).sum(axis=(1, 2)).max() <= 20
            assert (difference == 0).mean() > 0.98
        lost, score = lost + (infos["lives"] < lives).sum(), score + reward
    assert score > 100 and lost >= 2
    eval_obs, _ = env.reset()
    assert np.array_equal(train_obs[0], eval_obs) and not eval_obs[:3].any()  # the next game, after a reset in both
    envs.close(), env.close()


def many(pipeline: str, seeds, steps: int = 100, **flags) -> list[np.ndarray]:
    """The observations of games from these seeds in which the same buttons are pressed, (steps, 4, 84, 84) each."""
    games = []
    for seed in seeds:
        rng = np.random.default_rng(0)
        if pipeline == "training":
            env = ppo.make_envs(args(env_id="ALE/MsPacman-v5", **flags), 1, seed)
        else:
            env = ppo.make_eval_env(args(env_id="ALE/MsPacman-v5", **flags), seed)
        seen = [env.reset(seed=seed)[0]]
        for _ in range(steps):
            action = rng.integers(9, size=1)
            seen.append(env.step(action if pipeline == "training" else int(action[0]))[0])
        games.append(np.stack(seen))
        env.close()
    return games


@pytest.mark.parametrize("pipeline", ["training", "evaluation"])
def test_sticky_actions_and_idle_frames_reach_the_emulator(pipeline):
    """Case 52: the registered environments have sticky actions of 0.25; ours have what the flag says."""
    assert gym.spec("ALE/MsPacman-v5").kwargs["repeat_action_probability"] == 0.25
    assert ppo.Args().sticky_actions == 0 and ppo.Args().noop_max == 30

    def distinct(**flags) -> int:
        return len({game.tobytes() for game in many(pipeline, (1, 2), **flags)})

    assert distinct(noop_max=0) == 1  # nothing is left to chance
    assert distinct(noop_max=0, sticky_actions=0.25) == 2
    assert distinct() == 2  # idle frames
    first, second = many(pipeline, (5, 5), sticky_actions=0.25)
    assert np.array_equal(first, second)
    env = ppo.make_eval_env(args(sticky_actions=0.125), 1)
    assert env.unwrapped.ale.getFloat("repeat_action_probability") == 0.125
    env.close()


def test_processes_and_environments_start_from_seeds_of_their_own(monkeypatch, short_evaluation):
    """Environment i of all has seed + i, whichever process it is in."""
    seeds = []
    real = ppo.make_envs
    monkeypatch.setattr(ppo, "make_envs", lambda *given: Recorder(real(*given)))
    for rank in (0, 1):
        monkeypatch.setattr(ppo, "join_processes", lambda *given: None)
        monkeypatch.setenv("RANK", str(rank)), monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(Recorder, "step", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ppo.main(args(num_envs=6, seed=7, total_timesteps=48))
        seeds.append((Recorder.made.seed, Recorder.made.num_envs))
    assert seeds == [(7, 3), (10, 3)]


@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_every_seed_that_is_accepted_works(seed, monkeypatch, short_evaluation):
    monkeypatch.setattr(ppo, "Agent", Blind)
    assert train(seed=seed)[0]["global_step"] == 16


def test_evaluation_plays_whole_games_by_sampling(monkeypatch):
    """Scores are sums of raw rewards until the last life is lost; every game has a seed of its own."""
    games, real = [], ppo.make_eval_env

    class Watched(gym.Wrapper):
        def reset(self, **named):
            games.append({"seed": named["seed"], "actions": [], "rewards": [], "env": self})
            self.game = games[-1]
            return super().reset(**named)

        def step(self, action):
            result = super().step(action)
            self.game["actions"].append(int(action)), self.game["rewards"].append(result[1])
            assert len(self.game["actions"]) < 3000, "a greedy policy may never press FIRE"
            self.game["lives"] = self.unwrapped.ale.lives()
            return result

    monkeypatch.setattr(ppo, "make_eval_env", lambda *given: Watched(real(*given)))
    torch.manual_seed(0)
    agent = ppo.Agent((4, 84, 84), 4)
    first = ppo.evaluate(args(eval_episodes=3), agent, None, "")
    scores, metrics = first
    assert len(games) == 3 and len({game["seed"] for game in games}) == 3
    assert [sum(game["rewards"]) for game in games] == scores and sum(scores) > 0
    assert {game["lives"] for game in games} == {0}
    assert metrics["eval/episodic_length"] == np.mean([len(game["actions"]) for game in games])
    assert metrics["eval/episodic_return"] == np.mean(scores)
    pressed = np.concatenate([game["actions"] for game in games])
    assert scipy_stats.chisquare(np.bincount(pressed, minlength=4)).pvalue > 1e-4
    assert games[0]["actions"][:50] != games[1]["actions"][:50]
    assert ppo.evaluate(args(eval_episodes=3), agent, None, "") == first


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "world_size", "words"),
    [
        ({"env_id": "Pendulum-v1"}, 1, "ppo_continuous.py"),
        ({"env_id": "CartPole-v1"}, 1, "dqn.py"),
        ({"env_id": "ALE/NoSuchGame-v5"}, 1, "ALE/NoSuchGame-v5"),
        ({"env_id": "NoSuchSpace/Game-v5"}, 1, "NoSuchSpace/Game-v5"),
        ({"env_id": "ALE/Breakout-ram-v5"}, 1, "ALE/Breakout-ram-v5"),
        ({"num_envs": 8}, 3, "--num-envs 8"),
        ({"num_envs": 8}, 16, "--num-envs 8"),
        ({"num_envs": 2, "num_steps": 2}, 2, "--num-minibatches"),
        ({"sticky_actions": 1.5}, 1, "--sticky-actions"),
        ({"noop_max": -1}, 1, "--noop-max"),
        ({"clip_reward": 0.0}, 1, "--clip-reward"),
    ],
)
def test_bad_input_is_refused_in_one_line(flags, world_size, words, capfd, monkeypatch):
    """Exit code 2, one line on stderr that says what to do, and nothing is written."""
    if world_size > 1:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        flags = {"num_minibatches": 2, "total_timesteps": 64, **flags}
    with pytest.raises(SystemExit) as error:
        ppo.main(args(**flags))
    lines = capfd.readouterr().err.strip().splitlines()
    assert error.value.code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0], lines
    assert ". " in lines[0] and not list(Path().iterdir())


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        (gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2)),
        (gym.spaces.Box(0, 1, (4, 84, 84), np.float32), gym.spaces.Discrete(2)),
        (gym.spaces.Box(0, 255, (84, 84), np.uint8), gym.spaces.Discrete(2)),
        (gym.spaces.Box(0, 255, (84, 84, 4), np.uint8), gym.spaces.Discrete(2)),  # channels last
        (gym.spaces.Box(0, 255, (4, 35, 84), np.uint8), gym.spaces.Discrete(2)),  # nothing left after three layers
        (gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Box(-1, 1, (2,))),
        (gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.MultiDiscrete([2, 2])),
        (gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(3, start=1)),  # ours begin with 0
    ],
)
def test_spaces_of_a_replaced_make_envs_are_checked(observations, actions, capfd, monkeypatch):
    made = Scripted(*by_hand())
    made.single_observation_space, made.single_action_space = observations, actions
    monkeypatch.setattr(ppo, "make_envs", lambda *given: made)
    monkeypatch.setattr(ppo, "make_eval_env", lambda *given: Brief())
    with pytest.raises(SystemExit) as error:
        ppo.main(args())
    assert error.value.code == 2 and "images" in capfd.readouterr().err and not list(Path().iterdir())


# ---- the network ---------------------------------------------------------------------------------------------------


def frames(size: int = 6, shape=(4, 84, 84), seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(4, 84, 84), (3, 36, 36), (1, 64, 96)])
def test_network_is_that_of_the_nature_paper(shape):
    """A plain computation from the weights: x / 255, three convolutions, 512 units, two heads; any memory layout."""
    agent = ppo.Agent(shape, 5)
    convolutions = [m for m in agent.network if isinstance(m, nn.Conv2d)]
    sizes = [(m.out_channels, m.kernel_size[0], m.stride[0]) for m in convolutions]
    assert sizes == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    obs = frames(shape=shape)
    x = obs.double().contiguous() / 255
    for m in convolutions:
        x = nn.functional.conv2d(x, m.weight.double(), m.bias.double(), m.stride).relu()
    (hidden,) = (m for m in agent.network if isinstance(m, nn.Linear))
    x = nn.functional.linear(x.flatten(1), hidden.weight.double(), hidden.bias.double()).relu()
    logits, values = (nn.functional.linear(x, m.weight.double(), m.bias.double()) for m in (agent.actor, agent.critic))
    assert hidden.out_features == 512 and logits.shape == (6, 5)
    before = obs.clone()
    for laid_out in (obs, obs.to(memory_format=torch.channels_last)):
        ours = agent(laid_out)
        assert ours[0].shape == (6, 5) and ours[1].shape == (6,) and ours[0].dtype == ours[1].dtype == torch.float32
        close(ours[0], logits), close(ours[1], values[:, 0], 1e-5)
    assert torch.equal(obs, before)
    assert agent(obs[:0])[1].shape == (0,)


def test_initial_weights():
    """Case 45: orthogonal with gain sqrt 2, 0.01 for the policy, 1 for the value; biases zero."""
    agent = ppo.Agent((4, 84, 84), 6)
    hidden = [m for m in agent.network if hasattr(m, "weight")]
    gains = [*((m, math.sqrt(2)) for m in hidden), (agent.actor, 0.01), (agent.critic, 1)]
    assert len(gains) == 6
    for layer, gain in gains:
        rows = layer.weight.detach().flatten(1)
        close(rows @ rows.T, gain**2 * torch.eye(len(rows)), 1e-5 * gain)
        assert not layer.bias.any()


def test_at_first_all_actions_are_equally_likely():
    """Case 45: within one percentage point, on noise and on a game."""
    envs = ppo.make_envs(args(), 2, 1)
    obs = [envs.reset(seed=1)[0], *(envs.step(np.array([1, i % 4]))[0] for i in range(20))]
    envs.close()
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad():
            logits, _ = ppo.Agent((4, 84, 84), 4)(torch.cat([frames(), torch.as_tensor(np.concatenate(obs))]))
        assert (logits.softmax(-1) - 0.25).abs().max() < 0.01 and logits.std(-1).min() > 0


def test_bf16_is_close_to_float32():
    """The heads stay float32; the gradient reaches all weights, which stay float32, too."""
    torch.manual_seed(0)
    plain = ppo.Agent((4, 84, 84), 4)
    with torch.no_grad():
        plain.actor.weight.mul_(100)
    half = ppo.Agent((4, 84, 84), 4, bf16=True)
    half.load_state_dict(plain.state_dict())
    results = {}
    for name, agent in (("plain", plain), ("half", half)):
        logits, values = agent(frames(4))
        assert logits.dtype == values.dtype == torch.float32
        (logits.square().sum() + values.square().sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in agent.parameters()])
        assert gradient.dtype == torch.float32
        results[name] = (logits, values, gradient)
    for ours, exact in zip(results["half"], results["plain"], strict=True):
        error = ((ours - exact).norm() / exact.norm()).item()
        assert 0 < error < 0.06, error


class _Stop(Exception):
    pass


@pytest.mark.parametrize("flags", [{}, {"adam_eps": 1e-3, "learning_rate": 0.02}])
def test_main_gives_adam_its_epsilon_rate_and_all_parameters(flags, monkeypatch):
    made = []

    def record(parameters, lr, **named):
        made.append((list(parameters), float(lr), named))
        raise _Stop

    monkeypatch.setattr(torch.optim, "Adam", record)
    with pytest.raises(_Stop):
        ppo.main(args(**flags))
    parameters, lr, named = made[0]
    assert named == {"eps": flags.get("adam_eps", 1e-5), "fused": True}
    assert lr == pytest.approx(flags.get("learning_rate", 2.5e-4))
    assert [p.shape for p in parameters] == [p.shape for p in ppo.Agent((4, 84, 84), 4).parameters()]


# ---- the math ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 3), (1, 18), (4, 5, 2)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 40.0])
def test_categorical_functions_equal_torch_distributions(shape, scale):
    g = torch.Generator().manual_seed(1)
    logits = scale * torch.randn(shape, generator=g, dtype=torch.float64) + 3  # softmax takes no notice of the 3
    theirs = Categorical(logits=logits)
    actions = torch.randint(shape[-1], shape[:-1], generator=g)
    close(ppo.categorical_log_prob(logits, actions), theirs.log_prob(actions), 1e-12)
    close(ppo.categorical_entropy(logits), theirs.entropy(), 1e-12)
    probabilities = torch.stack(
        [ppo.categorical_log_prob(logits, torch.full(shape[:-1], a)).exp() for a in range(shape[-1])]
    )
    close(probabilities.sum(0), torch.ones(shape[:-1]), 1e-12)
    close(ppo.categorical_entropy(logits), -(probabilities * probabilities.log()).sum(0), 1e-12)


def test_categorical_functions_by_hand():
    """p = (1/2, 1/3, 1/6): entropy ln 2 / 2 + ln 3 / 3 + ln 6 / 6 = 1.0114043."""
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 3, dtype=torch.float64).log()
    close(ppo.categorical_log_prob(logits, torch.tensor([0, 1, 2])), [-math.log(2), -math.log(3), -math.log(6)], 1e-12)
    close(ppo.categorical_entropy(logits), [1.0114042647] * 3, 1e-9)
    assert ppo.categorical_entropy(torch.tensor([[200.0, -200.0]])) == 0  # and not nan
    close(ppo.categorical_entropy(torch.zeros(1, 4)), [math.log(4)])


def test_sampled_actions_have_the_probabilities_of_the_softmax():
    """Chi-square over 60,000 samples of four distributions in one batch."""
    logits = np.array([[0.0, 0.0, 0.0], [1.0, -1.0, 0.5], [3.0, 0.0, -2.0], [-5.0, -5.5, -7.0]])
    rng, counts = np.random.default_rng(1), np.zeros((4, 3))
    for _ in range(15_000):
        actions = ppo.sample_actions(logits, rng.gumbel(size=logits.shape))
        counts[np.arange(4), actions] += 1
    probabilities = torch.as_tensor(logits).softmax(-1).numpy()
    for observed, p in zip(counts, probabilities, strict=True):
        assert scipy_stats.chisquare(observed, 15_000 * p).pvalue > 1e-3
    assert ppo.sample_actions(np.array([[0.0, 9.0], [9.0, 0.0]]), np.zeros((2, 2))).tolist() == [1, 0]


def test_main_samples_with_fresh_gumbel_noise(monkeypatch):
    """Case 46: the noise that main draws is standard Gumbel, differs in every step and environment."""
    calls = spy(monkeypatch, "sample_actions")
    play(monkeypatch, tuple(np.zeros((60, 8), dtype) for dtype in (np.int32, bool, bool, bool)), num_steps=60)
    noise = np.stack([given[1] for given, _ in calls[:60]])
    assert noise.shape == (60, 8, 3) and len(np.unique(noise)) == noise.size
    assert scipy_stats.kstest(noise.flatten(), scipy_stats.gumbel_r.cdf).pvalue > 1e-3


def test_normalised_advantages_have_mean_0_and_sample_std_1():
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])  # mean 3, sample std sqrt(14 / 3)
    mean, std = ppo.joint_moments(x)
    assert mean == 3 and std.item() == pytest.approx(math.sqrt(14 / 3))
    close(ppo.normalize_advantages(x, mean, std), (x - 3) / math.sqrt(14 / 3))
    assert not ppo.normalize_advantages(torch.full((4,), 5.0), torch.tensor(5.0), torch.tensor(0.0)).any()
    tiny = torch.tensor([1e-8, -1e-8])
    close(ppo.normalize_advantages(tiny, tiny.mean(), torch.tensor(1e-8)), [0.5, -0.5])  # the 1e-8 under the line


def test_functions_shared_with_ppo_continuous_give_the_same():
    """Their source is the same, which test_sync.py sees to; here a few numbers, and those of the case list."""
    g = torch.Generator().manual_seed(5)
    rewards, values, following = torch.randn(3, 9, 4, generator=g)
    terminations, truncations = torch.rand(2, 9, 4, generator=g) < 0.2
    given = (rewards, values, following, terminations, terminations | truncations, 0.99, 0.95)
    for ours, theirs in zip(ppo.compute_gae(*given), ppo_continuous.compute_gae(*given), strict=True):
        assert torch.equal(ours, theirs)
    for name, arguments in {
        "policy_loss": (rewards[0], values[0], following[0], 0.1),
        "value_loss": (rewards[0], values[0], following[0], 0.1),
        "approx_kl": (rewards[0],),
        "clip_fraction": (rewards[0], 0.1),
        "explained_variance": (rewards[0], values[0]),
        "anneal": (2.5e-4, 0.0, 3, 10),
    }.items():
        assert getattr(ppo, name)(*arguments) == getattr(ppo_continuous, name)(*arguments)
    column = torch.tensor([[0.0], [1.0], [0.0]])
    advantages, _ = ppo.compute_gae(*(torch.full((3, 1), x) for x in (1.0, 10.0, 10.0)), 0 * column, column, 0.99, 0.95)
    close(advantages[:, 0], [1.74645, 0.9, 0.9])
    close(ppo.approx_kl(torch.tensor([-0.5, 0.5])), 0.127626)
    close(ppo.clip_fraction(torch.tensor([0.7, 0.95, 1.3]).log(), 0.2), 2 / 3)
    assert ppo.value_loss(*(torch.tensor([x]) for x in (1.0, 0.0, 2.0)), 0.2) == pytest.approx(0.5 * 3.24)


# ---- one update ----------------------------------------------------------------------------------------------------


def made_batch(agent, size: int = 24, seed: int = 0) -> list[torch.Tensor]:
    """Images and what goes with them; ratios and values on both sides of their clip ranges."""
    g = torch.Generator().manual_seed(seed)
    obs = frames(size, (4, 36, 36), seed)
    with torch.no_grad():
        logits, values = agent(obs)
    actions = torch.randint(logits.shape[-1], (size,), generator=g)
    old_logprobs = Categorical(logits=logits).log_prob(actions) + 0.2 * torch.sin(torch.arange(size))
    advantages, noise = torch.randn(2, size, generator=g)
    return [obs, actions, old_logprobs, advantages + 0.5, values + noise, values - 0.2 * noise]


def made_agent(seed: int = 0):
    """The policy head is as wide as the value's, so that its gradients count."""
    torch.manual_seed(seed)
    agent = ppo.Agent((4, 36, 36), 3)
    with torch.no_grad():
        agent.actor.weight.mul_(100)
    return agent


def adam(agent, lr: float = 2.5e-4, eps: float = 1e-5) -> torch.optim.Adam:
    return torch.optim.Adam(agent.parameters(), torch.tensor(lr), eps=eps, fused=True)


def flat(parameters) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


class _Spaces(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 255, (4, 36, 36), np.uint8), gym.spaces.Discrete(3)


@pytest.mark.parametrize(("lr", "eps"), [(2.5e-4, 1e-5), (0.3, 1.0)])  # the second is nearly plain descent
@pytest.mark.parametrize(
    ("norm_adv", "ent_coef", "max_grad_norm", "epochs"),
    [(True, 0.01, 0.5, 1), (False, 0.02, 100.0, 1), (True, 0.0, 0.5, 3)],
)
def test_update_equals_stable_baselines3(lr, eps, norm_adv, ent_coef, max_grad_norm, epochs):
    """PPO.train() with its Nature CNN on the same weights and images (its value loss has no 1/2) ends at the same."""
    agent, size = made_agent(), 24
    batch = made_batch(agent)
    model = PPO(
        "CnnPolicy", _Spaces(), learning_rate=lr, n_steps=size, batch_size=size, n_epochs=epochs, clip_range=0.1,
        ent_coef=ent_coef, vf_coef=0.5, max_grad_norm=max_grad_norm, normalize_advantage=norm_adv, device="cpu",
        policy_kwargs={"net_arch": [], "optimizer_kwargs": {"eps": eps}},
    )  # fmt: skip
    policy = model.policy
    parts = (policy.features_extractor.cnn, policy.features_extractor.linear, policy.action_net, policy.value_net)
    theirs = [p for part in parts for p in part.parameters()]
    assert len(theirs) == len(list(agent.parameters()))
    with torch.no_grad():
        for p, q in zip(theirs, agent.parameters(), strict=True):
            p.copy_(q)
    model.set_logger(Logger(folder=None, output_formats=[]))
    obs, actions, old_logprobs, advantages, returns, old_values = batch
    for t in range(size):
        row = (obs[t : t + 1].numpy(), actions[t : t + 1].numpy(), np.zeros(1), np.zeros(1))
        model.rollout_buffer.add(*row, old_values[t], old_logprobs[t])
    model.rollout_buffer.advantages[:] = advantages[:, None].numpy()
    model.rollout_buffer.returns[:] = returns[:, None].numpy()
    model.train()

    optimizer, start = adam(agent, lr, eps), flat(agent.parameters())
    flags = ppo.Args(norm_adv=norm_adv, max_grad_norm=max_grad_norm, clip_vloss=False, vf_coef=1.0, clip_coef=0.1)
    rows = [ppo.update(agent, optimizer, batch, torch.tensor(ent_coef), flags) for _ in range(epochs)]
    assert (flat(agent.parameters()) - start).abs().max() > 1e-4
    close(flat(agent.parameters()), flat(theirs), 2e-6 if lr > 0.1 else 1e-6)
    mean = {name: torch.stack([row[name] for row in rows]).mean().item() for name in rows[0]}
    values = model.logger.name_to_value
    assert mean["losses/policy_loss"] == pytest.approx(values["train/policy_gradient_loss"], abs=1e-6)
    assert 2 * mean["losses/value_loss"] == pytest.approx(values["train/value_loss"], abs=2e-6)
    assert -mean["losses/entropy"] == pytest.approx(values["train/entropy_loss"], abs=1e-6)
    assert rows[-1]["losses/approx_kl"].item() == pytest.approx(values["train/approx_kl"], abs=1e-6)
    assert mean["losses/clipfrac"] == pytest.approx(values["train/clip_fraction"], abs=1e-6)
    assert 0.2 < mean["losses/clipfrac"] < 0.9


@pytest.mark.parametrize("clip_vloss", [True, False])
def test_metrics_of_an_update_by_their_definitions(clip_vloss):
    """In float64 on the statistics; the clip of the value has its own coefficient."""
    agent = made_agent()
    batch = made_batch(agent)
    obs, actions, old_logprobs, advantages, returns, old_values = batch
    with torch.no_grad():
        logits, values = (x.double() for x in agent(obs))
    new = Categorical(logits=logits)
    logratio = new.log_prob(actions) - old_logprobs
    scaled = (advantages.double() - advantages.double().mean()) / advantages.double().std()
    pairs = zip(logratio.exp().tolist(), scaled.tolist(), strict=True)
    surrogate = [min(ratio * a, min(max(ratio, 0.9), 1.1) * a) for ratio, a in pairs]
    errors = (values - returns).square()
    if clip_vloss:
        clipped = old_values + (values - old_values).clamp(-0.05, 0.05)
        errors = torch.maximum(errors, (clipped - returns).square())
    loss_of = {
        "losses/policy_loss": -np.mean(surrogate),
        "losses/value_loss": 0.5 * errors.mean(),
        "losses/entropy": new.entropy().mean(),
        "losses/old_approx_kl": -logratio.mean(),
        "losses/approx_kl": (logratio.exp() - 1 - logratio).mean(),
        "losses/clipfrac": ((logratio.exp() - 1).abs() > 0.1).double().mean(),
        "skipped": 0,
    }
    before = [x.clone() for x in batch]
    flags = ppo.Args(clip_vloss=clip_vloss, vf_clip_coef=0.05, clip_coef=0.1)
    stats = ppo.update(agent, adam(agent), batch, torch.tensor(0.01), flags)
    assert stats.keys() == {*loss_of, "losses/grad_norm"}
    assert all(torch.equal(a, b) for a, b in zip(batch, before, strict=True))
    for name, expected in loss_of.items():
        close(stats[name], expected, 2e-6)
        assert stats[name].shape in ((), (1,)) and not stats[name].requires_grad


def test_a_nan_changes_nothing_and_is_reported():
    agent = made_agent()
    optimizer, batch = adam(agent), made_batch(agent)
    before = flat(agent.parameters())
    batch[4][3] = torch.nan
    stats = ppo.update(agent, optimizer, batch, torch.tensor(0.01), ppo.Args())
    assert stats["skipped"] == 1 and torch.equal(flat(agent.parameters()), before)
    batch[4][3] = 0
    stats = ppo.update(agent, optimizer, batch, torch.tensor(0.01), ppo.Args())
    assert stats["skipped"] == 0 and not torch.equal(flat(agent.parameters()), before)


@pytest.mark.parametrize("processes", [1, 12])
def test_skipped_updates_are_counted_whatever_the_number_of_processes(processes, monkeypatch):
    """Twelve twelfths add up to a little less than 1 in float32."""
    monkeypatch.setattr(ppo, "joint_mean", lambda x: sum([x / processes] * processes))
    real = ppo.compute_gae
    monkeypatch.setattr(ppo, "compute_gae", lambda *given: [torch.full_like(x, torch.nan) for x in real(*given)])
    metrics, _ = play(monkeypatch, by_hand(), update_epochs=3)
    assert metrics["losses/skipped_updates"] == 3


# ---- learning ------------------------------------------------------------------------------------------------------


class Catch(gym.Env):
    """A ball falls down a board of five by five; the paddle on the lowest row goes left, stays or goes right."""

    observation_space, action_space = gym.spaces.Box(0, 255, (84, 84), np.uint8), gym.spaces.Discrete(3)

    def draw(self) -> np.ndarray:
        board, picture = np.zeros((5, 5), np.uint8), np.zeros((84, 84), np.uint8)
        board[4, self.paddle] = 128
        board[self.row, self.ball] = 255
        picture[:80, :80] = board.repeat(16, 0).repeat(16, 1)
        return picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.ball, self.paddle = 0, int(self.np_random.integers(5)), 2
        return self.draw(), {}

    def step(self, action):
        self.row, self.paddle = self.row + 1, min(max(self.paddle + int(action) - 1, 0), 4)
        over = self.row == 4
        return self.draw(), (1.0 if self.ball == self.paddle else -1.0) * over, over, False, {}


def test_learns_to_catch(monkeypatch):
    """From images, through main, with make_envs and make_eval_env replaced as the docstring says they can be."""

    def make(*given):
        return gym.wrappers.FrameStackObservation(Catch(), 4, padding_type="zero")

    def make_envs(args, num_envs, seed):
        return gym.vector.SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    monkeypatch.setattr(ppo, "make_envs", make_envs)
    monkeypatch.setattr(ppo, "make_eval_env", make)
    metrics, run_dir = train(
        env_id="Catch", num_envs=8, num_steps=16, num_minibatches=4, update_epochs=4, total_timesteps=4096, gamma=0.95,
        learning_rate=1e-3, clip_coef=0.2, clip_vloss=False, eval_episodes=20, log_every=1024,
    )  # fmt: skip
    assert metrics["eval/episodic_return"] >= 0.9 and metrics["eval/episodic_length"] == 4
    returns = [x for _, x in logged(run_dir, "charts/episodic_return")]
    assert len(returns) == 4096 // 4 and np.mean(returns[:100]) < 0.2 and np.mean(returns[-100:]) > 0.7


# ---- several processes ---------------------------------------------------------------------------------------------

RANKS = str(Path(__file__).with_name("ppo_atari_ranks.py"))


def torchrun(mode: str) -> subprocess.Popen:
    """Two processes of ppo_atari_ranks.py in this folder, on a port that is free; what they print goes to out.txt."""
    env = {**os.environ, "PYTHONPATH": str(Path(ppo.__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", RANKS, mode, "."]
    with open("out.txt", "w") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def finish(process: subprocess.Popen, seconds: float = 150) -> int:
    """Its exit code; none of its processes outlives the limit."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun hands it on to both, and kills them if they do not listen
        try:
            process.wait(60)
        finally:
            process.kill()
        pytest.fail(f"still running after {seconds} seconds:\n{Path('out.txt').read_text()}")


def test_two_processes_update_as_one():
    """Case 44: equal weights at the start, whatever each has drawn; an update on halves equals one on the whole."""
    torch.manual_seed(0)
    agent = ppo.Agent((4, 36, 36), 3)  # what the first process draws
    batch = made_batch(agent)
    batch[3][:12] += 2  # the halves' advantages differ in mean and spread
    batch[3][12:] *= 3
    torch.save(batch, "minibatch.pt")
    assert finish(torchrun("updates")) == 0, Path("out.txt").read_text()
    first, second = (torch.load(f"rank_{rank}.pt") for rank in (0, 1))
    assert not torch.equal(first["drawn"], second["drawn"]) and torch.equal(first["drawn"], flat(agent.parameters()))
    for name in ("start", "first", "bad", "second", "mean", "moments"):
        assert torch.equal(first[name], second[name]), name
    assert torch.equal(first["start"], first["drawn"]) and first["mean"].tolist() == [1.5, 15]
    assert first["gathered"] == second["gathered"] == [{"rank": 0}, {"rank": 1}]
    close(first["moments"], [batch[3].mean(), batch[3].std()])

    optimizer = adam(agent, 1e-3)
    for name in ("first", "second"):
        expected = ppo.update(agent, optimizer, batch, torch.tensor(0.01), ppo.Args())
        close(first[name], flat(agent.parameters()))
        ours, theirs = (seen[f"{name}_stats"] for seen in (first, second))
        assert ours["losses/grad_norm"] == theirs["losses/grad_norm"]
        for metric in expected.keys() - {"losses/grad_norm"}:  # means of equal halves
            close((ours[metric] + theirs[metric]) / 2, expected[metric], 2e-6)
        close(ours["losses/grad_norm"], expected["losses/grad_norm"], 1e-5)
    assert not torch.equal(first["start"], first["first"]) and not torch.equal(first["bad"], first["second"])
    assert torch.equal(first["first"], first["bad"])  # the nan of one process is skipped by both
    assert first["bad_stats"]["skipped"] == second["bad_stats"]["skipped"] == 1


PONG = {"env_id": "ALE/Pong-v5", "num_envs": 4, "num_steps": 16, "update_epochs": 2, "seed": 5}


@pytest.mark.parametrize("compiled", [False, True])
def test_two_processes_run_as_one_and_one_of_them_writes(compiled, short_evaluation):
    """Pong, the whole batch in one minibatch: both ways play the same games and learn the same from them."""
    flags = {**TINY, **PONG, "total_timesteps": 64}
    Path("flags.json").write_text(json.dumps({**flags, "compile": compiled}))
    assert finish(torchrun("main")) == 0, Path("out.txt").read_text()
    (joint,) = run_dirs()
    files = sorted(path.name.split(".")[0] for path in joint.iterdir())
    assert files == ["checkpoint", "config", "events", "metrics", "summary"]
    out, results = Path("out.txt").read_text(), [json.loads(Path(f"result_{rank}.json").read_text()) for rank in (0, 1)]
    assert out.count("2 x cpu") == out.count("evaluation at step") == 1
    assert results[1] == {"global_step": 64}
    expected = ppo.main(args(**flags, runs_dir="alone"))
    assert results[0].keys() == expected.keys()
    for metric in expected.keys() - {"charts/SPS"}:
        if not metric.startswith(("time/", "eval/")):
            assert results[0][metric] == pytest.approx(expected[metric], rel=1e-3, abs=1e-5), metric
    agents = [torch.load(path / "checkpoint.pt")["parts"]["agent"] for path in (joint, next(Path("alone").iterdir()))]
    start = flat(started(flags["seed"]).parameters())
    ours, theirs = (torch.cat([x.flatten() for x in agent.values()]) for agent in agents)
    close(ours, theirs, 2e-5)
    assert (ours - start).abs().max() > 2e-4  # two steps of 2.5e-4


def started(seed: int) -> nn.Module:
    """The agent that a run of this seed starts from."""
    ppo.seed_everything(seed, True)
    return ppo.Agent((4, 84, 84), 6)


def test_sigterm_to_torchrun_saves_and_one_process_can_go_on(short_evaluation):
    flags = {**TINY, **PONG, "total_timesteps": 10**7, "num_minibatches": 2}
    Path("flags.json").write_text(json.dumps(flags))
    process, deadline = torchrun("main"), time.monotonic() + 120
    try:
        while not (any(Path().glob("runs/*/metrics.csv")) and logged(run_dirs()[0], "losses/entropy")):
            assert process.poll() is None and time.monotonic() < deadline, Path("out.txt").read_text()
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGTERM)
        code = finish(process, 90)
    (run_dir,) = run_dirs()
    out = Path("out.txt").read_text()
    assert code != 0 and out.count("saved. Continue:") == 1, out
    assert f"torchrun --nproc-per-node 2 {RANKS} --resume {run_dir}" in out, out
    step = torch.load(run_dir / "checkpoint.pt")["run"]["global_step"]
    assert 0 < step == logged(run_dir, "losses/entropy")[-1][0]
    resumed = ppo.main(ppo.Args(resume=str(run_dir), total_timesteps=step + 128))
    assert resumed["global_step"] == step + 128 and len(run_dirs()) == 1
    assert [s for s, _ in logged(run_dir, "losses/entropy")][-3:] == [step, step + 64, step + 128]


def test_processes_agree_on_the_end_of_the_epochs(monkeypatch):
    """Were each to go by its own KL, they would do different numbers of updates and wait for each other for ever."""
    real = ppo.joint_mean
    monkeypatch.setattr(ppo, "joint_mean", lambda x: real(x) + (1e9 if x.ndim == 0 else 0))
    metrics, _ = play(monkeypatch, by_hand(), target_kl=1.0, update_epochs=4)
    assert metrics["charts/update_epochs"] == 1


def test_main_sends_all_of_the_first_process_to_the_others(monkeypatch):
    calls = spy(monkeypatch, "join_processes")
    _, run_dir = play(monkeypatch, by_hand())
    ((given, _),), state = calls, torch.load(run_dir / "checkpoint.pt")["parts"]["agent"]
    assert [x.shape for x in given[2]] == [x.shape for x in state.values()] != []


def test_only_the_first_process_evaluates(monkeypatch):
    """Under torchrun, --evaluate prints and films once."""
    _, run_dir = play(monkeypatch, at_random(0))
    monkeypatch.setenv("RANK", "1"), monkeypatch.setenv("WORLD_SIZE", "2")
    calls = spy(monkeypatch, "evaluate")
    ppo.main(ppo.Args(evaluate=str(run_dir)))
    assert not calls


# ---- videos --------------------------------------------------------------------------------------------------------


def test_one_command_films_a_trained_policy(monkeypatch):
    """--evaluate RUN --capture-video leaves an mp4 of the first game, in colour, with a frame per step."""
    _, run_dir = train()
    checkpoint = torch.load(run_dir / "checkpoint.pt")
    checkpoint["parts"]["agent"]["actor.bias"].copy_(torch.tensor([0.0, 2.0, 1.0, 0.0]))  # a policy like no other
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    pressed, real = [], ppo.make_eval_env

    class Watched(gym.Wrapper):
        def reset(self, **named):
            pressed.append([])
            return super().reset(**named)

        def step(self, action):
            pressed[-1].append(int(action))
            return super().step(action)

    monkeypatch.setattr(ppo, "make_eval_env", lambda *given: Watched(real(*given)))
    ppo.main(ppo.Args(evaluate=str(run_dir), capture_video=True))
    share = np.bincount(pressed[-1], minlength=4) / len(pressed[-1])
    assert share[1] == pytest.approx(math.exp(2) / (math.exp(2) + math.e + 2), abs=0.12)
    (path,) = (run_dir / "videos").glob("*.mp4")
    film = cv2.VideoCapture(str(path))
    pictures = []
    while (read := film.read())[0]:
        pictures.append(read[1])
    assert abs(len(pictures) - len(pressed[-1])) <= 2 and len(pressed[-1]) > 50
    assert pictures[0].shape == (210, 160, 3) and np.ptp(pictures[0].astype(int), axis=2).max() > 50
    assert film.get(cv2.CAP_PROP_FPS) == 15 and not np.array_equal(pictures[0], pictures[-1])
