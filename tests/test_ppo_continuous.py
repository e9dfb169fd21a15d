"""ppo_continuous.py as a whole, what is its own: truncation, actions, statistics, the KL penalty, parts of the reward.

What all scripts do is in test_contract.py, and what all PPO scripts do in test_ppo.py.
"""

import numpy as np
import ppo_continuous as ppo
import pytest
import torch
from harness import checkpoint, read, rows, values
from script_cases import PPO_CONTINUOUS
from toy_envs import Line

pytestmark = pytest.mark.usefixtures("empty_folder")
args, train = PPO_CONTINUOUS.args, PPO_CONTINUOUS.train


# ---- truncation, autoreset, actions --------------------------------------------------------------------------------


@pytest.fixture
def gae_inputs(monkeypatch):
    """What main hands to compute_gae, with a critic whose value is its input: V(observation t) = t."""
    captured, compute_gae = [], ppo.compute_gae
    monkeypatch.setattr(ppo, "compute_gae", lambda *a: captured.append([x.clone() for x in a[:5]]) or compute_gae(*a))

    class KnownCritic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, obs):
            return obs[..., 0] * self.weight

    def agent(obs_dim, action_dim):
        made = real(obs_dim, action_dim)
        made.critic = KnownCritic()
        return made

    real = ppo.Agent
    monkeypatch.setattr(ppo, "Agent", agent)
    return captured


RAW = {
    "num_steps": 10,
    "num_envs": 1,
    "total_timesteps": 10,
    "num_minibatches": 2,
    "norm_obs": False,
    "norm_reward": False,
}


@pytest.mark.parametrize(
    "env, next_values, terminations, dones",
    [
        ("Counter", [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [0] * 10, [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]),
        ("CounterAlias", [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [0] * 10, [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]),
        ("CounterEnds", [1, 2, None, 1, 2, None, 1, 2, None, 1], [0, 0, 1] * 3 + [0], [0, 0, 1] * 3 + [0]),
        ("CounterBoth", [1, 2, 3, None, 1, 2, 3, None, 1, 2], [0, 0, 0, 1] * 2 + [0, 0], [0, 0, 0, 1] * 2 + [0, 0]),
    ],
)
def test_bootstrap_comes_from_the_true_last_observation(gae_inputs, env, next_values, terminations, dones):
    """Time limit after 4 steps, also with an environment that changes one array in place; a death, and both at once."""
    ppo.main(args(env_id=f"toy_envs:{env}-v0", **RAW))
    rewards, values, following, terminated, done = (x[:, 0].tolist() for x in gae_inputs[0])
    ends = [i for i, d in enumerate(dones) if d]
    # No row starts at a last observation:
    assert values == [0, *(0 if i in ends else (values[i] + 1) for i in range(9))]
    assert rewards == [1] * 10
    assert terminated == [bool(t) for t in terminations] and done == [bool(d) for d in dones]
    assert [v for v, expected in zip(following, next_values, strict=True) if expected is not None] == [
        v for v in next_values if v is not None
    ]


@pytest.mark.parametrize("truncation_is_death", [False, True])
def test_constant_reward_has_value_one_over_one_minus_gamma(monkeypatch, truncation_is_death):
    """gamma 0.9: the true value is 10, and the critic finds it; not so if the time limit of 5 steps counts as death."""
    if truncation_is_death:
        real = ppo.compute_gae
        monkeypatch.setattr(ppo, "compute_gae", lambda r, v, n, t, d, *rest: real(r, v, n, d, d, *rest))
    metrics, _ = train(
        env_id="toy_envs:Constant-v0", total_timesteps=80 * 128, num_steps=64, gamma=0.9, learning_rate=5e-3,
        norm_obs=False, norm_reward=False, clip_vloss=False, max_grad_norm=100.0, update_epochs=4, log_every=0,
    )  # fmt: skip
    if truncation_is_death:
        assert metrics["losses/value_mean"] < 4  # the mean of (1 - 0.9^k) / 0.1 over k = 1..5 is 2.6
    else:
        assert metrics["losses/value_mean"] == pytest.approx(10, rel=0.03)


def test_sample_is_stored_and_its_clipped_image_is_acted(monkeypatch):
    """Range [10, 20], shape (2, 3): the environment never sees more, the update sees the unclipped sample."""
    batches, real = [], ppo.update
    monkeypatch.setattr(ppo, "update", lambda *a: batches.append(a[2]) or real(*a))
    train(env_id="toy_envs:LineScaled-v0", total_timesteps=128, update_epochs=1)
    acted = np.stack(Line.seen)
    assert acted.shape[1:] == (2, 3) and acted.dtype == np.float32
    assert acted.min() == 10 and acted.max() == 20 and abs(acted.mean() - 15) < 1
    stored = torch.cat([batch[1] for batch in batches])
    assert stored.shape == (128, 6) and stored.abs().max() > 1.5
    first = batches[0]
    logprobs = ppo.gaussian_log_prob(first[1], first[2], torch.zeros(6))
    assert torch.equal(logprobs, first[3]) or torch.allclose(logprobs, first[3], atol=1e-6)


def test_learns_to_reach_the_goal():
    metrics, run_dir = train(
        total_timesteps=8192, num_steps=128, learning_rate=3e-3, num_minibatches=8, update_epochs=10
    )
    assert values(run_dir, "charts/episodic_return")[0] < -11
    assert metrics["eval/episodic_return"] > -7.5  # full speed to the goal: -0.9 - 0.8 - ... and the time's, -4.66


# ---- observations and rewards --------------------------------------------------------------------------------------


def test_observation_statistics_are_one_over_all_environments():
    _, run_dir = train(env_id="Pendulum-v1", num_envs=3)
    state = checkpoint(run_dir)["parts"]["obs_rms"]
    assert state["mean"].shape == (3,) and state["count"] == 32 * 3 * 2  # 2 rollouts of 96: each observation acted on


def test_observation_statistics_travel_with_the_policy():
    """With fresh ones in the checkpoint the same policy plays otherwise."""
    _, run_dir = train(env_id="Pendulum-v1", eval_episodes=3)
    expected = np.mean(read(run_dir, "summary")["final_evaluation"])
    assert PPO_CONTINUOUS.main(evaluate=str(run_dir))["eval/episodic_return"] == pytest.approx(expected)
    state = checkpoint(run_dir)
    state["parts"]["obs_rms"] |= {"mean": torch.zeros(3, dtype=float), "var": torch.ones(3, dtype=float)}
    torch.save(state, "fresh_statistics.pt")
    assert PPO_CONTINUOUS.main(evaluate="fresh_statistics.pt")["eval/episodic_return"] != pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"num_envs": 3}, ["near", "time"]),  # Line
        ({"env_id": "HalfCheetah-v5", "total_timesteps": 512, "num_steps": 128}, ["forward", "ctrl"]),
    ],
    ids=str,
)
def test_parts_of_the_reward_add_up_to_its_mean(flags, parts):
    metrics, _ = train(**flags)
    assert {name for name in metrics if name.startswith("rewards/")} == {f"rewards/{part}" for part in parts}
    total = sum(metrics[f"rewards/{part}"] for part in parts)
    assert total == pytest.approx(metrics["charts/reward_mean"], abs=1e-6)
    assert "time" not in parts or metrics["rewards/time"] == pytest.approx(-0.01)


def test_odd_environment():
    """No render_mode in its constructor, infos of odd types, a reward's part also in the reset's info, big seeds."""
    metrics, _ = train(env_id="toy_envs:Odd-v0", seed=2**31 - 1, num_envs=3, eval_every=64)
    assert metrics["rewards/part"] == pytest.approx(1) and "rewards/dict" not in metrics


# ---- the KL penalty ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target, factor", [(1e-12, 2.0), (1e9, 0.5)])
def test_kl_penalty_adapts_its_coefficient_and_stops_no_epoch(target, factor):
    _, run_dir = train(kl_penalty=True, target_kl=target, kl_coef=3.0)
    assert values(run_dir, "losses/kl_coef") == pytest.approx([3 * factor**k for k in (1, 2, 3, 4)])
    assert values(run_dir, "charts/update_epochs") == [2.0] * 4


def test_kl_penalty_aims_at_target_kl():
    assert rows(train(kl_penalty=True)[1]) != rows(train(kl_penalty=True, target_kl=1e-9)[1])
