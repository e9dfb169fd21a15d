"""Small environments whose right answers are known. Ids: `toy_envs:Line-v0`, `toy_envs:Counter-v0`, ..."""

import signal

import gymnasium as gym
import numpy as np


class Line(gym.Env):
    """A point that the action pushes towards 1. Nothing is random: every episode from the same actions is the same."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    signal_at: tuple[int, int] | None = None  # (number of steps made by all instances, signal to raise then)
    steps_made = 0
    seen: list[np.ndarray] = []

    def __init__(self, render_mode: str | None = None, low: float = -1.0, high: float = 1.0, shape: tuple = (1,)):
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = gym.spaces.Box(low, high, shape)

    def _obs(self) -> np.ndarray:
        return np.array([self.position, self.t / 10], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.t = 0.0, 0
        return self._obs(), {}

    def step(self, action):
        Line.seen.append(np.array(action))
        Line.steps_made += 1
        if Line.signal_at and Line.steps_made == Line.signal_at[0]:
            signal.raise_signal(Line.signal_at[1])
        self.position += 0.1 * float(np.mean(action))
        self.t += 1
        parts = {"reward_near": -abs(self.position - 1), "reward_time": -0.01}
        return self._obs(), sum(parts.values()), False, False, parts

    def render(self) -> np.ndarray:
        return np.full((32, 32, 3), min(255, 10 * self.t), dtype=np.uint8)


class CounterEnv(gym.Env):
    """Observes the step number, pays 1 a step. `ends_at` terminates; `alias` hands out one array, changed in place."""

    def __init__(self, ends_at: int = 10**9, alias: bool = False, render_mode: str | None = None):
        self.observation_space = gym.spaces.Box(0, np.inf, (1,), np.float64)
        self.action_space = gym.spaces.Box(-1, 1, (1,))
        self.ends_at, self.alias, self.obs = ends_at, alias, np.zeros(1)

    def _obs(self) -> np.ndarray:
        self.obs[:] = self.t
        return self.obs if self.alias else self.obs.copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return self._obs(), 1, self.t >= self.ends_at, False, {}  # an integer reward, as InvertedPendulum-v5's


class ConstantEnv(gym.Env):
    """Always the same observation and reward 1: the value is 1 / (1 - gamma), whatever a time limit says."""

    def __init__(self, render_mode: str | None = None):
        self.observation_space = gym.spaces.Box(0, 1, (1,))
        self.action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 1.0, False, False, {}


class FaultyEnv(ConstantEnv):
    """Works for `good` steps, then does what `fault` says: nan_obs, nan_reward, inf_final, raise."""

    def __init__(self, fault: str = "raise", good: int = 70, render_mode: str | None = None):
        super().__init__()
        self.fault, self.good, self.t = fault, good, 0

    def step(self, action):
        self.t += 1
        obs, reward, bad = np.ones(1, np.float32), 1.0, self.t > self.good
        if bad and self.fault == "raise":
            raise ValueError("the simulator broke")
        if bad and self.fault in ("nan_obs", "inf_final"):
            obs = np.full(1, np.inf if self.fault == "inf_final" else np.nan, np.float32)
        if bad and self.fault == "nan_reward":
            reward = np.nan
        return obs, reward, False, bad and self.fault == "inf_final", {}


class OddEnv(ConstantEnv):
    """No render_mode, infos of odd types, a reward part also in the reset's info; `RandomState` wants 32-bit seeds."""

    def __init__(self):
        super().__init__()

    def reset(self, *, seed=None, options=None):
        np.random.RandomState(seed)
        return super().reset(seed=seed)[0], {"reward_part": 100.0, "reward_dict": {"a": 1.0}}

    def step(self, action):
        odd = {"reward_dict": {"a": 1.0}, "reward_none": None, "reward_text": "x", 3: 1.0}
        return *super().step(action)[:4], {"reward_part": 1.0, **odd}


class OtherSpaces(ConstantEnv):
    """Spaces that the continuous scripts must refuse."""

    def __init__(self, kind: str = "image", render_mode: str | None = None):
        super().__init__()
        if kind == "image":
            self.observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        if kind == "dict":
            self.observation_space = gym.spaces.Dict({"a": gym.spaces.Box(0, 1, (1,))})
        if kind == "integer_action":
            self.action_space = gym.spaces.Box(0, 3, (1,), np.int64)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


gym.register("Line-v0", Line, max_episode_steps=16)
gym.register("LineScaled-v0", Line, max_episode_steps=16, kwargs={"low": 10.0, "high": 20.0, "shape": (2, 3)})
gym.register("Counter-v0", CounterEnv, max_episode_steps=4)
gym.register("CounterEnds-v0", CounterEnv, max_episode_steps=4, kwargs={"ends_at": 3})
gym.register("CounterBoth-v0", CounterEnv, max_episode_steps=4, kwargs={"ends_at": 4})
gym.register("CounterAlias-v0", CounterEnv, max_episode_steps=4, kwargs={"alias": True})
gym.register("Odd-v0", OddEnv, max_episode_steps=5)
gym.register("Constant-v0", ConstantEnv, max_episode_steps=5)
for fault in ("nan_obs", "nan_reward", "inf_final", "raise"):
    gym.register(f"Faulty_{fault}-v0", FaultyEnv, max_episode_steps=1000, kwargs={"fault": fault})
for kind in ("image", "dict", "integer_action"):
    gym.register(f"Other_{kind}-v0", OtherSpaces, kwargs={"kind": kind})
