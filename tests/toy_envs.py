"""Small environments whose right answers are known. Ids: `toy_envs:Line-v0`, `toy_envs:Picture-v0`, ...

Line and its like have a few numbers to see and to act with. Picture shows images and has buttons, and can be had one by
one (as an emulator's game) and side by side (as ale-py's vector environment, with the keywords of that).
"""

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import FrameStackObservation, ReshapeObservation, TimeLimit
from stable_baselines3.common.atari_wrappers import AtariWrapper


class Line(gym.Env):
    """A point that the action pushes towards 1. Nothing is random: every episode from the same actions is the same."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    seen: list[np.ndarray] = []  # every action of all instances

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
    """Works for `good` steps, then does what `fault` says: nan_obs, nan_reward, huge_reward, inf_final, raise."""

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
        if bad and "reward" in self.fault:
            reward = 1e39 if self.fault == "huge_reward" else np.nan  # infinite as float32
        return obs, reward, False, bad and self.fault == "inf_final", {}


class NanReset(gym.Wrapper):
    """An episode whose first observation alone is nan."""

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        return np.full_like(obs, np.nan), info


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
        if kind == "unbounded":
            self.action_space = gym.spaces.Box(-np.inf, np.inf, (1,))
        if kind == "empty":
            self.action_space = gym.spaces.Box(np.float32([-1, 2]), np.float32([1, 2]))

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


class Picture(gym.Env):
    """Line for scripts that want images: buttons push the point left and right, a bright column shows where it is.

    One step is a frame, as an emulator's; a script that holds each button for four frames sees episodes of 16 steps.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}
    side = 84  # of screen and observation; where a test can, it makes this 36, the least that the networks take

    def __init__(self, frameskip: int = 1, repeat_action_probability: float = 0.0, render_mode: str | None = None,
                 random: bool = False, constant: bool = False, buttons: int = 3, fault: str | None = None):  # fmt: skip
        assert frameskip == 1
        self.stickiness, self.render_mode = repeat_action_probability, render_mode
        self.random, self.constant, self.fault, self.frames = random, constant, fault, 0
        self.observation_space = gym.spaces.Box(0, 255, (self.side, self.side, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(buttons)

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "LEFT", "RIGHT", "UP"][: self.action_space.n]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.t, self.button = float(self.np_random.uniform(-1, 1)) if self.random else 0.0, 0, 0
        return self.render(), {}

    def step(self, action):
        self.t, self.frames = self.t + 1, self.frames + 1
        if not (self.stickiness and self.np_random.random() < self.stickiness):
            self.button = int(action)
        self.position += (0, -0.025, 0.025, 0)[self.button]
        reward = 0.75 if self.constant else -abs(self.position - 1) / 4 - 0.0025
        if self.fault and self.frames > 280:  # 70 steps of four frames
            if self.fault == "raise":
                raise ValueError("the simulator broke")
            reward = {"nan_reward": np.nan, "inf_reward": np.inf}[self.fault]
        return self.render(), reward, False, False, {}

    def render(self) -> np.ndarray:
        screen = np.zeros((self.side, self.side, 3), np.uint8)
        column = round((np.clip(self.position, -3, 3) + 3) / 6 * (self.side - 4))
        screen[:, column : column + 4] = 255
        screen[self.t % self.side] = 127
        return screen


class BlindPicture(Picture):
    """Cannot be rendered for a video."""

    def render(self) -> np.ndarray:
        if self.render_mode:
            raise RuntimeError("no display")
        return super().render()


def pictures(num_envs: int, *, autoreset_mode, noop_max: int, num_threads: int, life_loss_info: bool,
             reward_clipping: bool, max_episode_steps: int, **options) -> gym.vector.VectorEnv:  # fmt: skip
    """Pictures side by side, with the keywords and the observations of ale-py's vector environment: (4, side, side)."""

    def make() -> gym.Env:
        game = TimeLimit(Picture(**options), max_episode_steps)
        game = AtariWrapper(game, noop_max, 4, Picture.side, terminal_on_life_loss=False, clip_reward=reward_clipping)
        return FrameStackObservation(ReshapeObservation(game, (Picture.side,) * 2), 4, padding_type="zero")

    return gym.vector.SyncVectorEnv([make] * num_envs, autoreset_mode=autoreset_mode)


gym.register("Line-v0", Line, max_episode_steps=16)
gym.register("LineRounded-v0", Line, max_episode_steps=16, kwargs={"low": -0.5, "high": 1.9})
gym.register("LineScaled-v0", Line, max_episode_steps=16, kwargs={"low": 10.0, "high": 20.0, "shape": (2, 3)})
gym.register("Counter-v0", CounterEnv, max_episode_steps=4)
gym.register("CounterEnds-v0", CounterEnv, max_episode_steps=4, kwargs={"ends_at": 3})
gym.register("CounterBoth-v0", CounterEnv, max_episode_steps=4, kwargs={"ends_at": 4})
gym.register("CounterAlias-v0", CounterEnv, max_episode_steps=4, kwargs={"alias": True})
gym.register("Odd-v0", OddEnv, max_episode_steps=5)
gym.register("Constant-v0", ConstantEnv, max_episode_steps=5)
for fault in ("nan_obs", "nan_reward", "huge_reward", "inf_final", "raise"):
    gym.register(f"Faulty_{fault}-v0", FaultyEnv, max_episode_steps=1000, kwargs={"fault": fault})
for kind in ("image", "dict", "integer_action", "unbounded", "empty"):
    gym.register(f"Other_{kind}-v0", OtherSpaces, kwargs={"kind": kind})
for name, frames, options in (
    ("Picture-v0", 64, {}),
    ("PictureRandom-v0", 64, {"random": True}),
    ("PictureConstant-v0", 16, {"constant": True}),
    ("PictureFourButtons-v0", 64, {"buttons": 4}),
    *((f"PictureFaulty_{fault}-v0", 4000, {"fault": fault}) for fault in ("nan_reward", "inf_reward", "raise")),
):
    gym.register(name, Picture, max_episode_steps=frames, vector_entry_point=pictures, kwargs=options)
gym.register("PictureBlind-v0", BlindPicture, max_episode_steps=64, vector_entry_point=pictures)
