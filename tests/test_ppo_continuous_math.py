"""The numbers of ppo_continuous.py: each function of its math against its definition, a hand-worked case or SB3.

No environment is stepped here. Where a case was collected from a public bug report, its number is that of the project's
list of cases ("case 39").
"""

import copy
import inspect
import io
import itertools
import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.utils import explained_variance as sb3_explained_variance
from torch import nn
from torch.distributions import Normal, kl_divergence

import ppo_continuous as ppo

OBS_DIM, ACTION_DIM = 3, 2


def f64(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def column(x) -> torch.Tensor:
    """One environment's rollout, (T, 1)."""
    return f64(x)[:, None]


def close(actual, expected, tolerance=1e-6, relative=0.0):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual.detach(), expected.detach(), atol=tolerance, rtol=relative)


def flat(parameters) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


# ---------------------------------------------------------------------------------------------------------------------
# Generalized advantage estimation
# ---------------------------------------------------------------------------------------------------------------------
def random_rollout(seed: int, steps: int = 23, envs: int = 5, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Random numbers and flags; next_values are those of the next row only where no episode ended."""
    g = torch.Generator().manual_seed(seed)
    rewards, values, ends = (torch.randn(steps, envs, generator=g, dtype=torch.float64) for _ in range(3))
    terminations, truncations = (torch.rand(steps, envs, generator=g) < 0.15 for _ in range(2))
    next_values = torch.cat([values[1:], ends[-1:]])
    next_values = torch.where(truncations | terminations, ends, next_values)
    floats = {"rewards": rewards.to(dtype), "values": values.to(dtype), "next_values": next_values.to(dtype)}
    return floats | {"terminations": terminations, "dones": terminations | truncations}


def gae_by_definition(rewards, values, next_values, terminations, dones, gamma, gae_lambda) -> torch.Tensor:
    """A_t = sum_k (gamma lambda)^k delta_{t+k} up to the end of the episode, in O(T^2)."""
    advantages = torch.zeros_like(values)
    for t, n in np.ndindex(*values.shape):
        for k in range(t, len(values)):
            bootstrap = 0.0 if terminations[k, n] else next_values[k, n]
            delta = rewards[k, n] + gamma * bootstrap - values[k, n]
            advantages[t, n] += (gamma * gae_lambda) ** (k - t) * delta
            if dones[k, n]:
                break
    return advantages


def k_step_advantages(t, n, rewards, values, next_values, terminations, dones, gamma) -> list[torch.Tensor]:
    """[r_t + ... + gamma^(k-1) r_{t+k-1} + gamma^k V(s_{t+k}) - V(s_t) for k = 1, 2, ... to the episode's end]."""
    advantages, discounted = [], torch.tensor(0.0, dtype=torch.float64)
    for k in range(t, len(values)):
        discounted = discounted + gamma ** (k - t) * rewards[k, n]
        bootstrap = 0.0 if terminations[k, n] else gamma ** (k - t + 1) * next_values[k, n]
        advantages.append(discounted + bootstrap - values[t, n])
        if dones[k, n]:
            break
    return advantages


@pytest.mark.parametrize("flags_as", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0), (0.0, 0.95)])
@pytest.mark.parametrize("seed", range(2))
def test_gae_is_the_double_sum_of_its_definition(seed, gamma, gae_lambda, flags_as):
    """The backward recursion: any slip in cut, bootstrap, decay or index; bool and float flags mean the same."""
    rollout = random_rollout(seed)
    expected = gae_by_definition(**rollout, gamma=gamma, gae_lambda=gae_lambda)
    for name in ("terminations", "dones"):
        rollout[name] = rollout[name].to(flags_as)
    advantages, returns = ppo.compute_gae(**rollout, gamma=gamma, gae_lambda=gae_lambda)
    close(advantages, expected, 1e-12)
    close(returns, expected + rollout["values"], 1e-12)


def test_gae_in_float32_is_right_to_single_precision_and_stays_float32():
    rollout = random_rollout(3, dtype=torch.float32)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in rollout.items()}
    advantages, returns = ppo.compute_gae(**rollout, gamma=0.99, gae_lambda=0.95)
    assert advantages.dtype == returns.dtype == torch.float32
    close(advantages, gae_by_definition(**exact, gamma=0.99, gae_lambda=0.95), 1e-6, 1e-6)


def test_lambda_0_is_the_one_step_td_error():
    rollout = random_rollout(4)
    advantages, _ = ppo.compute_gae(**rollout, gamma=0.9, gae_lambda=0.0)
    bootstrap = torch.where(rollout["terminations"], 0.0, rollout["next_values"])
    close(advantages, rollout["rewards"] + 0.9 * bootstrap - rollout["values"], 1e-12)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.5, 0.0])
def test_gae_is_the_weighted_mixture_of_k_step_advantages(gae_lambda):
    """Weights (1 - lambda) lambda^(k-1), the rest on the longest; lambda = 1: discounted return with bootstrap - V."""
    rollout = random_rollout(5)
    advantages, _ = ppo.compute_gae(**rollout, gamma=0.97, gae_lambda=gae_lambda)
    for t, n in np.ndindex(*advantages.shape):
        k_step = k_step_advantages(t, n, **rollout, gamma=0.97)
        weights = [(1 - gae_lambda) * gae_lambda**k for k in range(len(k_step) - 1)] + [gae_lambda ** (len(k_step) - 1)]
        assert sum(weights) == pytest.approx(1, abs=1e-12)
        close(advantages[t, n], sum(w * a for w, a in zip(weights, k_step, strict=True)), 1e-12)


def gae_of_case_3(final_value: float, terminated: bool = False) -> torch.Tensor:
    """r = 1, V = 10, gamma .99, lambda .95, the episode ends at t = 1 in a state of value final_value."""
    ends = column([0.0, 1.0, 0.0])
    advantages, returns = ppo.compute_gae(
        column([1.0] * 3), column([10.0] * 3), column([10.0, final_value, 10.0]), ends * terminated, ends, 0.99, 0.95
    )
    close(returns, advantages + 10)
    return advantages[:, 0]


def test_truncation_bootstraps_and_cuts():
    """Cases 3 and 6: 0 in place of the bootstrap gives [-7.5645, -9, .9], no cut gives [2.5425, 1.74645, .9]."""
    close(gae_of_case_3(10.0), f64([1.74645, 0.9, 0.9]))


def test_truncation_bootstraps_from_the_final_observation():
    """Case 5: V(s_t) = 10 in place of V(final) = 0 gives .9 where -9 is right."""
    close(gae_of_case_3(0.0), f64([0.9 + 0.9405 * -9, -9.0, 0.9]))


@pytest.mark.parametrize("leak", [10.0, math.nan, math.inf, -math.inf])
def test_termination_has_no_bootstrap_whatever_the_value_of_the_last_observation(leak):
    """Cases 3 and 10 (termination wins over a time limit at the same step); nan * 0 would spread over the rollout."""
    close(gae_of_case_3(leak, terminated=True), f64([-7.5645, -9.0, 0.9]))


def test_reward_of_the_terminal_step_counts():
    """Case 8: cutting the present step, not the future one, loses the terminal reward."""
    ends = column([0.0, 0.0, 1.0])
    _, returns = ppo.compute_gae(column([0.0, 0.0, 1.0]), column([0.0] * 3), 7 * ends, ends, ends, 1.0, 1.0)
    close(returns[:, 0], f64([1.0, 1.0, 1.0]))


def test_returns_are_the_new_advantages_plus_values():
    """Case 9: returns built from old (zero) advantages equal the values and teach the critic nothing."""
    rollout = random_rollout(6)
    advantages, returns = ppo.compute_gae(**rollout, gamma=0.99, gae_lambda=0.95)
    close(returns, advantages + rollout["values"], 0)
    assert (returns != rollout["values"]).all()


@pytest.mark.parametrize(("gae_lambda", "horizon"), [(0.95, 16.8067), (1.0, 100.0)])
def test_horizon_of_gamma_and_lambda(gae_lambda, horizon):
    """delta = 1 for ever sums to 1 / (1 - gamma lambda)."""
    zeros = torch.zeros(4000, 1, dtype=torch.float64)
    advantages, _ = ppo.compute_gae(zeros + 1, zeros, zeros, zeros, zeros, 0.99, gae_lambda)
    close(advantages[0, 0], 1 / (1 - 0.99 * gae_lambda), 1e-9)
    close(advantages[0, 0], horizon, 5e-5)


def test_a_reward_of_1_for_ever_is_worth_1_over_1_minus_gamma_through_time_limits():
    """V = 100 everywhere at gamma .99 is exact, so time limits must leave every advantage 0 and every return 100."""
    hundred = torch.full((7, 2), 100.0, dtype=torch.float64)
    dones = torch.arange(14).reshape(7, 2) % 3 == 0
    advantages, returns = ppo.compute_gae(hundred / 100, hundred, hundred, dones & False, dones, 0.99, 0.95)
    close(advantages, hundred * 0, 1e-9)
    close(returns, hundred, 1e-9)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_the_exact_value_of_a_chain_makes_the_mean_advantage_zero(gae_lambda):
    """Every path of a random walk on five states, 1 for leaving to the right and .1 a step; V = (I - gamma P)^-1 r."""
    states, gamma, steps = 5, 0.9, 6
    transitions = np.diag([0.6] * (states - 1), 1) + np.diag([0.4] * (states - 1), -1)
    mean_rewards = np.full(states, 0.1) + np.eye(states)[-1] * 0.6
    v = np.linalg.solve(np.eye(states) - gamma * transitions, mean_rewards)
    paths = list(itertools.product(range(states), *[(-1, 1)] * steps))
    shape = (steps, len(paths))
    rewards, values, next_values, ends, weights = *(np.zeros(shape) for _ in range(4)), np.ones(len(paths))
    for n, (state, *moves) in enumerate(paths):
        for t, move in enumerate(moves):
            weights[n] *= 0.6 if move > 0 else 0.4
            after = state + move
            ends[t, n] = not 0 <= after < states
            rewards[t, n] = 0.1 + (after == states)
            values[t, n], next_values[t, n] = v[state], 99 if ends[t, n] else v[after]
            state = states // 2 if ends[t, n] else after
    rollout = (torch.tensor(x) for x in (rewards, values, next_values, ends, ends))
    advantages, _ = ppo.compute_gae(*rollout, gamma, gae_lambda)
    mean = (advantages[0].numpy() * weights).reshape(states, -1).sum(1)
    close(mean, np.zeros(states), 1e-12)
    assert advantages[0].abs().max() > 0.1  # single advantages are not zero


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (0.9, 1.0), (1.0, 0.0)])
def test_gae_equals_stable_baselines3(gamma, gae_lambda):
    """On the same tensors, terminations only (SB3 handles a time limit by changing the reward)."""
    rng = np.random.default_rng(0)
    steps, envs = 40, 3
    rewards, values = rng.standard_normal((2, steps, envs)).astype(np.float32)
    last_values, terminations = torch.from_numpy(values[:1] + 0.3), rng.random((steps, envs)) < 0.1
    space = gym.spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(steps, space, space, "cpu", gae_lambda=gae_lambda, gamma=gamma, n_envs=envs)
    starts = np.concatenate([np.ones((1, envs)), terminations[:-1]])
    nothing = np.zeros((envs, 1))
    for t in range(steps):
        buffer.add(nothing, nothing, rewards[t], starts[t], torch.from_numpy(values[t]), torch.zeros(envs))
    buffer.compute_returns_and_advantage(last_values, terminations[-1])
    rewards_t, values_t, terminations_t = (torch.from_numpy(x) for x in (rewards, values, terminations))
    next_values = torch.cat([values_t[1:], last_values])
    advantages, returns = ppo.compute_gae(
        rewards_t, values_t, next_values, terminations_t, terminations_t, gamma, gae_lambda
    )
    close(advantages, buffer.advantages, 1e-6, 1e-6)
    close(returns, buffer.returns, 1e-6, 1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Policy loss
# ---------------------------------------------------------------------------------------------------------------------
def gradient_at(ratio: float, advantage: float, clip_coef: float | None) -> tuple[float, float]:
    """policy_loss of one sample and its derivative by the log-probability."""
    logprob = f64([math.log(ratio)]).requires_grad_()
    loss = ppo.policy_loss(logprob, f64([0.0]), f64([advantage]), clip_coef)
    return loss.item(), torch.autograd.grad(loss, logprob)[0].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        *((0.5, 1, -0.5), (0.9, 1, -0.9), (1.1, 1, -1.1), (1.6, 1, 0)),
        *((0.5, -1, 0), (0.9, -1, 0.9), (1.1, -1, 1.1), (1.6, -1, 1.6)),
    ],
)
def test_clip_stops_the_gradient_only_where_the_ratio_went_too_far_in_the_right_direction(ratio, advantage, gradient):
    """Flat above 1 + eps for A > 0 and below 1 - eps for A < 0; live on the bad side, where it pulls back."""
    loss, derivative = gradient_at(ratio, advantage, 0.2)
    assert derivative == pytest.approx(gradient, abs=1e-12)
    assert gradient != 0 or derivative == 0
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    assert loss == pytest.approx(expected, abs=1e-12)
    loss, derivative = gradient_at(ratio, advantage, None)
    assert derivative == loss == pytest.approx(-ratio * advantage, abs=1e-12)  # no clip: live everywhere


@pytest.mark.parametrize("clip_coef", [0.1, 0.2, 0.3])
def test_clip_range_is_1_plus_minus_clip_coef(clip_coef):
    for side, advantage in ((1, 1), (-1, -1)):
        assert gradient_at(1 + side * (clip_coef - 1e-3), advantage, clip_coef)[1] != 0
        loss, derivative = gradient_at(1 + side * (clip_coef + 1e-3), advantage, clip_coef)
        assert derivative == 0
        assert loss == pytest.approx(-(1 + side * clip_coef) * advantage, abs=1e-12)


def test_policy_loss_is_the_mean_over_samples():
    ratios, advantages = f64([0.5, 1.6, 1.6, 1.0]), f64([1.0, 2.0, -1.0, 3.0])
    loss = ppo.policy_loss(ratios.log(), torch.zeros(4), advantages, 0.2)
    close(loss, -(0.5 + 2.4 - 1.6 + 3) / 4, 1e-12)


def test_advantages_are_normalised_to_mean_0_and_sample_std_1():
    close(ppo.normalize_advantages(f64([1.0, 3.0])), f64([-1, 1]) / math.sqrt(2), 1e-7)
    advantages = ppo.normalize_advantages(torch.randn(257, generator=torch.Generator().manual_seed(0)) * 5 + 40)
    close(advantages.mean(), 0.0, 1e-5)
    close(advantages.std(), 1.0, 1e-5)
    close(ppo.normalize_advantages(torch.full((64,), 2.0)), torch.zeros(64))  # no division by zero


@pytest.mark.parametrize(
    ("logratio", "k1", "k3"), [([-0.5, 0.5], 0, 0.127626), ([1.0], -1, 0.718282), ([-1.0], 1, 0.367879)]
)
def test_approx_kl_is_k3_of_the_new_policy_against_the_old(logratio, k1, k3):
    """Case 36: mean(-logratio) is 0 for the first; the other two tell a swapped sign."""
    close(-f64(logratio).mean(), k1, 1e-12)
    close(ppo.approx_kl(f64(logratio)), k3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_approx_kl_is_never_negative(dtype):
    """exp(x) - 1 - x in float32 is negative for small x; expm1 is not."""
    g = torch.Generator().manual_seed(0)
    for exponent in range(-12, 2):
        for x in torch.randn(200, generator=g, dtype=dtype) * 10.0**exponent:
            assert ppo.approx_kl(x[None]) >= 0
    assert ppo.approx_kl(torch.zeros(5, dtype=dtype)) == 0


def test_approx_kl_estimates_the_exact_kl():
    g = torch.Generator().manual_seed(0)
    mean, log_std, new_mean, new_log_std = f64([0.3, -1.0]), f64([0.1, -0.4]), f64([0.6, -0.8]), f64([0.3, -0.7])
    actions = mean + log_std.exp() * torch.randn(200_000, 2, generator=g, dtype=torch.float64)
    new, old = ppo.gaussian_log_prob(actions, new_mean, new_log_std), ppo.gaussian_log_prob(actions, mean, log_std)
    exact = ppo.gaussian_kl(mean, log_std, new_mean, new_log_std)
    assert ppo.approx_kl(new - old).item() == pytest.approx(exact.item(), rel=0.02)
    swapped = ppo.gaussian_kl(new_mean, new_log_std, mean, log_std)
    assert abs(swapped - exact) > 0.1 * exact  # the two directions are told apart


@pytest.mark.parametrize(("ratios", "fraction"), [([0.7, 0.95, 1.3], 2 / 3), ([0.81, 1.19], 0), ([0.79, 1.21], 1)])
def test_clip_fraction(ratios, fraction):
    """Case 41: abs(ratio - 1) > clip_coef, on both sides."""
    close(ppo.clip_fraction(f64(ratios).log(), 0.2), fraction)


# Exact facts about the policy gradient, by enumeration of a bandit with two actions.
LOGITS, Q = [0.4, -0.3], [1.0, 3.0]


def bandit_gradient(advantages: list[float], clip_coef: float | None = 0.2) -> tuple[torch.Tensor, float]:
    """Mean and total variance, over the policy's actions, of the sample gradient of -policy_loss at ratio 1."""
    logits = f64(LOGITS).requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    p = logprobs.detach().exp()
    samples = []
    for action, advantage in enumerate(advantages):
        logprob = logprobs[action : action + 1]
        loss = ppo.policy_loss(logprob, logprob.detach(), f64([advantage]), clip_coef)
        samples.append(-torch.autograd.grad(loss, logits, retain_graph=True)[0])
    samples = torch.stack(samples)
    mean = (p[:, None] * samples).sum(0)
    return mean, (p[:, None] * (samples - mean).square()).sum().item()


def true_bandit_gradient() -> torch.Tensor:
    logits = f64(LOGITS).requires_grad_()
    return torch.autograd.grad((torch.softmax(logits, 0) * f64(Q)).sum(), logits)[0]


@pytest.mark.parametrize("clip_coef", [0.2, None])
def test_policy_loss_has_the_policy_gradient_on_average(clip_coef):
    """At ratio 1 the mean sample gradient is that of the expected reward, and that of the score is zero."""
    close(bandit_gradient([1.0, 1.0], clip_coef)[0], torch.zeros(2), 1e-12)
    close(bandit_gradient(Q, clip_coef)[0], true_bandit_gradient(), 1e-12)


@pytest.mark.parametrize("baseline", [2.0, -5.0, 1e6])
def test_a_state_baseline_leaves_the_mean_gradient_and_only_changes_the_variance(baseline):
    mean, variance = bandit_gradient([q - baseline for q in Q])
    close(mean, true_bandit_gradient(), 1e-9)
    if baseline == 1e6:  # huge: unbiased still, but the variance explodes
        assert variance > 1e9 * bandit_gradient(Q)[1]


def test_an_action_dependent_baseline_biases_the_gradient():
    mean, _ = bandit_gradient([q - b for q, b in zip(Q, [1.0, 2.5], strict=True)])
    assert (mean - true_bandit_gradient()).abs().min() > 0.1


def test_a_baseline_with_exactly_zero_variance():
    """b = p1 q0 + p0 q1: the best baseline weighs returns by the squared score, it is not the mean return."""
    p = torch.softmax(f64(LOGITS), 0).tolist()
    baseline = p[1] * Q[0] + p[0] * Q[1]
    mean, variance = bandit_gradient([q - baseline for q in Q])
    close(mean, true_bandit_gradient(), 1e-12)
    assert variance < 1e-24
    value = p[0] * Q[0] + p[1] * Q[1]
    assert 0.01 < bandit_gradient([q - value for q in Q])[1] < bandit_gradient(Q)[1]


# ---------------------------------------------------------------------------------------------------------------------
# Value loss, explained variance
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "old_value", "target", "clip_coef", "loss"),
    [
        (1.0, 0.0, 2.0, 0.2, 1.62),  # case 39: errors 1.00 and 3.24, the larger is halved
        (1.0, 0.0, 2.0, None, 0.5),
        (1.0, 0.0, 2.0, 5.0, 0.5),  # a wide clip does nothing
        (0.1, 0.0, 2.0, 0.2, 0.5 * 1.9**2),  # inside the range
        (-1.0, 0.0, 0.5, 0.2, 0.5 * 1.5**2),  # moved away from the target: the plain error is the larger
        (11.0, 10.0, 12.0, 0.2, 1.62),  # the range is around the old value
    ],
)
def test_value_loss(value, old_value, target, clip_coef, loss):
    close(ppo.value_loss(f64([value]), f64([old_value]), f64([target]), clip_coef), loss, 1e-12)


def test_value_clip_takes_the_larger_error_sample_by_sample_before_the_mean():
    values, old, targets = f64([1.0, -1.0]), f64([0.0, 0.0]), f64([2.0, 0.5])
    loss = ppo.value_loss(values.requires_grad_(), old, targets, 0.2)
    close(loss, 0.5 * (3.24 + 2.25) / 2, 1e-12)
    gradient = torch.autograd.grad(loss, values)[0]
    close(gradient, f64([0.0, -1.5 / 2]), 1e-12)  # far enough: no gradient; moved away: pulled back


def test_value_clip_is_not_the_plain_clip_of_stable_baselines3():
    """SB3 takes the clipped error alone, which leaves a value that moved away from its target there."""
    values, old, targets = f64([-1.0]), f64([0.0]), f64([0.5])
    plain = nn.functional.mse_loss(old + (values - old).clamp(-0.2, 0.2), targets)
    close(plain, 0.49, 1e-12)
    assert 2 * ppo.value_loss(values, old, targets, 0.2) > 4 * plain


def test_twice_the_unclipped_value_loss_is_the_mean_squared_error_of_stable_baselines3():
    values, targets = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    close(2 * ppo.value_loss(values, values, targets, None), nn.functional.mse_loss(targets, values))


def test_explained_variance_of_known_fits():
    returns = f64([1.0, -2.0, 4.0, 0.5])
    close(ppo.explained_variance(returns, returns), 1, 0)
    close(ppo.explained_variance(torch.full_like(returns, returns.mean().item()), returns), 0, 1e-12)
    close(ppo.explained_variance(torch.full_like(returns, 70), returns), 0, 1e-12)  # a constant offset is not punished
    close(ppo.explained_variance(-returns, returns), -3, 1e-12)
    close(ppo.explained_variance(returns / 2, returns), 0.75, 1e-12)
    assert ppo.explained_variance(returns, torch.full_like(returns, 3)).isnan()


def test_explained_variance_equals_stable_baselines3():
    values, returns = torch.randn(2, 10, 6, generator=torch.Generator().manual_seed(1))
    expected = sb3_explained_variance(values.flatten().numpy(), returns.flatten().numpy())
    close(ppo.explained_variance(values, returns), expected)
    assert np.isnan(sb3_explained_variance(values[0].numpy(), np.ones(6)))


# ---------------------------------------------------------------------------------------------------------------------
# Gaussians
# ---------------------------------------------------------------------------------------------------------------------
def gaussians(*shape: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """actions, mean, log_std (state-independent), new_mean, new_log_std"""
    g = torch.Generator().manual_seed(seed)
    full, last = [*shape], [shape[-1]]
    return tuple(torch.randn(*s, generator=g, dtype=torch.float64) for s in (full, full, last, full, last))


@pytest.mark.parametrize("shape", [(7, 3), (5, 2, 3), (4, 1), (2,)])
def test_gaussians_equal_torch_distributions(shape):
    """Log-probability, entropy and KL, summed over dimensions: (B, D) -> (B,), (T, N, D) -> (T, N)."""
    actions, mean, log_std, new_mean, new_log_std = gaussians(*shape)
    old, new = Normal(mean, log_std.exp()), Normal(new_mean, new_log_std.exp())
    log_prob = ppo.gaussian_log_prob(actions, mean, log_std)
    kl = ppo.gaussian_kl(mean, log_std, new_mean, new_log_std)
    assert log_prob.shape == kl.shape == shape[:-1]
    close(log_prob, old.log_prob(actions).sum(-1), 1e-12, 1e-12)
    close(kl, kl_divergence(old, new).sum(-1), 1e-10, 1e-12)
    close(ppo.gaussian_kl(mean, log_std, mean, log_std), torch.zeros(shape[:-1]), 1e-12)
    assert ppo.gaussian_entropy(log_std).shape == ()
    close(ppo.gaussian_entropy(log_std), Normal(log_std * 0, log_std.exp()).entropy().sum(), 1e-12)
    close(ppo.gaussian_entropy(mean), Normal(mean * 0, mean.exp()).entropy().sum(-1), 1e-12)  # a std per state, too


def test_gaussians_equal_stable_baselines3():
    actions, mean, log_std, *_ = (x.float() for x in gaussians(9, 4))
    distribution = DiagGaussianDistribution(4).proba_distribution(mean, log_std)
    close(ppo.gaussian_log_prob(actions, mean, log_std), distribution.log_prob(actions), 1e-5, 1e-6)
    close(ppo.gaussian_entropy(log_std).expand(9), distribution.entropy(), 1e-6, 1e-6)


def test_density_of_a_standard_normal_by_hand():
    half_log_two_pi = 0.9189385332046727
    close(ppo.gaussian_log_prob(f64([0.0]), f64([0.0]), f64([0.0])), -half_log_two_pi, 1e-12)
    one_std_off = ppo.gaussian_log_prob(f64([3.0]), f64([1.0]), f64([math.log(2)]))
    close(one_std_off, -0.5 - math.log(2) - half_log_two_pi, 1e-12)
    close(ppo.gaussian_entropy(f64([0.0, math.log(2)])), 2 * (0.5 + half_log_two_pi) + math.log(2), 1e-12)


@pytest.mark.parametrize("std", [0.05, 1.0, 7.0])
def test_density_integrates_to_one_and_entropy_and_kl_are_its_expectations(std):
    """Numerical integration on a line: the constants and the std belong together."""
    mean, log_std, new_mean, new_log_std = f64([0.4]), f64([math.log(std)]), f64([0.7]), f64([0.2])
    x = torch.linspace(0.4 - 12 * std, 0.4 + 12 * std, 20_001, dtype=torch.float64)[:, None]
    log_prob = ppo.gaussian_log_prob(x, mean, log_std)
    density = log_prob.exp() * (x[1, 0] - x[0, 0])
    close(density.sum(), 1, 1e-9)
    close(-(density * log_prob).sum(), ppo.gaussian_entropy(log_std), 1e-9)
    kl = (density * (log_prob - ppo.gaussian_log_prob(x, new_mean, new_log_std))).sum()
    close(kl, ppo.gaussian_kl(mean, log_std, new_mean, new_log_std), 1e-9, 1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Schedules
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", [0.01, 0.5, 0.003])
def test_kl_coefficient_doubles_halves_or_stays(target):
    """Strict on both sides: a KL of exactly 1.5 or 1/1.5 targets changes nothing."""
    for kl, expected in (
        (2 * target, 6.0),
        (1.51 * target, 6.0),
        (1.5 * target, 3.0),
        (target, 3.0),
        (target / 1.5, 3.0),
        (target / 1.51, 1.5),
        (0.5 * target, 1.5),
        (0.0, 1.5),
        (math.inf, 6.0),
        (math.nan, 3.0),
    ):
        assert ppo.adapt_kl_coef(3.0, kl, target) == expected, kl


def test_anneal_starts_in_full_and_never_reaches_the_end():
    """Case 34: i/N in place of (i-1)/N makes the last iteration a no-op with rate 0."""
    assert [ppo.anneal(1.0, 0.0, i, 4) for i in range(1, 5)] == [1, 0.75, 0.5, 0.25]
    assert [ppo.anneal(2.0, 1.0, i, 4) for i in range(1, 5)] == [2, 1.75, 1.5, 1.25]
    assert ppo.anneal(3e-4, 0.0, 1, 1) == 3e-4
    assert all(ppo.anneal(0.01, end, i, 7) == 0.01 for i in range(1, 8) for end in (0.01, None))
    assert ppo.anneal(3e-4, 0.0, 488, 488) == pytest.approx(3e-4 / 488)


# ---------------------------------------------------------------------------------------------------------------------
# Running statistics, reward scale
# ---------------------------------------------------------------------------------------------------------------------
def fed(x: np.ndarray, splits: list[int], shape: tuple[int, ...]) -> "ppo.RunningMeanStd":
    rms = ppo.RunningMeanStd(shape)
    for part in np.split(x, splits):
        rms.update(part)
    return rms


@pytest.mark.parametrize("splits", [[], [1], [1, 2, 3, 900], [7, 500, 501], list(range(1, 1000))])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_running_statistics_of_uneven_batches_equal_one_pass(splits, shape):
    """Mean of batch means, forgotten spread between batches, sample in place of population variance."""
    drift = np.linspace(0, 5, 1000).reshape(-1, *[1] * len(shape))  # so that batches differ in mean
    x = np.random.default_rng(0).standard_normal((1000, *shape)) * 3 + 1 + drift
    rms = fed(x, splits, shape)
    np.testing.assert_allclose(rms.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(rms.var, x.var(0), rtol=1e-12)
    assert rms.count == 1000
    assert np.shape(rms.mean) == np.shape(rms.var) == shape


@pytest.mark.parametrize(("center", "spread"), [(1e8, 1.0), (1e6, 1e-3), (-1e8, 1.0)])
@pytest.mark.parametrize("splits", [[], [1, 2, 50], list(range(1, 1000))])
def test_running_variance_survives_a_large_mean(center, spread, splits):
    """E[x^2] - E[x]^2 would be 0, negative or wild here."""
    x = center + spread * np.random.default_rng(0).standard_normal((1000, 3))
    rms = fed(x, splits, (3,))
    np.testing.assert_allclose(rms.mean, center + (x - center).mean(0), rtol=1e-14)
    np.testing.assert_allclose(rms.var, (x - center).var(0), rtol=1e-6)
    normalized = rms.normalize(x)
    np.testing.assert_allclose(normalized.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(normalized.var(0), (x - center).var(0) / ((x - center).var(0) + 1e-8), rtol=1e-4)


def test_variance_is_that_of_the_population():
    rms = fed(np.array([1.0, 3.0]), [1], ())
    assert (rms.mean, rms.var, rms.count) == (2, 1, 2)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_before_the_first_update_normalize_changes_no_bit(kind):
    x = np.random.default_rng(0).standard_normal((50, 3)).astype(kind)
    x[0] = [0.0, -0.0, np.finfo(kind).tiny]
    rms = ppo.RunningMeanStd((3,))
    assert rms.normalize(x).tobytes() == x.tobytes()
    assert rms.normalize(torch.from_numpy(x)).numpy().tobytes() == x.tobytes()


def test_epsilon_is_inside_the_square_root():
    """A constant feature: deviation 1e-4 gives 1. With sqrt(var) + 1e-8 it would give 1e4."""
    rms = fed(np.full((10, 1), 5.0), [3], (1,))
    close(rms.normalize(np.array([[5.0], [5.0 + 1e-4]])), f64([[0.0], [1.0]]), 1e-9)
    close(rms.normalize(f64([[5.0], [5.0 + 1e-4]])), f64([[0.0], [1.0]]), 1e-9)


@pytest.mark.parametrize("as_torch", [False, True])
def test_normalize_by_hand_and_clip(as_torch):
    rms = fed(np.array([[0.0, 10.0], [4.0, 10.2]]), [1], (2,))  # mean 2, 10.1; std 2, .1
    x = np.array([[5.0, 10.0], [100.0, -100.0], [-12.0, 10.1]])
    raw, clipped = (rms.normalize(torch.tensor(x) if as_torch else x, clip) for clip in (None, 5.0))
    close(raw, f64([[1.5, -1.0], [49.0, -1101.0], [-7.0, 0.0]]), 1e-2)
    close(clipped, f64([[1.5, -1.0], [5.0, -5.0], [-5.0, 0.0]]), 1e-5)
    assert (rms.mean == [2, 10.1]).all() and rms.count == 2  # looking changes nothing


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("lead", [(), (4,), (5, 4)])
def test_arrays_stay_arrays_and_tensors_stay_tensors_of_their_type(shape, lead):
    rng = np.random.default_rng(0)
    rms = fed(rng.standard_normal((20, *shape)) + 2, [5], shape)
    x = np.asarray(rng.standard_normal((*lead, *shape)))
    expected = (x - rms.mean) / np.sqrt(rms.var + 1e-8)
    for dtype in (np.float32, np.float64):
        array = rms.normalize(x.astype(dtype), 9.0)
        assert isinstance(array, np.ndarray | np.generic) and array.dtype == dtype and array.shape == x.shape
        tensor = rms.normalize(torch.tensor(x.astype(dtype)), 9.0)
        assert isinstance(tensor, torch.Tensor) and tensor.numpy().dtype == dtype and tensor.shape == x.shape
        close(array, expected, 1e-5 if dtype == np.float32 else 1e-12)
        close(tensor, expected, 1e-5 if dtype == np.float32 else 1e-12)
    for dtype in (np.uint8, np.int64):
        whole = np.abs(x * 10).astype(dtype)
        for result in (rms.normalize(whole), rms.normalize(torch.tensor(whole)).numpy()):
            assert result.dtype.kind == "f"
            close(result, (whole - rms.mean) / np.sqrt(rms.var + 1e-8), 1e-4)


def test_a_scalar_normaliser_gives_float32_tensors_and_arrays_the_same_value():
    """In torch a 0-dim float64 mean would be rounded to float32 before it is subtracted."""
    rms = fed(np.array([16777217.0, 16777219.0, 16777221.0]), [], ())
    x = np.array([16777216.0, 16777222.0], dtype=np.float32)
    close(rms.normalize(torch.from_numpy(x)), rms.normalize(x), 1e-5)


def test_running_statistics_count_every_row_of_any_shape_and_type():
    """(T, N, 3) is T * N rows; tensors, float32 and integers are summed in float64."""
    x = np.random.default_rng(0).integers(-50, 50, (6, 4, 3))
    for form in (x, x.astype(np.float32), torch.tensor(x), torch.tensor(x).float().requires_grad_(), x.astype(np.int8)):
        rms = ppo.RunningMeanStd((3,))
        rms.update(form)
        assert rms.count == 24 and rms.mean.dtype == rms.var.dtype == np.float64
        np.testing.assert_allclose(rms.mean, x.reshape(-1, 3).mean(0), rtol=1e-12)
        np.testing.assert_allclose(rms.var, x.reshape(-1, 3).var(0), rtol=1e-12)
    scalar = ppo.RunningMeanStd()
    scalar.update(x)
    assert scalar.count == 72 and scalar.var == pytest.approx(x.var(), rel=1e-12)


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("updates", [0, 2])
def test_running_statistics_survive_a_checkpoint(shape, updates):
    """Cases 25 and 29: through torch.save and torch.load(weights_only=True), bit for bit, and it goes on from there."""
    rms, rng = ppo.RunningMeanStd(shape), np.random.default_rng(0)
    for _ in range(updates):
        rms.update(rng.standard_normal((7, *shape)))
    file = io.BytesIO()
    torch.save(rms.state_dict(), file)
    file.seek(0)
    restored = ppo.RunningMeanStd(shape)
    restored.load_state_dict(torch.load(file, weights_only=True))
    x = rng.standard_normal((5, *shape))
    for _ in range(2):
        assert np.array_equal(rms.normalize(x), restored.normalize(x))
        assert rms.count == restored.count
        rms.update(x)
        restored.update(x)


def test_a_saved_state_does_not_change_with_later_updates():
    rms = fed(np.random.default_rng(0).standard_normal((7, 3)), [], (3,))
    state = rms.state_dict()
    before = copy.deepcopy(state)
    rms.update(np.ones((5, 3)))
    assert all(torch.equal(state[name], before[name]) for name in ("mean", "var")) and state["count"] == 7


def test_discounted_return_ends_with_the_episode_and_is_counted_in_full():
    """Case 21: accumulators 1, 1.5, 1.75, 0, 1, 1.5; what was counted at step 4 is 1.875, not 0."""
    scaler, accumulators = ppo.RewardScaler(1, 0.5), []
    for step in range(1, 7):
        scaler.update(np.array([1.0]), np.array([step == 4]))
        accumulators.append(scaler.returns.item())
    assert accumulators == [1, 1.5, 1.75, 0, 1, 1.5]
    counted = [1, 1.5, 1.75, 1.875, 1, 1.5]
    assert scaler.rms.count == 6
    close(scaler.rms.mean, np.mean(counted), 1e-12)
    close(scaler.rms.var, np.var(counted), 1e-12)


def test_scaled_rewards_by_hand():
    """Returns 2, 0, 4: population variances 0, 1, 8/3, epsilon inside the root, no mean taken off, no clip."""
    scaler = ppo.RewardScaler(1, 0.5)
    scaled = [scaler.update(np.array([r]), np.array([False])).item() for r in (2.0, -1.0, 4.0)]
    expected = [2 / math.sqrt(1e-8), -1 / math.sqrt(1 + 1e-8), 4 / math.sqrt(8 / 3 + 1e-8)]
    assert scaled == pytest.approx(expected, rel=1e-9)


def test_reward_scaler_counts_each_real_step_of_each_environment_once():
    """Case 20: 12 steps of 2 environments are 24 returns, whatever ended; each environment has its own accumulator."""
    scaler = ppo.RewardScaler(2, 0.5)
    for step in range(1, 13):
        done = step % 4 == 0
        scaled = scaler.update(np.array([1.0, 10.0]), np.array([done, done]))
        assert scaled.shape == (2,)
        close(scaled[1] / scaled[0], 10.0, 1e-9)
    assert scaler.rms.count == 24
    scaler.update(np.array([1.0, 10.0]), np.array([True, False]))
    assert scaler.returns.tolist() == [0, 10]


def test_reward_scale_uses_its_gamma():
    """Case 23: a fixed default gamma would give both the same scale."""

    def scale(gamma: float) -> float:
        scaler = ppo.RewardScaler(1, gamma)
        return [scaler.update(np.array([1.0]), np.array([False])) for _ in range(50)][-1].item()

    returns = {gamma: np.cumsum(gamma ** np.arange(50)) for gamma in (0.9, 0.99)}
    for gamma, values in returns.items():
        assert scale(gamma) == pytest.approx(1 / math.sqrt(values.var() + 1e-8), rel=1e-9)
    assert scale(0.9) > 2 * scale(0.99)


@pytest.mark.parametrize("reward", [1.0, 0.01, -3.0])
def test_a_constant_reward_keeps_its_sign(reward):
    """Case 24: with the mean taken off it would be 0 or change sign, and the task with it."""
    scaler = ppo.RewardScaler(3, 0.99)
    for step in range(1, 100):
        scaled = scaler.update(np.full(3, reward), np.full(3, step % 10 == 0))
        assert (np.sign(scaled) == np.sign(reward)).all()


# ---------------------------------------------------------------------------------------------------------------------
# Networks, actions
# ---------------------------------------------------------------------------------------------------------------------
def make_agent(seed: int = 0, dtype=torch.float32) -> "ppo.Agent":
    torch.manual_seed(seed)
    return ppo.Agent(OBS_DIM, ACTION_DIM).to(dtype)


def policy_parameters(agent) -> list[nn.Parameter]:
    return [agent.actor_log_std, *agent.actor_mean.parameters()]


def value_head(agent) -> nn.Linear:
    return [layer for layer in agent.critic if isinstance(layer, nn.Linear)][-1]


def log_prob(agent, batch) -> torch.Tensor:
    """By torch.distributions, with a gradient."""
    normal = Normal(agent.actor_mean(batch["obs"]), agent.actor_log_std.exp())
    return normal.log_prob(batch["actions"]).sum(-1)


def assert_orthogonal(layer: nn.Linear, gain: float) -> None:
    w = layer.weight.detach().double()
    gram = w @ w.T if len(w) <= w.shape[1] else w.T @ w
    close(gram, gain**2 * torch.eye(len(gram)), 1e-5 * gain**2)
    assert (layer.bias == 0).all()


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 5), (64, 3), (3, 64)])
@pytest.mark.parametrize("gain", [math.sqrt(2), 1.0, 0.01])
def test_layer_init_is_orthogonal_of_the_given_gain(inputs, outputs, gain):
    layer = nn.Linear(inputs, outputs)
    assert ppo.layer_init(layer, gain) is layer
    assert_orthogonal(layer, gain)


def test_gains_of_the_networks():
    """Case 45: sqrt(2) inside, 0.01 for the policy's head, 1 for the value's; std 1; two hidden layers of 64."""
    agent = make_agent()
    for network, head_gain in ((agent.actor_mean, 0.01), (agent.critic, 1.0)):
        first, second, head = (layer for layer in network if isinstance(layer, nn.Linear))
        assert_orthogonal(first, math.sqrt(2))
        assert_orthogonal(second, math.sqrt(2))
        assert_orthogonal(head, head_gain)
        assert first.weight.shape == (64, OBS_DIM) and second.weight.shape == (64, 64)
    assert (agent.actor_log_std == 0).all() and agent.actor_log_std.shape == (ACTION_DIM,)


def test_first_actions_are_the_noises():
    """Case 45: the initial mean is near zero wherever the normalised observation is."""
    agent = make_agent()
    obs = torch.randn(500, OBS_DIM, generator=torch.Generator().manual_seed(0)).mul(3).clamp(-5, 5)
    assert agent.actor_mean(obs).abs().max() < 0.08
    assert agent.critic(obs).abs().max() > 0.1


@pytest.mark.parametrize("lead", [(1,), (4,), (5, 4), (5, 1)])
def test_shapes_of_the_networks(lead):
    """A value of shape (B, 1) beside returns of (B,) would make a (B, B) error."""
    agent, obs = make_agent(), torch.randn(*lead, OBS_DIM, generator=torch.Generator().manual_seed(0))
    assert agent.actor_mean(obs).shape == (*lead, ACTION_DIM)
    assert agent.critic(obs).shape == lead
    close(agent.critic(obs).flatten(), agent.critic(obs.flatten(0, -2)))


@pytest.mark.parametrize("lead", [(), (1,), (8,)])
def test_numpy_policy_equals_the_network_as_it_was(lead):
    """The copy is independent of later training, which would make a rollout off-policy half way."""
    network = ppo.mlp(17, 6, last_std=1.0)
    for p in network.parameters():
        nn.init.normal_(p, std=0.3)  # biases too
    policy = ppo.numpy_policy(network)
    x = np.random.default_rng(0).standard_normal((*lead, 17)).astype(np.float32)
    with torch.no_grad():
        expected = network(torch.from_numpy(x))
        for p in network.parameters():
            p.add_(1.0)
    assert policy(x).dtype == np.float32 and policy(x).shape == (*lead, 6)
    close(policy(x), expected, 2e-6)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)],
        [nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)],
        [nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)],
        [nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)],
        [nn.Linear(4, 4), nn.Tanh(), nn.ReLU()],
        [nn.Linear(4, 4), nn.Tanh(), nn.Conv1d(4, 4, 1)],
    ],
)
def test_numpy_policy_refuses_a_layer_it_does_not_know(layers):
    """At any place: to skip or mistake it would be to act with another policy than the one that is trained."""
    with pytest.raises(TypeError, match="numpy_policy"):
        ppo.numpy_policy(nn.Sequential(*layers))


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(4, 2)],
        [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh()],
        [nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)],
        [nn.Tanh(), nn.Linear(4, 2)],
    ],
)
def test_numpy_policy_equals_or_refuses_any_order_of_the_layers_it_knows(layers):
    """A bounded mean (Tanh at the end) is what a user would try first; to leave it out silently would be the worst."""
    network, x = nn.Sequential(*layers), np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    try:
        policy = ppo.numpy_policy(network)
    except TypeError:
        return
    close(policy(x), network(torch.from_numpy(x)), 2e-6)


@pytest.mark.parametrize(
    ("low", "high", "scale", "shift"),
    [
        (-1, 1, 1, 0),
        (10, 20, 5, 15),
        (-3, 3, 3, 0),
        (-0.4, 0.4, 0.4, 0),
        (0, math.inf, 1, 0),
        (-math.inf, 2, 1, 0),
        (-math.inf, math.inf, 1, 0),
        (-1e38, 1e38, 1e38, 0),
        ([-1, 10, 0], [1, 20, math.inf], [1, 5, 1], [0, 15, 0]),
        ([[-2, 0], [0, -8]], [[2, 1], [4, 0]], [2, 0.5, 2, 4], [0, 0.5, 2, -4]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_policy_units_span_the_action_range(low, high, scale, shift, dtype):
    """[-1, 1] becomes [low, high] where both are finite; an open range keeps its units (and gives no warning)."""
    low, high = np.broadcast_arrays(np.array(low, dtype), np.array(high, dtype))
    space = gym.spaces.Box(low, high, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual_scale, actual_shift = ppo.action_transform(space)
    assert actual_scale.shape == actual_shift.shape == (low.size,)
    assert actual_scale.dtype == actual_shift.dtype == dtype
    np.testing.assert_allclose(actual_scale, np.broadcast_to(np.array(scale, dtype), low.size), rtol=1e-6)
    np.testing.assert_allclose(actual_shift, np.broadcast_to(np.array(shift, dtype), low.size), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_range_as_wide_as_the_type_counts_as_open(dtype):
    """Some environments write "no limit" that way; its width overflows, and a scale of 1e38 would be no use."""
    limit = np.finfo(dtype).max
    scale, shift = ppo.action_transform(gym.spaces.Box(-limit, limit, (2,), dtype))
    assert scale.tolist() == [1, 1] and shift.tolist() == [0, 0]


def test_a_range_whose_centre_is_near_the_limit_of_the_type():
    scale, shift = ppo.action_transform(gym.spaces.Box(2.5e38, 3e38, (1,)))
    assert scale.item() == pytest.approx(2.5e37) and shift.item() == pytest.approx(2.75e38)


# ---------------------------------------------------------------------------------------------------------------------
# Update
# ---------------------------------------------------------------------------------------------------------------------
COLUMNS = ("obs", "actions", "old_mean", "old_logprobs", "advantages", "returns", "old_values")


def make_batch(agent, size: int = 32, seed: int = 0, **changes) -> dict[str, torch.Tensor]:
    """A minibatch whose old policy and values are those of the agent now."""
    log_std, g = agent.actor_log_std.detach().clone(), torch.Generator().manual_seed(seed)
    obs, noise, scalars = (torch.randn(size, d, generator=g).to(log_std) for d in (OBS_DIM, ACTION_DIM, 2))
    with torch.no_grad():
        mean = agent.actor_mean(obs)
        actions = mean + log_std.exp() * noise
        old_logprobs, old_values = ppo.gaussian_log_prob(actions, mean, log_std), agent.critic(obs)
    values = (obs, actions, mean, old_logprobs, scalars[:, 0], scalars[:, 1], old_values)
    return dict(zip(COLUMNS, values, strict=True)) | changes


def adam(agent, lr=3e-4, eps=1e-5) -> torch.optim.Adam:
    return torch.optim.Adam(agent.parameters(), lr=torch.tensor(lr), eps=eps, fused=True)


def sgd(agent) -> torch.optim.SGD:
    """Rate 1, so that a step is the (clipped) gradient itself."""
    return torch.optim.SGD(agent.parameters(), lr=1.0, fused=True)


def run_update(agent, optimizer, batch, old_log_std=None, ent_coef=0.0, kl_coef=1.0, **flags) -> dict:
    """One call of the script's update()."""
    old_log_std = agent.actor_log_std.detach().clone() if old_log_std is None else old_log_std
    coefficients = torch.tensor([ent_coef, kl_coef])
    args = ppo.Args(ent_coef=0.0 if "ent_coef_end" in flags else ent_coef, **flags)  # the tensor is what counts
    return ppo.update(agent, optimizer, tuple(batch.values()), old_log_std, coefficients, args)


def step_taken(agent, batch, **flags) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """(minus the gradient of the policy, of the critic, stats) of one update, by default without a clipped norm."""
    parts = policy_parameters(agent), list(agent.critic.parameters())
    before = [flat(part).clone() for part in parts]
    stats = run_update(agent, sgd(agent), batch, **{"max_grad_norm": 1e9} | flags)
    return *(flat(part) - old for part, old in zip(parts, before, strict=True)), stats


def off_policy_batch(agent, ratio: float, **changes) -> dict[str, torch.Tensor]:
    """A minibatch in which every probability ratio is `ratio`."""
    batch = make_batch(agent, **changes)
    return batch | {"old_logprobs": batch["old_logprobs"] - math.log(ratio)}


@pytest.mark.parametrize("flags", [{}, {"clip_coef": 0.01}, {"kl_penalty": True}])
@pytest.mark.parametrize("norm_adv", [False, True])
def test_first_minibatch_of_a_rollout_follows_the_plain_policy_gradient(flags, norm_adv):
    """Recipe A17, and A2C is PPO with one epoch of one minibatch: the gradient is that of mean(A * log pi)."""
    agent = make_agent(dtype=torch.float64)
    batch = make_batch(agent)
    advantages = batch["advantages"]
    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    expected = flat(torch.autograd.grad((advantages * log_prob(agent, batch)).mean(), policy_parameters(agent)))
    step, _, stats = step_taken(agent, batch, norm_adv=norm_adv, vf_coef=0.0, **flags)
    close(step, expected, 1e-12)
    assert expected.abs().max() > 1e-3
    assert stats["losses/clipfrac"] == 0
    close(stats["losses/approx_kl"], 0, 1e-15)


def test_ratio_of_a_sample_outside_the_action_range_is_exactly_1_before_any_update():
    """Case 32: the stored sample is the unclipped one."""
    agent = make_agent()
    with torch.no_grad():
        agent.actor_log_std.fill_(math.log(5))
    batch = make_batch(agent)
    assert (batch["actions"].abs() > 1).any()
    stats = run_update(agent, adam(agent), batch)
    assert stats["losses/approx_kl"] == stats["losses/old_approx_kl"] == stats["losses/clipfrac"] == 0


def test_advantages_are_normalised_before_both_terms_of_the_surrogate():
    """Case 40, at ratio 1.5: -(1.5 * -.7071 + 1.2 * .7071) / 2. One raw term gives another number."""
    agent = make_agent(dtype=torch.float64)
    batch = off_policy_batch(agent, 1.5, size=2, advantages=f64([1.0, 3.0]))
    stats = run_update(agent, adam(agent), batch)
    close(stats["losses/policy_loss"], 0.3 / 2 / math.sqrt(2), 1e-6)
    agent = make_agent(dtype=torch.float64)
    stats = run_update(agent, adam(agent), batch, norm_adv=False)
    close(stats["losses/policy_loss"], -1.2 * 4 / 2, 1e-6)
    agent = make_agent(dtype=torch.float64)
    batch = make_batch(agent, size=2, advantages=f64([1.0, 3.0]))
    stats = run_update(agent, adam(agent), batch)
    close(stats["losses/policy_loss"], 0, 1e-7)


def test_clip_and_penalty_differ_beyond_the_clip():
    """Ratio 1.6 with A = 1: the clipped surrogate is flat there, the penalty's is not."""
    for kl_penalty, moved in ((False, False), (True, True)):
        agent = make_agent(dtype=torch.float64)
        batch = off_policy_batch(agent, 1.6, advantages=torch.ones(32, dtype=torch.float64))
        flags = {"norm_adv": False, "vf_coef": 0.0, "kl_coef": 0.0, "kl_penalty": kl_penalty}
        step, _, stats = step_taken(agent, batch, **flags)
        assert bool(step.any()) == moved
        close(stats["losses/policy_loss"], -1.6 if kl_penalty else -1.2, 1e-6)


def test_stats_are_those_of_the_minibatch_before_the_step():
    """Every metric by its definition; log-ratio = new - old."""
    agent = make_agent(dtype=torch.float64)
    batch = off_policy_batch(agent, 1.5)
    with torch.no_grad():
        value_head(agent).bias += 0.7
        errors = (agent.critic(batch["obs"]) - batch["returns"]).square()
        clipped = (batch["old_values"] + 0.2 - batch["returns"]).square()
    stats = run_update(agent, adam(agent), batch)
    assert list(stats)[-1] == "skipped" and stats["skipped"] == 0
    close(stats["losses/value_loss"], 0.5 * torch.max(errors, clipped).mean(), 1e-12)
    close(stats["losses/entropy"], ACTION_DIM * 0.5 * math.log(2 * math.pi * math.e), 1e-12)
    close(stats["losses/old_approx_kl"], -math.log(1.5), 1e-12)
    close(stats["losses/approx_kl"], 0.5 - math.log(1.5), 1e-12)
    assert stats["losses/clipfrac"] == 1


def test_value_clip_has_its_own_coefficient_and_switch():
    """Case 39: returns are not in the units of the ratio."""
    losses, cases = {}, {"own": {"vf_clip_coef": 0.5}, "policy's": {"clip_coef": 0.5}, "off": {"clip_vloss": False}}
    for name, flags in cases.items():
        agent = make_agent(dtype=torch.float64)
        batch = make_batch(agent)
        with torch.no_grad():
            value_head(agent).bias += 1.0
        batch["returns"] = batch["old_values"] + 2
        losses[name] = run_update(agent, adam(agent), batch, **flags)["losses/value_loss"].item()
    assert losses == pytest.approx({"own": 0.5 * 1.5**2, "policy's": 1.62, "off": 0.5})


@pytest.mark.parametrize("vf_coef", [0.5, 1.0, 2.0])
def test_critic_learns_from_vf_coef_times_the_value_loss_only(vf_coef):
    agent = make_agent(dtype=torch.float64)
    batch = make_batch(agent)
    loss = 0.5 * (agent.critic(batch["obs"]) - batch["returns"]).square().mean()
    expected = -vf_coef * flat(torch.autograd.grad(loss, list(agent.critic.parameters())))
    _, step, _ = step_taken(agent, batch, vf_coef=vf_coef, clip_vloss=False)
    close(step, expected, 1e-12)


@pytest.mark.parametrize("flags", [{}, {"ent_coef_end": 0.5}])
def test_entropy_bonus_raises_the_std_by_its_coefficient_and_touches_nothing_else(flags):
    """d entropy / d log std = 1: the step is +ent_coef, not -; a bonus that grows from 0 counts, too."""
    agent = make_agent(dtype=torch.float64)
    zeros = torch.zeros(32, dtype=torch.float64)
    batch = make_batch(agent, advantages=zeros)
    step, _, _ = step_taken(agent, batch, ent_coef=0.25, norm_adv=False, vf_coef=0.0, **flags)
    close(agent.actor_log_std, f64([0.25, 0.25]), 1e-7)
    assert step.count_nonzero() == ACTION_DIM


@pytest.mark.parametrize("kl_coef", [0.5, 2.0])
def test_kl_penalty_pulls_mean_and_std_back_to_the_old_policy(kl_coef):
    """The step is -kl_coef * gradient of KL(old, new); the swapped direction has another gradient."""
    agent = make_agent(dtype=torch.float64)
    zeros = torch.zeros(32, dtype=torch.float64)
    batch = make_batch(agent, advantages=zeros)
    old_log_std = agent.actor_log_std.detach() + f64([0.4, -0.4])
    batch["old_mean"] = batch["old_mean"] + f64([1.0, -1.0])

    def kl() -> torch.Tensor:
        new = Normal(agent.actor_mean(batch["obs"]), agent.actor_log_std.exp())
        return kl_divergence(Normal(batch["old_mean"], old_log_std.exp()), new).sum(-1).mean()

    before = kl()
    expected = -kl_coef * flat(torch.autograd.grad(before, policy_parameters(agent)))
    flags = {"norm_adv": False, "vf_coef": 0.0, "old_log_std": old_log_std}
    step, _, _ = step_taken(agent, batch, kl_coef=kl_coef, kl_penalty=True, **flags)
    close(step, expected, 1e-7)
    # Without the flag the coefficient is ignored.
    step, _, _ = step_taken(make_agent(dtype=torch.float64), batch, kl_coef=kl_coef, **flags)
    assert not step.any()
    # A few small steps lead back.
    agent = make_agent(dtype=torch.float64)
    optimizer = adam(agent, lr=1e-2)
    for _ in range(20):
        run_update(agent, optimizer, batch, kl_coef=kl_coef, kl_penalty=True, **flags)
    assert kl() < 0.7 * before
    assert agent.actor_log_std[0] > 0.02 and (agent.actor_mean(batch["obs"])[:, 0].mean() > 0.02)


@pytest.mark.parametrize("max_grad_norm", [0.01, 0.5])
def test_gradient_is_clipped_and_its_norm_reported_as_it_was(max_grad_norm):
    """Case 43: the norm is that of everything that steps, actor and critic, and is reported as before the clip."""
    norms, steps = {}, {}
    for limit in (1e9, max_grad_norm):
        agent = make_agent(dtype=torch.float64)
        batch = make_batch(agent)
        batch["returns"] = batch["returns"] * 10
        *step, stats = step_taken(agent, batch, max_grad_norm=limit, clip_vloss=False)
        steps[limit], norms[limit] = torch.cat(step), stats["losses/grad_norm"].item()
        left = torch.cat([p.grad.flatten() for p in in_our_order(agent)])
        close(left, -steps[limit], 1e-12)
    assert norms[max_grad_norm] == pytest.approx(norms[1e9]) == pytest.approx(steps[1e9].norm().item())
    assert norms[max_grad_norm] > 2 * max_grad_norm
    assert 0.99 * max_grad_norm < steps[max_grad_norm].norm() <= max_grad_norm * (1 + 1e-6)
    close(steps[max_grad_norm] / max_grad_norm, steps[1e9] / steps[1e9].norm(), 1e-4)  # shortened, not turned


def test_a_gradient_within_the_limit_is_left_alone():
    agent = make_agent(dtype=torch.float64)
    *step, stats = step_taken(agent, make_batch(agent), max_grad_norm=50.0)
    close(torch.cat(step).norm(), stats["losses/grad_norm"], 1e-9)
    assert stats["losses/grad_norm"] < 50


def state_of(agent, optimizer) -> list[torch.Tensor]:
    moments = [x for s in optimizer.state_dict()["state"].values() for x in s.values()]
    return [x.detach().clone() for x in (*agent.parameters(), *moments)]


@pytest.mark.parametrize(
    ("where", "bad"),
    [
        *itertools.product(["advantages", "returns", "obs"], [math.nan, math.inf, -math.inf]),
        *(("old_logprobs", math.nan), ("old_logprobs", -math.inf)),
        ("returns", 3e19),  # its square overflows: the loss is infinite, the gradient is not
        ("returns", 1e15),  # the other way round, with a huge --vf-coef
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(where, bad):
    """Parameters, Adam's moments and its step count bit for bit; then training goes on as if it had not been."""
    runs = []
    for skip_one in (True, False):
        agent = make_agent()
        optimizer = adam(agent)
        run_update(agent, optimizer, make_batch(agent, seed=1))
        batch, clean = make_batch(agent, seed=2), make_batch(agent, seed=3)
        if skip_one:
            before = state_of(agent, optimizer)
            batch[where] = batch[where].clone()
            batch[where].view(-1)[5] = bad
            flags = {"norm_adv": where != "advantages" or math.isnan(bad), "vf_coef": 1e6 if bad == 1e15 else 0.5}
            stats = run_update(agent, optimizer, batch, **flags)
            assert stats["skipped"] == 1
            after = state_of(agent, optimizer)
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        stats = run_update(agent, optimizer, clean)
        assert stats["skipped"] == 0
        assert all(x.isfinite() for x in stats.values())
        runs.append(state_of(agent, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    steps = [s["step"].item() for s in optimizer.state_dict()["state"].values()]
    assert set(steps) == {2.0}


def test_the_very_first_step_may_be_skipped_too():
    agent = make_agent()
    optimizer = adam(agent)
    before = flat(agent.parameters()).clone()
    batch = make_batch(agent)
    batch["advantages"][0] = math.nan
    assert run_update(agent, optimizer, batch)["skipped"] == 1
    assert torch.equal(flat(agent.parameters()), before)
    assert all(x.count_nonzero() == 0 for s in optimizer.state.values() for x in s.values())


def test_what_update_returns_is_detached_scalars_and_leaves_the_batch_alone():
    """A stat that holds the graph would keep every minibatch of a rollout in memory."""
    agent = make_agent()
    batch = make_batch(agent)
    before = {name: x.clone() for name, x in batch.items()}
    stats = run_update(agent, adam(agent), batch)
    for name, x in stats.items():
        assert isinstance(x, torch.Tensor) and x.shape == () and not x.requires_grad, name
    torch.stack(tuple(stats.values()))
    assert all(torch.equal(batch[name], before[name]) for name in batch)


def test_repeated_updates_fit_the_returns_and_favour_good_actions():
    """Every sign at once: the value error falls, and log pi rises where A > 0 and falls where A < 0."""
    agent = make_agent()
    batch = make_batch(agent, size=64)
    optimizer = adam(agent, lr=1e-2)
    for _ in range(60):
        run_update(agent, optimizer, batch, clip_vloss=False)
    with torch.no_grad():
        error = (agent.critic(batch["obs"]) - batch["returns"]).square().mean()
        change = log_prob(agent, batch) - batch["old_logprobs"]
    assert error < 0.5 * (batch["old_values"] - batch["returns"]).square().mean()
    good = batch["advantages"] > 0.2
    assert change[good].mean() > 0.05 and change[batch["advantages"] < -0.2].mean() < -0.05


class _Stop(Exception):
    pass


@pytest.mark.parametrize("flags", [{}, {"adam_eps": 1e-3, "learning_rate": 0.02}])
def test_main_gives_adam_its_epsilon_rate_and_all_parameters(flags, monkeypatch, tmp_path):
    """Cases 43 and 45: eps 1e-5 by default, one optimiser over actor and critic, fused (it skips bad steps)."""
    made, signature = {}, inspect.signature(torch.optim.Adam)

    def record(*positional, **named):
        made.update(signature.bind(*positional, **named).arguments)
        raise _Stop

    monkeypatch.setattr(torch.optim, "Adam", record)
    with pytest.raises(_Stop):
        ppo.main(ppo.Args(env_id="Pendulum-v1", runs_dir=str(tmp_path), **flags))
    assert made["eps"] == flags.get("adam_eps", 1e-5) and made["fused"]
    assert float(made["lr"]) == pytest.approx(flags.get("learning_rate", 3e-4))
    assert [p.shape for p in made["params"]] == [p.shape for p in ppo.Agent(3, 1).parameters()]


# ---------------------------------------------------------------------------------------------------------------------
# One real update of Stable-Baselines3
# ---------------------------------------------------------------------------------------------------------------------
class _Spaces(gym.Env):
    """SB3 needs an environment to know its spaces; nobody steps it."""

    observation_space = gym.spaces.Box(-10, 10, (OBS_DIM,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (ACTION_DIM,), np.float32)


def sb3_with_weights_of(agent, size: int, **options) -> tuple[PPO, list[nn.Parameter]]:
    """SB3's PPO with one minibatch per epoch, and its parameters in the order of ours, holding our values."""
    layers = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": nn.Tanh}
    policy_kwargs = layers | {"optimizer_kwargs": {"eps": options.pop("eps")}}
    options |= {"n_steps": size, "batch_size": size, "device": "cpu"}
    model = PPO("MlpPolicy", _Spaces(), policy_kwargs=policy_kwargs, **options)
    policy = model.policy
    parts = (policy.mlp_extractor.policy_net, policy.action_net, policy.mlp_extractor.value_net, policy.value_net)
    theirs = [policy.log_std, *(p for part in parts for p in part.parameters())]
    with torch.no_grad():
        for p, q in zip(theirs, in_our_order(agent), strict=True):
            p.copy_(q)
    assert len(theirs) == len(list(policy.parameters()))
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model, theirs


def in_our_order(agent) -> list[nn.Parameter]:
    return [*policy_parameters(agent), *agent.critic.parameters()]


@pytest.mark.parametrize(
    ("lr", "eps"),
    [(3e-4, 1e-5), (0.5, 1.0)],  # the second is nearly plain descent: it shows every factor of the loss
)
@pytest.mark.parametrize("max_grad_norm", [0.5, 100.0])
@pytest.mark.parametrize(
    ("normalize_advantage", "ent_coef", "epochs"), [(True, 0.0, 1), (False, 0.02, 1), (True, 0.01, 3)]
)
def test_update_equals_stable_baselines3(lr, eps, max_grad_norm, normalize_advantage, ent_coef, epochs):
    """PPO.train() on the same weights and batch gives the same parameters and metrics (its value loss has no 1/2)."""
    size = 48
    agent = make_agent(seed=7)
    with torch.no_grad():
        agent.actor_log_std.copy_(torch.tensor([0.3, -0.5]))
        agent.actor_mean[-1].weight.mul_(50)
    batch = make_batch(agent, size=size, seed=11)
    batch["returns"] = batch["returns"] * 2
    batch["old_logprobs"] = batch["old_logprobs"] + 0.3 * torch.sin(torch.arange(size))  # ratios beyond both clips
    model, theirs = sb3_with_weights_of(
        agent, size, learning_rate=lr, eps=eps, n_epochs=epochs, clip_range=0.2, clip_range_vf=None,
        ent_coef=ent_coef, vf_coef=0.5, max_grad_norm=max_grad_norm, normalize_advantage=normalize_advantage,
    )  # fmt: skip
    buffer = model.rollout_buffer
    for t in range(size):
        obs, action = (batch[name][t : t + 1].numpy() for name in ("obs", "actions"))
        buffer.add(obs, action, np.zeros(1), np.zeros(1), batch["old_values"][t], batch["old_logprobs"][t])
    buffer.advantages[:], buffer.returns[:] = (batch[name][:, None].numpy() for name in ("advantages", "returns"))
    model.train()

    optimizer = adam(agent, lr, eps)
    flags = {"norm_adv": normalize_advantage, "clip_vloss": False, "vf_coef": 1.0, "max_grad_norm": max_grad_norm}
    start = flat(in_our_order(agent)).clone()
    stats = [run_update(agent, optimizer, batch, ent_coef=ent_coef, **flags) for _ in range(epochs)]
    end = flat(in_our_order(agent))
    assert (end - start).abs().max() > 1e-4
    close(end, flat(theirs), 1e-6)

    logged = model.logger.name_to_value
    mean = {name: torch.stack([s[name] for s in stats]).mean().item() for name in stats[0]}
    assert mean["losses/policy_loss"] == pytest.approx(logged["train/policy_gradient_loss"], abs=1e-6)
    assert 2 * mean["losses/value_loss"] == pytest.approx(logged["train/value_loss"], abs=2e-6)
    assert -mean["losses/entropy"] == pytest.approx(logged["train/entropy_loss"], abs=1e-6)
    assert stats[-1]["losses/approx_kl"].item() == pytest.approx(logged["train/approx_kl"], abs=1e-6)  # last epoch's
    assert mean["losses/clipfrac"] == pytest.approx(logged["train/clip_fraction"], abs=1e-6)
    assert 0.2 < mean["losses/clipfrac"] < 0.8
