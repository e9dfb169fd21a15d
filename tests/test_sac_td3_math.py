"""The numbers of sac.py and td3.py: each function of their math, networks, memory and update against its definition, a
hand-worked case or Stable-Baselines3.

No environment is stepped here, but for some short runs. Where a case was collected from a public bug report, its number
is that of the project's list of cases ("case 94"). What both scripts have is tried on both: `module` is either.
"""

import copy
import functools
import itertools
import math
import types
from collections.abc import Iterable
from pathlib import Path

import gymnasium as gym
import mpmath
import numpy as np
import pytest
import torch
from harness import wrap
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import AffineTransform, TanhTransform

import sac
import td3

OBS_DIM, ACTION_DIM, BATCH = 3, 2, 16
CPU = torch.device("cpu")
both = pytest.mark.parametrize("module", [sac, td3], ids=["sac", "td3"])
mpmath.mp.dps = 50


def f64(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def close(actual, expected, tolerance=1e-6, relative=0.0):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual.detach(), expected.detach(), atol=tolerance, rtol=relative)


def flat(parameters: Iterable[torch.Tensor] | nn.Module) -> torch.Tensor:
    """A copy of all numbers, in a row."""
    parameters = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    return torch.cat([p.detach().flatten() for p in parameters])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------------------
# sac: density of a squashed Gaussian
# ---------------------------------------------------------------------------------------------------------------------
MEANS, STDS, SCALES = [0.0, 0.8, -2.0], [0.1, 0.7, 2.0], [1.0, 0.4, 2.0, 5.0]


def gaussian_actor(mean: list[float], std: list[float], scale: list[float], shift: list[float]) -> nn.Module:
    """An actor whose Gaussian is the same for every observation."""
    actor = sac.Actor(1, np.array(scale), np.array(shift), 4).double()
    with torch.no_grad():
        actor.scale.copy_(f64(scale))  # it was rounded to float32
        actor.network[-1].weight.zero_()
        actor.network[-1].bias.copy_(torch.cat([f64(mean), f64(std).log()]))
    return actor


def density(mean: float, std: float, scale: float, shift: float, points: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions over the whole range, in order, and the log-density at each, by the actor."""
    actor = gaussian_actor([mean], [std], [scale], [shift])
    noise = (torch.linspace(-19, 19, points, dtype=torch.float64)[:, None] - mean) / std
    with torch.no_grad():
        actions, logprobs = actor(torch.zeros(points, 1, dtype=torch.float64), noise)
    return actions[:, 0], logprobs


@pytest.mark.parametrize(("mean", "std", "scale"), list(itertools.product(MEANS, STDS, SCALES)))
def test_density_integrates_to_1_over_the_action_range(mean, std, scale):
    """Recipe F9, case 86. Without one of its parts the integral is visibly another number."""
    actions, logprobs = density(mean, std, scale, shift=3.0, points=20_001)
    close(torch.stack([actions[0], actions[-1]]), f64([3 - scale, 3 + scale]), 1e-9)
    close(torch.trapezoid(logprobs.exp(), actions), 1, 1e-4)
    without_scale = torch.trapezoid(logprobs.exp() * scale, actions)
    without_slope = torch.trapezoid(logprobs.exp() * (1 - ((actions - 3) / scale).square()), actions)
    assert abs(without_slope - 1) > 0.009 and (scale == 1 or abs(without_scale - 1) > 0.5)


def test_density_of_two_dimensions_integrates_to_1():
    """Over the rectangle: a log-density averaged over dimensions, or with one scale for all, does not."""
    mean, std, scale, shift, points = [0.3, -1.0], [0.5, 0.9], [2.0, 0.4], [1.0, -0.5], 301
    noise = torch.linspace(-6, 6, points, dtype=torch.float64)
    grid = torch.cartesian_prod(noise, noise)
    actions, logprobs = gaussian_actor(mean, std, scale, shift)(grid[:, :1] * 0, grid)
    x, y = (actions.detach().unflatten(0, (points, points))[..., d] for d in range(2))
    heights = logprobs.detach().exp().unflatten(0, (points, points))
    close(torch.trapezoid(torch.trapezoid(heights, y, dim=1), x[:, 0]), 1, 1e-3)


@pytest.mark.parametrize(
    ("u", "mean", "std", "scale", "expected"),
    [
        (0.0, 0.0, 1.0, 2.0, -1.612086),  # case 86; without the scale -0.918939
        (0.0, 0.0, 1.0, 1.0, -0.918939),
        (0.0, 0.0, 1.0, 0.4, -0.918939 - math.log(0.4)),
        *((5.0, 5.0, 1.0, 1.0, -0.918939 + 8.6138),),  # case 87: log(1 - tanh^2 + 1e-6) gives 8.6085, 13.8155, 13.8155
        *((10.0, 10.0, 1.0, 1.0, -0.918939 + 18.6137), (20.0, 20.0, 1.0, 1.0, -0.918939 + 38.6137)),
        (0.5, 0.0, 2.0, 1.0, -0.5 * 0.25**2 - math.log(2) - 0.918939 - math.log(1 - math.tanh(0.5) ** 2)),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_log_prob_by_hand(u, mean, std, scale, expected, sign):
    arguments = f64([[sign * u]]), f64([[sign * mean]]), f64([[math.log(std)]]), f64([scale])
    close(sac.squashed_log_prob(*arguments), f64([expected]), 5e-5)


def exact_log_prob(u: float, mean: float, log_std: float, scale: float) -> float:
    """By the definition, with 50 digits."""
    u, mean, log_std, scale = (mpmath.mpf(x) for x in (u, mean, log_std, scale))
    log_normal = mpmath.log(mpmath.npdf(u, mean, mpmath.exp(log_std)))
    return float(log_normal - mpmath.log(scale * (1 - mpmath.tanh(u) ** 2)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 4e-11), (torch.float32, 2e-7)])
@pytest.mark.parametrize("log_std", [-5.0, -0.5, 2.0])
@pytest.mark.parametrize("scale", [0.4, 1.0, 5.0])
def test_log_prob_is_right_and_has_a_finite_gradient_where_tanh_is_1(dtype, tolerance, log_std, scale):
    """Case 87, recipe F10: the error is a tiny part of the largest term, for every |u| up to 30.

    2e-7 is two units in the last place of float32. In float64 torch's softplus(x) is x from 20 on, 2e-9 too small.
    """
    us = [0.0, 1e-3, 0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 9.0, 10.0, 11.0, 15.0, 19.5, 30.0]
    us = torch.tensor([x for u in us for x in (u, -u)], dtype=dtype)
    offset = torch.tensor([0.0, 0.5, -1.25], dtype=dtype) * 2**-3
    u, means = torch.cartesian_prod(us, offset).unbind(1)
    means = u - means
    u, mean, std = (x[:, None].clone().requires_grad_() for x in (u, means, torch.full_like(u, log_std)))
    logprobs = sac.squashed_log_prob(u, mean, std, torch.tensor([scale], dtype=dtype))
    assert logprobs.dtype == dtype and logprobs.isfinite().all()
    numbers = zip(u.flatten().tolist(), mean.flatten().tolist(), strict=True)
    real_scale = torch.tensor(scale, dtype=dtype).item()
    exact = f64([exact_log_prob(x, m, log_std, real_scale) for x, m in numbers])
    z = ((u - mean) * math.exp(-log_std)).detach().double().flatten()
    largest = 2 * u.detach().double().flatten().abs() + z.square() + 4
    assert ((logprobs.detach().double() - exact).abs() <= tolerance * largest).all()
    du, dmean, dstd = torch.autograd.grad(logprobs.sum(), (u, mean, std))
    inverse = math.exp(-log_std)
    close(du.flatten(), -z * inverse + 2 * u.double().flatten().tanh(), 1e-6 * inverse, 1e-5)
    close(dmean.flatten(), z * inverse, 1e-6 * inverse, 1e-5)
    close(dstd.flatten(), z.square() - 1, 1e-6, 1e-5)


def test_log_prob_has_one_number_per_sample_the_sum_over_dimensions():
    """Case 89: B = 4, A = 6."""
    u, mean, log_std = normal(3, 4, 6).unbind()
    scale = f64([1.0, 2.0, 0.4, 5.0, 1.0, 0.1])
    logprobs = sac.squashed_log_prob(u, mean, log_std, scale)
    assert logprobs.shape == (4,)
    for b in range(4):
        numbers = zip(*(x[b].tolist() for x in (u, mean, log_std)), scale.tolist(), strict=True)
        close(logprobs[b], sum(exact_log_prob(*x) for x in numbers), 1e-11)


def squashed(mean: torch.Tensor, log_std: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor):
    """The same distribution of torch.distributions."""
    gaussian = Normal(mean, log_std.exp())
    return Independent(TransformedDistribution(gaussian, [TanhTransform(), AffineTransform(shift, scale)]), 1)


def test_log_prob_equals_torch_distributions():
    u, mean, log_std = normal(3, 200, 3, seed=1).unbind()
    scale, shift = f64([0.4, 2.0, 5.0]), f64([0.0, 1.0, -7.0])
    expected = squashed(mean, log_std, scale, shift).log_prob(u.tanh() * scale + shift)
    close(sac.squashed_log_prob(u, mean, log_std, scale), expected, 1e-7)


def test_log_prob_equals_stable_baselines3_up_to_the_scale():
    """SB3's density is that of tanh(u) in [-1, 1], with 1e-6 inside the logarithm: wrong by 1e-3 from |u| = 4 on."""
    u, mean, log_std = normal(3, 500, 2, seed=2).float().unbind()
    theirs = SquashedDiagGaussianDistribution(2).proba_distribution(mean, log_std).log_prob(u.tanh(), u)
    moderate = u.abs().amax(1) < 3
    scale = torch.tensor([0.4, 2.0])
    ours = sac.squashed_log_prob(u, mean, log_std, scale) + scale.log().sum()
    assert moderate.sum() > 400
    close(ours[moderate], theirs[moderate], 1e-3)


def test_reparameterised_gradient_is_far_less_noisy_than_the_score_function():
    """Recipe F8, on Q = -(a - 1)^2: the same mean, a variance some ten times lower."""
    actor = gaussian_actor([0.2], [0.3], [2.0], [0.0])
    noise = normal(5000, 1)
    obs = torch.zeros(1, 1, dtype=torch.float64)
    bias = actor.network[-1].bias

    def q(actions):
        return -(actions - 1).square().sum(-1)

    def sample_gradients(loss_of):
        """d loss / d mean of every single sample."""
        mean = bias[:1].detach().expand(len(noise), 1).clone().requires_grad_()
        return torch.autograd.grad(loss_of(mean).sum(), mean)[0][:, 0]

    log_std = bias[1:].detach()

    def reparameterised(mean):
        u = mean + log_std.exp() * noise
        return torch.stack([sac.policy_loss(0 * x, x, 0.0) for x in q(u.tanh() * 2)[:, None]])

    def score_function(mean):
        u = (mean + log_std.exp() * noise).detach()
        return -sac.squashed_log_prob(u, mean, log_std, actor.scale) * q(u.tanh() * 2)

    ours, theirs = sample_gradients(reparameterised), sample_gradients(score_function)
    assert abs(ours.mean() - theirs.mean()) < 4 * theirs.std() / math.sqrt(len(noise))
    assert theirs.var() > 4 * ours.var()
    # The actor's is the reparameterised one.
    actions, logprobs = actor(obs, noise[:500])
    loss = sac.policy_loss(logprobs, q(actions), 0.0)
    close(torch.autograd.grad(loss, bias)[0][0], ours[:500].mean(), 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Targets and losses
# ---------------------------------------------------------------------------------------------------------------------
def test_soft_td_target_by_hand():
    """Case 92 (7.3; without entropy 5.5, with its sign swapped 3.7), and no bracket at a termination."""
    target = sac.soft_td_target(f64([1.0, 1.0]), torch.tensor([False, True]), f64([5.0] * 2), f64([-2.0] * 2), 1.0, 0.9)
    close(target, f64([7.3, 1.0]), 1e-12)


@pytest.mark.parametrize("flags_as", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [0.0, 0.2, torch.tensor(1.5)])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_targets_are_those_of_their_definition(flags_as, alpha, gamma):
    rewards, next_q, next_logprobs = normal(3, 40).unbind()
    ends = torch.arange(40) % 3 == 0
    soft, plain = [], []
    for r, q, logprob, end in zip(*(x.tolist() for x in (rewards, next_q, next_logprobs, ends)), strict=True):
        soft.append(r if end else r + gamma * (q - float(alpha) * logprob))
        plain.append(r if end else r + gamma * q)
    ends = ends.to(flags_as)
    actual = sac.soft_td_target(rewards, ends, next_q, next_logprobs, alpha, gamma)
    assert actual.shape == (40,)
    close(actual, f64(soft))
    close(td3.td_target(rewards, ends, next_q, gamma), f64(plain), 1e-12)


@pytest.mark.parametrize("leak", [math.nan, math.inf, -math.inf])
def test_termination_has_no_bootstrap_whatever_comes_after_it(leak):
    """nan * 0 is nan: a mask by multiplication would let it through."""
    reward, end, bad = f64([3.0]), torch.tensor([True]), f64([leak])
    assert sac.soft_td_target(reward, end, bad, bad, 0.2, 0.99) == 3 == td3.td_target(reward, end, bad, 0.99)


@both
def test_qf_loss_is_the_sum_over_critics_of_the_mean_over_samples(module):
    """Recipe F15: a mean over critics would halve every step of plain descent."""
    q, target = f64([[1.0, 2.0], [3.0, 5.0]]).requires_grad_(), f64([0.0, 1.0])
    loss = module.qf_loss(q, target)
    close(loss, (1 + 1) / 2 + (9 + 16) / 2, 1e-12)
    close(torch.autograd.grad(loss, q)[0], f64([[1.0, 1.0], [3.0, 4.0]]), 1e-12)
    q, target = normal(5, 64), normal(64, seed=1)
    close(module.qf_loss(q, target), sum(nn.functional.mse_loss(x, target) for x in q), 1e-12)


def test_policy_losses_by_hand():
    logprobs, q = f64([-1.0, 2.0, 0.5]).requires_grad_(), f64([3.0, -4.0, 0.25]).requires_grad_()
    loss = sac.policy_loss(logprobs, q, 0.2)
    close(loss, ((-0.2 - 3) + (0.4 + 4) + (0.1 - 0.25)) / 3, 1e-12)
    gradients = torch.autograd.grad(loss, (logprobs, q))
    close(torch.stack(gradients), f64([[0.2 / 3] * 3, [-1 / 3] * 3]), 1e-12)
    loss = td3.policy_loss(q)
    close(loss, 0.75 / 3, 1e-12)
    close(torch.autograd.grad(loss, q)[0], f64([-1 / 3] * 3), 1e-12)


@pytest.mark.parametrize("target_entropy", [-2.0, 0.0, 1.5])
def test_temperature_loss_and_its_gradient_by_hand(target_entropy):
    """d/d log_alpha = -alpha * (mean log pi + target): descent raises alpha while the entropy is below its target."""
    log_alpha, logprobs = f64(math.log(0.3)).requires_grad_(), f64([1.0, -2.0, 4.0]).requires_grad_()
    loss = sac.temperature_loss(log_alpha, logprobs, target_entropy)
    close(loss, -0.3 * (1 + target_entropy), 1e-12)
    gradient, of_policy = torch.autograd.grad(loss, (log_alpha, logprobs), allow_unused=True)
    close(gradient, -0.3 * (1 + target_entropy), 1e-12)
    assert of_policy is None  # the policy does not learn from it
    assert (gradient < 0) == (-logprobs.mean() < target_entropy)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_returns_are_the_sums_of_their_definitions(gamma, steps):
    """The first action's own bonus is not a part of its value; what follows the last step is worth gamma^T tail."""
    rewards, bonuses, tail = normal(steps).tolist(), normal(steps, seed=1).tolist(), 3.5
    plain = sum(gamma**t * r for t, r in enumerate(rewards)) + gamma**steps * tail
    soft = plain + sum(gamma**t * b for t, b in enumerate(bonuses) if t)
    assert td3.discounted_return(rewards, tail, gamma) == pytest.approx(plain, abs=1e-12)
    assert sac.soft_return(rewards, bonuses, tail, gamma) == pytest.approx(soft, abs=1e-12)
    assert sac.soft_return(rewards, [0.0] * steps, tail, gamma) == pytest.approx(plain, abs=1e-12)


def test_the_soft_return_is_what_the_targets_lead_to():
    """Backwards along one episode from its end, each target the next one's Q: the numbers are of one convention."""
    rewards, logprobs, alpha, gamma = normal(6), normal(6, seed=1), 0.3, 0.9
    q = rewards[-1:]
    for t in reversed(range(5)):
        q = sac.soft_td_target(rewards[t : t + 1], torch.tensor([False]), q, logprobs[t + 1 : t + 2], alpha, gamma)
    assert sac.soft_return(rewards.tolist(), (-alpha * logprobs).tolist(), 0.0, gamma) == pytest.approx(q.item())
    q = rewards[-1:]
    for t in reversed(range(5)):
        q = td3.td_target(rewards[t : t + 1], torch.tensor([False]), q, gamma)
    assert td3.discounted_return(rewards.tolist(), 0.0, gamma) == pytest.approx(q.item())


@pytest.mark.parametrize(
    ("action", "noise", "clip", "low", "high", "expected"),
    [
        (0.0, 0.3, 0.5, -1.0, 1.0, 0.3),
        (0.0, 0.7, 0.5, -1.0, 1.0, 0.5),
        (0.2, -9.0, 0.5, -1.0, 1.0, -0.3),
        (0.9, 0.3, 0.5, -1.0, 1.0, 1.0),  # the action is clipped after the noise
        (-0.9, -0.3, 0.5, -1.0, 1.0, -1.0),
        (0.9, 10.0, 0.5, -1.0, 2.0, 1.4),
        (0.5, 10.0, 1.5, -1.0, 1.0, 1.0),  # case 93
        (0.0, -10.0, 0.2, -0.4, 0.4, -0.2),  # case 94: clip .5 times scale .4
        (0.3, 0.19, 0.2, -0.4, 0.4, 0.4),
        (7.0, -1.0, 3.0, 5.0, 9.0, 6.0),
        (7.0, -3.0, 3.0, 5.0, 9.0, 5.0),
    ],
)
def test_smoothed_target_action_by_hand(action, noise, clip, low, high, expected):
    actual = td3.smoothed_target_action(f64([[action]]), f64([[noise]]), clip, low, high)
    close(actual, f64([[expected]]), 1e-12)
    # Each dimension has its own range: beside a wide one nothing changes.
    pairs = [f64([[x, 50.0]]) for x in (action, noise)] + [f64([x, y]) for x, y in ((clip, 60), (low, -80), (high, 80))]
    close(td3.smoothed_target_action(*pairs), f64([[expected, 80.0]]), 1e-12)


def test_noise_far_beyond_its_clip_is_refused(capsys):
    """Case 99: of sigma 1e6 clipped at .5 two points are left."""
    points = td3.smoothed_target_action(torch.zeros(100, 1), 1e6 * normal(100, 1), 0.5, -1.0, 1.0)
    assert points.unique().tolist() == [-0.5, 0.5]
    with pytest.raises(SystemExit, match="2"):
        td3.check(td3.Args(policy_noise=1e6, noise_clip=0.5))
    assert "--policy-noise" in capsys.readouterr().err
    td3.check(td3.Args(policy_noise=1e6, target_smoothing=False))  # which then is not used


def test_ornstein_uhlenbeck():
    """x - theta x + sigma noise; left alone it dies out, driven its variance is that of the AR(1) process."""
    close(td3.ornstein_uhlenbeck(np.array([2.0]), np.array([-0.5]), 0.2), [1.6], 1e-12)
    close(td3.ornstein_uhlenbeck(np.array([2.0]), np.array([-0.5]), 0.2, 0.5), [0.9], 1e-12)
    rng, state = np.random.default_rng(0), np.zeros(20_000)
    for _ in range(60):
        state = td3.ornstein_uhlenbeck(state, rng.standard_normal(len(state)), 0.1)
    assert state.std() == pytest.approx(0.1 / math.sqrt(1 - 0.85**2), rel=0.03)
    then = td3.ornstein_uhlenbeck(state, rng.standard_normal(len(state)), 0.1)
    assert np.corrcoef(state, then)[0, 1] == pytest.approx(0.85, abs=0.01)


def test_anneal_starts_in_full_and_never_reaches_the_end():
    close([td3.anneal(0.5, 0.1, step, 4) for step in (1, 2, 3, 4, 5)], [0.5, 0.4, 0.3, 0.2, 0.1], 1e-12)
    assert td3.anneal(0.5, None, 3, 4) == 0.5
    assert td3.anneal(0.5, 0.0, 3, 4) == 0.25  # an end of 0 is an end


# ---------------------------------------------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------------------------------------------
SCALE, SHIFT = [2.0, 0.4], [1.0, -0.3]


def make_agent(module, scale=SCALE, shift=SHIFT, seed=0, dtype=torch.float64, spread=1.0, **flags) -> nn.Module:
    """The script's agent, for actions in shift +- scale; the policy's last layer times spread."""
    torch.manual_seed(seed)
    args = module.Args(**{"hidden_size": 16} | flags)
    agent = module.Agent(OBS_DIM, np.array(scale), np.array(shift), args if module is sac else args.hidden_size)
    agent.to(dtype)
    with torch.no_grad():
        agent.actor.network[-1].weight.mul_(spread)
        for actor in [agent.actor] if module is sac else [agent.actor, agent.target_actor]:
            if dtype == torch.float64:  # scale and shift were rounded to float32
                actor.scale.copy_(torch.as_tensor(np.array(scale)))
                actor.shift.copy_(torch.as_tensor(np.array(shift)))
    return agent


def act(module, agent, obs, noise=None, actor="actor") -> torch.Tensor:
    """Actions of either script's policy; sac's without noise are its mode."""
    noise = torch.zeros(len(obs), len(agent.actor.scale)).to(obs) if noise is None else noise
    return getattr(agent, actor)(obs, noise)[0] if module is sac else getattr(agent, actor)(obs)


def test_actor_of_sac_by_hand():
    """The first half of the outputs is the mean, the second the log std; u = mean + std * noise."""
    agent, obs, noise = make_agent(sac, spread=5.0), normal(BATCH, OBS_DIM), normal(BATCH, ACTION_DIM, seed=1)
    out = agent.actor.network(obs)
    actions, logprobs = agent.actor(obs, noise)
    u = out[:, :2] + out[:, 2:].exp() * noise
    close(actions, u.tanh() * f64(SCALE) + f64(SHIFT), 1e-6)
    expected = squashed(out[:, :2], out[:, 2:], agent.actor.scale, agent.actor.shift).log_prob(actions)
    close(logprobs, expected, 1e-8)
    mode, _ = agent.actor(obs, noise * 0)
    close(mode, out[:, :2].tanh() * f64(SCALE) + f64(SHIFT), 1e-6)


@pytest.mark.parametrize(("raw", "clamped"), [(-50.0, -5.0), (-5.5, -5.0), (-4.5, -4.5), (1.9, 1.9), (9.0, 2.0)])
def test_log_std_is_clamped(raw, clamped):
    """Recipe F13: both the spread of the actions and the density."""
    actor, noise = gaussian_actor([0.1], [1.0], [1.0], [0.0]), f64([[0.05]])
    with torch.no_grad():
        actor.network[-1].bias[1] = raw
    action, logprob = actor(f64([[0.0]]), noise)
    u = 0.1 + math.exp(clamped) * 0.05
    close(action, f64([[math.tanh(u)]]), 1e-12)
    close(logprob, f64([exact_log_prob(u, 0.1, clamped, 1.0)]), 1e-10)


def test_actor_of_td3_by_hand():
    agent, obs = make_agent(td3, spread=5.0), normal(BATCH, OBS_DIM)
    close(agent.actor(obs), agent.actor.network(obs).tanh() * f64(SCALE) + f64(SHIFT), 1e-6)


@both
@pytest.mark.parametrize(
    ("low", "high"),
    [([-1, 0], [3, 10]), ([-0.4] * 17, [0.4] * 17), ([[-2, 0], [0, -8], [1, 2]], [[2, 1], [4, 0], [2, 5]])],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_actions_span_the_range_of_an_asymmetric_box(module, low, high, dtype):
    """Cases 93 and 95, dimension by dimension: 0 is the middle, and the bounds are reached but not left."""
    box = gym.spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
    scale, shift = module.action_transform(box)
    agent = make_agent(module, scale, shift, dtype=torch.float32)
    assert {x.dtype for x in agent.actor.state_dict().values()} == {torch.float32}
    half, middle = (box.high - box.low).flatten() / 2, (box.high + box.low).flatten() / 2
    bias, obs = agent.actor.network[-1].bias, torch.zeros(1, OBS_DIM)
    for u, expected in ((0.0, middle), (1.0, middle + math.tanh(1) * half), (30.0, box.high), (-30.0, box.low)):
        with torch.no_grad():
            agent.actor.network[-1].weight.zero_()
            bias.zero_()
            bias[: box.low.size] = u
            action = act(module, agent, obs)[0]
        close(action, expected.flatten(), 1e-6, 1e-6)
    if module is sac:  # a density, not only a point: the entropy of the widest uniform is that of the box
        assert agent.target_entropy == -box.low.size


@pytest.mark.parametrize(("shape", "flag", "expected"), [((6,), None, -6), ((2, 3), None, -6), ((2, 3), -1.5, -1.5)])
def test_target_entropy_is_minus_the_number_of_action_dimensions(shape, flag, expected):
    """Case 91; 0 is a target like any other."""
    scale, shift = sac.action_transform(gym.spaces.Box(-1, 1, shape))
    assert make_agent(sac, scale, shift, target_entropy=flag).target_entropy == expected
    assert make_agent(sac, scale, shift, target_entropy=0.0).target_entropy == 0


@pytest.mark.parametrize("alpha", [1.0, 0.2])
def test_initial_temperature(alpha):
    agent = make_agent(sac, alpha=alpha)
    close(agent.log_alpha, math.log(alpha), 1e-6)
    assert agent.log_alpha.requires_grad and agent.log_alpha.shape == ()


@both
def test_critics_are_independent_functions_of_observation_and_action(module):
    """(E, B), each from its own weights; neither other samples nor other critics have a say."""
    agent = make_agent(module, **({"num_critics": 5} if module is sac else {}))
    number = 5 if module is sac else 2
    obs, actions = normal(BATCH, OBS_DIM), normal(BATCH, ACTION_DIM, seed=1)
    q = agent.critics(obs, actions)
    assert q.shape == (number, BATCH)
    for e in range(number):
        close(q[e], one_critic(agent.critics, e, torch.cat([obs, actions], 1)), 1e-12)
    assert (q[1:] - q[:-1]).abs().min() > 1e-6
    for gradient in torch.autograd.grad(q[1].sum(), list(agent.critics.parameters())):
        assert [bool(part.any()) for part in gradient] == [e == 1 for e in range(number)]
    if module is td3:
        assert torch.equal(agent.critics(obs, actions, 1), q[:1])


def test_an_action_that_cannot_move_is_refused(capsys):
    """Its range has no width, so its density would be infinite."""
    with pytest.raises(SystemExit, match="2"):
        sac.check(sac.Args(env_id="toy_envs:Other_empty-v0"))
    assert "range of Box" in capsys.readouterr().err


@both
def test_shapes_do_not_broadcast(module):
    """Case 89: a (B, 1) beside a (B,) would make a (B, B) loss, of the right type and wrong in every number."""
    agent, obs = make_agent(module, scale=[1.0] * 6, shift=[0.0] * 6), normal(4, OBS_DIM)
    actions = act(module, agent, obs)
    assert actions.shape == (4, 6) and agent.critics(obs, actions).shape == (2, 4)
    if module is sac:
        assert agent.actor(obs, normal(4, 6))[1].shape == (4,)
        column = normal(4, 1)
        target = sac.soft_td_target(column[:, 0], column[:, 0] > 0, agent.critics(obs, actions)[0], column[:, 0], 1, 1)
        assert target.shape == (4,)


@both
def test_networks_have_two_hidden_relu_layers_of_the_given_width(module):
    agent = make_agent(module, hidden_size=24)
    network = agent.actor.network
    assert [type(layer) for layer in network] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    sizes = [(layer.in_features, layer.out_features) for layer in network if isinstance(layer, nn.Linear)]
    assert sizes == [(OBS_DIM, 24), (24, 24), (24, ACTION_DIM * (2 if module is sac else 1))]
    shapes = [p.shape for p in linear_parameters(agent.critics, 1)]
    assert shapes == [(24, OBS_DIM + ACTION_DIM), (24,), (24, 24), (24,), (1, 24), (1,)]


@both
def test_critics_start_as_pytorchs_linear_layers_do(module):
    """Weights and biases uniform in +-1 / sqrt(inputs), for each critic anew."""
    agent, inputs_of_each = make_agent(module, hidden_size=200), np.repeat([OBS_DIM + ACTION_DIM, 200, 200], 2)
    for e in range(2):
        for p, inputs in zip(linear_parameters(agent.critics, e), inputs_of_each, strict=True):
            bound = 1 / math.sqrt(inputs)
            assert p.abs().max() <= bound
            if p.numel() > 1:
                few = 1 / math.sqrt(p.numel())
                assert p.abs().max() > bound * (1 - 3 * few) and abs(p.mean()) < 3 * bound * few
                close(p.std() * math.sqrt(3) / bound, 1, 2 * few)
    pairs = zip(linear_parameters(agent.critics, 0), linear_parameters(agent.critics, 1), strict=True)
    assert all((a != b).all() for a, b in pairs)


def test_layer_norm_is_in_the_critics_where_asked():
    """Recipe F16: each hidden layer of each critic, before its ReLU; their targets too, and never the policy."""
    agent = make_agent(sac, layer_norm=True, num_critics=3, hidden_size=24)
    obs, actions = normal(BATCH, OBS_DIM), normal(BATCH, ACTION_DIM, seed=1)
    x, plain = torch.cat([obs, actions], 1), make_agent(sac, num_critics=3, hidden_size=24)
    for critics in (agent.critics, agent.target_critics):
        assert len(critics.scales) == len(critics.shifts) == 2
        for i, (scale, shift) in enumerate(zip(critics.scales, critics.shifts, strict=True)):  # each critic has its own
            assert torch.equal(scale, f64(np.ones((3, 1, 24)))) and torch.equal(shift, f64(np.zeros((3, 1, 24))))
            with torch.no_grad():
                scale.copy_(1 + normal(3, 1, 24, seed=i)), shift.copy_(normal(3, 1, 24, seed=10 + i))
        close(critics(obs, actions), torch.stack([one_critic(critics, e, x) for e in range(3)]), 1e-9)
        critics.load_state_dict(plain.critics.state_dict(), strict=False)  # the same weights without the norm
        assert (critics(obs, actions) - plain.critics(obs, actions)).abs().min() > 1e-6
    assert not len(plain.critics.scales) and not any(isinstance(x, nn.LayerNorm) for x in agent.actor.modules())


def linear_parameters(critics: nn.Module, e: int) -> list[torch.Tensor]:
    """Weights (out, in) and biases (out,) of the e-th critic, layer by layer, as those of an nn.Linear."""
    layers = zip(critics.weights, critics.biases, strict=True)
    hidden = [p for weight, bias in layers for p in (weight[e].T, bias[e, 0])]
    return [*hidden, critics.out_weight[e], critics.out_bias[e]]


def one_critic(critics: nn.Module, e: int, x: torch.Tensor) -> torch.Tensor:
    """The e-th critic alone, (B, inputs) -> (B,), through PyTorch's layers."""
    numbers = iter(linear_parameters(critics, e))
    *layers, (weight, bias) = zip(numbers, numbers, strict=True)
    for i, (hidden_weight, hidden_bias) in enumerate(layers):
        x = nn.functional.linear(x, hidden_weight, hidden_bias)
        if len(getattr(critics, "scales", ())):
            x = nn.functional.layer_norm(x, x.shape[1:], critics.scales[i][e, 0], critics.shifts[i][e, 0])
        x = nn.functional.relu(x)
    return nn.functional.linear(x, weight, bias)[:, 0]


@both
def test_targets_start_as_copies_that_do_not_learn(module):
    agent = make_agent(module)
    for slow, fast in pairs_of(module, agent):
        assert torch.equal(flat(slow), flat(fast))
        assert not any(p.requires_grad for p in slow.parameters())
        assert all(p.requires_grad for p in fast.parameters())
        with torch.no_grad():
            next(iter(fast.parameters())).add_(1)
        assert not torch.equal(flat(slow), flat(fast))  # no shared memory


def pairs_of(module, agent) -> list[tuple[nn.Module, nn.Module]]:
    """(target, what it follows)."""
    pairs = [(agent.target_critics, agent.critics)]
    return pairs if module is sac else [*pairs, (agent.target_actor, agent.actor)]


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------
COLUMNS = ("observations", "actions", "rewards", "next_observations", "terminations", "truncations")


def numbered_step(t: int, num_envs: int) -> tuple[np.ndarray, ...]:
    """Step t, in which every number tells its time, its environment and its column."""
    number = 10.0 * t + np.arange(num_envs)
    obs = np.stack([number, -number], 1)
    return obs, obs[:, :1] / 1000, number, obs + 0.5, (number % 3 == 0), (number % 5 == 0)


def filled(module, size: int, num_envs: int, steps: int) -> sac.ReplayMemory:
    memory = module.ReplayMemory(size, num_envs, 2, 1, CPU)
    for t in range(steps):
        memory.add(*numbered_step(t, num_envs))
    return memory


sizes = pytest.mark.parametrize(
    ("size", "num_envs", "steps"),
    [(7, 1, 1), (7, 1, 7), (7, 1, 8), (7, 1, 20), (20, 3, 2), (20, 3, 6), (20, 3, 7), (20, 3, 17), (1, 1, 3)],
)


@both
@sizes
def test_memory_holds_the_newest_in_order_of_time(module, size, num_envs, steps, tmp_path):
    """NPZ for offline scripts: these keys and types, within each environment the oldest first."""
    memory, rows = filled(module, size, num_envs, steps), size // num_envs
    times = range(max(0, steps - rows), steps)
    assert len(memory) == len(times) * num_envs
    memory.save(tmp_path / "replay.npz")
    with np.load(tmp_path / "replay.npz") as file:
        saved = dict(file)
    assert list(saved) == [*COLUMNS, "env_ids"]
    types_ = [np.float32] * 4 + [np.bool_] * 2 + [np.int32]
    assert [x.dtype for x in saved.values()] == types_
    for env in range(num_envs):
        mine = saved["env_ids"] == env
        for name, column in zip(COLUMNS, zip(*(numbered_step(t, num_envs) for t in times), strict=True), strict=True):
            np.testing.assert_array_equal(saved[name][mine], np.array([x[env] for x in column], saved[name].dtype))


@both
@sizes
def test_samples_are_whole_stored_transitions_and_any_of_them(module, size, num_envs, steps):
    """Columns stay together, terminations and truncations apart; nothing unwritten or overwritten is drawn."""
    memory = filled(module, size, num_envs, steps)
    batch = memory.sample(np.random.default_rng(0), 400)
    obs, actions, rewards, next_obs, terminations, truncations = batch
    assert [x.dtype for x in batch] == [torch.float32] * 4 + [torch.bool] * 2
    assert [x.shape for x in batch] == [(400, 2), (400, 1), (400,), (400, 2), (400,), (400,)]
    times = range(max(0, steps - size // num_envs), steps)
    assert set(rewards.tolist()) == {10.0 * t + env for t in times for env in range(num_envs)}
    close(obs, torch.stack([rewards, -rewards], 1), 0)
    close(actions, rewards[:, None] / 1000, 1e-6)
    close(next_obs, obs + 0.5, 0)
    assert torch.equal(terminations, rewards % 3 == 0) and torch.equal(truncations, rewards % 5 == 0)


@both
@pytest.mark.parametrize(("num_envs", "steps"), [(1, 17), (1, 29), (4, 5), (4, 11)])
def test_sampling_is_uniform(module, num_envs, steps):
    """Chi-square of 40,000 draws: with n classes its mean is n - 1 and its variance 2 (n - 1)."""
    memory = filled(module, 20, num_envs, steps)
    rewards = memory.sample(np.random.default_rng(1), 40_000)[2]
    _, counts = rewards.unique(return_counts=True)
    n = len(memory)
    assert len(counts) == n
    chi_square = ((counts - 40_000 / n).square() / (40_000 / n)).sum().item()
    assert abs(chi_square - (n - 1)) < 4.5 * math.sqrt(2 * (n - 1))
    # Two draws of a batch are independent: a permutation would repeat none of so few.
    assert len(memory.sample(np.random.default_rng(2), n)[2].unique()) < n


@both
@sizes
def test_a_loaded_memory_gives_the_same_samples_and_goes_on_alike(module, size, num_envs, steps, tmp_path):
    """Rows are counted from the oldest, wherever in the ring that lies."""
    memory = filled(module, size, num_envs, steps)
    memory.save(tmp_path / "replay.npz")
    loaded = module.ReplayMemory(size, num_envs, 2, 1, CPU)
    loaded.load(tmp_path / "replay.npz")
    for t in range(steps, steps + 2 * size // num_envs + 2):
        assert len(loaded) == len(memory)
        draws = [m.sample(np.random.default_rng(t), 32) for m in (memory, loaded)]
        assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))
        for m in (memory, loaded):
            m.add(*numbered_step(t, num_envs))


@both
def test_memory_copies_what_it_is_given(module):
    """The loop hands over arrays that the next step overwrites; float64 observations are stored as float32."""
    memory, step = module.ReplayMemory(5, 1, 2, 1, CPU), [x.copy() for x in numbered_step(3, 1)]
    memory.add(*step)
    for x in step:
        x[:] = 0
    assert memory.sample(np.random.default_rng(0), 1)[2].item() == 30
    assert sum(x.nbytes for x in memory.data.values()) == 5 * (2 * 4 + 4 + 4 + 2 * 4 + 1 + 1)
    with pytest.raises(ValueError):
        memory.add(*step[:-1])


# ---------------------------------------------------------------------------------------------------------------------
# gradient_step
# ---------------------------------------------------------------------------------------------------------------------
def state_of(*parts) -> list[torch.Tensor]:
    """Copies of all parameters and of all that optimisers remember."""
    found = []
    for part in parts:
        if isinstance(part, torch.optim.Optimizer):
            found += [x for s in part.state_dict()["state"].values() for x in s.values()]
        else:
            found += list(part.parameters())
    return [x.detach().clone() for x in found]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def step(module, loss: torch.Tensor, optimizer: torch.optim.Optimizer, limit: float):
    """`gradient_step` after the loss's backward pass."""
    loss.backward()
    return module.gradient_step(loss.detach(), optimizer, limit)


@both
@pytest.mark.parametrize("limit", [math.inf, 100.0, 1.0])
def test_gradient_step_clips_and_reports_the_norm_as_it_was(module, limit):
    """Of 3 x + 4 y the gradient is (3, 4), its norm 5; nothing is left of it for the next one."""
    x, y = (nn.Parameter(f64([1.0])) for _ in range(2))
    optimizer = torch.optim.SGD([x, y], lr=1.0, fused=True)
    norm, skipped = step(module, (3 * x + 4 * y).sum(), optimizer, limit)
    close(norm, 5, 1e-12)
    assert skipped == 0
    size = min(1.0, limit / 5)
    close(torch.cat([x, y]), f64([1 - 3 * size, 1 - 4 * size]), 1e-6)
    assert x.grad is None and y.grad is None


@both
def test_gradient_step_is_that_of_the_optimizers_own_parameters(module):
    """Clipping and norm are its first group's; what else has a gradient is left alone."""
    x, y, other = (nn.Parameter(f64([1.0])) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [x]}, {"params": [y], "lr": 0.5}], lr=1.0, fused=True)
    norm, _ = step(module, (3 * x + 4 * y + 5 * other).sum(), optimizer, 1.0)
    close(norm, 3, 1e-12)
    close(torch.cat([x, y, other]), f64([1 - 1, 1 - 0.5 * 4, 1]), 1e-6)
    assert x.grad is None and y.grad is None and other.grad == 5


@both
def test_gradient_step_is_adam(module):
    """Against torch's unfused Adam, three steps."""
    ours, theirs = (nn.Parameter(normal(7)) for _ in range(2))
    optimizer = torch.optim.Adam([ours], 0.01, fused=True)
    reference = torch.optim.Adam([theirs], 0.01, fused=False, foreach=False)
    for k in range(3):
        weights = normal(7, seed=k)
        step(module, (weights * ours.square()).sum(), optimizer, math.inf)
        reference.zero_grad()
        (weights * theirs.square()).sum().backward()
        reference.step()
        close(ours, theirs, 1e-12)


@both
@pytest.mark.parametrize("bad", ["nan loss", "infinite loss", "nan gradient", "infinite gradient", "overflow"])
@pytest.mark.parametrize("limit", [math.inf, 1.0])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(module, bad, limit, first):
    """Parameters, Adam's moments and its step count bit for bit; the next step is as if it had not been."""
    after = []
    for poisoned in (True, False):
        x = nn.Parameter(torch.tensor([1.0, -2.0, 0.0]))
        optimizer = torch.optim.Adam([x], 0.1, fused=True)
        if not first:
            step(module, x.square().sum(), optimizer, limit)
        if poisoned:
            before = x.detach().clone(), {k: v.clone() for k, v in optimizer.state[x].items()}
            loss = {
                "nan loss": (x * math.nan).sum(),
                "infinite loss": x.sum() + math.inf,  # its gradient is finite
                "nan gradient": (x.abs() - x.abs()).sqrt().sum(),  # 0 * inf behind a finite loss
                "infinite gradient": x[2].clamp(min=0).sqrt(),  # the loss is 0
                "overflow": (x * 1e20).square().sum(),
            }[bad]
            norm, skipped = step(module, loss, optimizer, limit)
            assert skipped == 1
            assert not (loss.isfinite() and norm.isfinite())
            assert torch.equal(x, before[0])
            assert all(not v.any() if first else torch.equal(v, before[1][k]) for k, v in optimizer.state[x].items())
        for _ in range(2):
            _, skipped = step(module, (x - 3).square().sum(), optimizer, limit)
            assert skipped == 0
        after.append([x.detach(), *optimizer.state[x].values()])
    assert same(*after)


# ---------------------------------------------------------------------------------------------------------------------
# Update
# ---------------------------------------------------------------------------------------------------------------------
def make_batch(size: int = BATCH, seed: int = 0, dtype=torch.float64) -> list[torch.Tensor]:
    """Transitions, in the order of the memory; the flags differ, and some have both."""
    obs, next_obs = normal(2, size, OBS_DIM, seed=seed).to(dtype).unbind()
    actions = (normal(size, ACTION_DIM, seed=seed + 1).tanh() * f64(SCALE) + f64(SHIFT)).to(dtype)
    index = torch.arange(size)
    rewards = normal(size, seed=seed + 2).to(dtype)
    return [obs, actions, rewards, next_obs, index % 3 == 0, index % 4 == 0]


def learners(module, agent) -> dict[str, list[nn.Parameter]]:
    """What each optimiser of `update` moves."""
    parts = {"critic": list(agent.critics.parameters()), "policy": list(agent.actor.parameters())}
    return parts | {"temperature": [agent.log_alpha]} if module is sac else parts


def optimizers_of(module, agent, make, rates: dict[str, float]) -> dict[str, torch.optim.Optimizer]:
    """As the scripts have them: the temperature is the second group of the policy's optimiser."""
    groups = {k: [{"params": part, "lr": rates[k]}] for k, part in learners(module, agent).items()}
    groups["policy"] += groups.pop("temperature", [])
    return {k: make(both_groups, fused=True) for k, both_groups in groups.items()}


def adams(module, agent, lr=3e-4, eps=1e-8) -> dict[str, torch.optim.Adam]:
    rates = dict.fromkeys(("critic", "policy", "temperature"), lr)
    return optimizers_of(module, agent, functools.partial(torch.optim.Adam, eps=eps), rates)


def plain(module, agent, **rates: float) -> dict[str, torch.optim.SGD]:
    """Plain descent, by default of rate 1: a step is minus the gradient; with rate 0 nothing moves."""
    rates = dict.fromkeys(("critic", "policy", "temperature"), 1.0) | rates
    return optimizers_of(module, agent, torch.optim.SGD, rates)


def run_update(module, agent, optimizers, batch, train_policy=True, noise=None, subset=None, **flags) -> dict:
    """One call of the script's update()."""
    args, size, dtype = module.Args(**flags), len(batch[0]), agent.actor.scale.dtype
    dim = len(agent.actor.scale)
    if module is td3:
        noise = normal(size, dim, seed=9).to(dtype) if noise is None else noise
        return td3.update(agent, optimizers, batch, noise, train_policy, args)
    noise = normal(2, size, dim, seed=9).to(dtype) if noise is None else noise
    subset = torch.arange(args.critic_subset) if subset is None else torch.tensor(subset)
    return sac.update(agent, optimizers, batch, noise, subset, train_policy, args)


def watch_gradients(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor | None]]:
    """What `optimizer` steps with, one entry per step: the gradient of each of its parameters."""
    seen = []

    def look(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append([None if p.grad is None else p.grad.clone() for p in parameters])

    optimizer.register_step_pre_hook(look)
    return seen


def different_targets(module, agent, seed=5):
    """Targets that are not the networks, as in the middle of training."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for slow, _ in pairs_of(module, agent):
            for p in slow.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return agent


def next_q_of_targets(agent, next_obs, next_actions) -> torch.Tensor:
    """(E, B), network by network."""
    x = torch.cat([next_obs, next_actions], 1)
    return torch.stack([one_critic(agent.target_critics, e, x) for e in range(number_of(agent.target_critics))])


def number_of(critics: nn.Module) -> int:
    return len(critics.weights[0])


def critic_step_towards(agent, batch, target) -> torch.Tensor:
    """Minus the gradient of sum_i mean((Q_i - target)^2), by plain autograd."""
    x = torch.cat(batch[:2], 1)
    q = [one_critic(agent.critics, e, x) for e in range(number_of(agent.critics))]
    loss = sum(nn.functional.mse_loss(values, target.detach()) for values in q)
    return -flat(torch.autograd.grad(loss, list(agent.critics.parameters())))


def target_of_sac(agent, batch, noise, subset, alpha, gamma) -> torch.Tensor:
    """By torch.distributions, sample by sample."""
    _, _, rewards, next_obs, terminations, _ = batch
    mean, log_std = agent.actor.network(next_obs).chunk(2, 1)
    actions = (mean + log_std.exp() * noise).tanh() * agent.actor.scale + agent.actor.shift
    logprobs = squashed(mean, log_std, agent.actor.scale, agent.actor.shift).log_prob(actions)
    q = next_q_of_targets(agent, next_obs, actions)
    target = []
    for b, reward in enumerate(rewards):
        smallest = min(q[e, b] for e in subset)
        target.append(reward if terminations[b] else reward + gamma * (smallest - alpha * logprobs[b]))
    return torch.stack(target)


@pytest.mark.parametrize(("alpha", "gamma", "autotune"), [(1.0, 0.99, True), (0.2, 0.9, False), (0.5, 0.0, True)])
@pytest.mark.parametrize(("number", "subset"), [(2, [0, 1]), (2, [1]), (5, [3, 1]), (10, [9, 0]), (3, [2, 0, 1])])
def test_critics_of_sac_step_towards_the_soft_target(alpha, gamma, autotune, number, subset):
    """And REDQ's (recipe F16): the target is the minimum of the drawn critics, every critic learns it."""
    flags = {"num_critics": number, "critic_subset": len(subset), "gamma": gamma, "autotune": autotune}
    agent = different_targets(sac, make_agent(sac, alpha=alpha, spread=3.0, **flags))
    batch, noise = make_batch(), normal(2, BATCH, ACTION_DIM, seed=9)
    target = target_of_sac(agent, batch, noise[0], subset, alpha, gamma)
    expected, before = critic_step_towards(agent, batch, target), flat(agent.critics)
    q = agent.critics(*batch[:2]).detach()
    stats = run_update(sac, agent, plain(sac, agent), batch, noise=noise, subset=subset, **flags)
    close(flat(agent.critics) - before, expected, 1e-6)
    assert expected.abs().max() > 0.1
    close(stats["losses/qf_loss"], (q - target).square().sum() / BATCH, 1e-6)
    close(stats["losses/qf_values"], q.mean(), 1e-12)
    close(stats["losses/qf_grad_norm"], expected.norm(), 1e-6)
    close(stats["losses/alpha"], alpha, 1e-6)


SWITCHES = list(itertools.product([True, False], repeat=2))


def target_of_td3(agent, batch, noise, double, smoothing, gamma=0.99, std=0.2, clip=0.5) -> torch.Tensor:
    """Sample by sample and dimension by dimension, in Python numbers."""
    _, _, rewards, next_obs, terminations, _ = batch
    actions = agent.target_actor.network(next_obs).tanh() * agent.actor.scale + agent.actor.shift
    for b, d in np.ndindex(*actions.shape if smoothing else (0, 0)):
        scale, shift = agent.actor.scale[d].item(), agent.actor.shift[d].item()
        eps = min(max(std * noise[b, d].item(), -clip), clip) * scale
        actions = actions.detach()
        actions[b, d] = min(max(actions[b, d].item() + eps, shift - scale), shift + scale)
    q = next_q_of_targets(agent, next_obs, actions)
    next_q = [min(q[0, b], q[1, b]) if double else q[0, b] for b in range(len(rewards))]
    return torch.stack([r if end else r + gamma * x for r, end, x in zip(rewards, terminations, next_q, strict=True)])


@pytest.mark.parametrize(("double", "smoothing"), SWITCHES)
@pytest.mark.parametrize("flags", [{}, {"gamma": 0.9, "policy_noise": 0.5, "noise_clip": 0.3}])
def test_critics_of_td3_step_towards_the_target_of_its_switches(double, smoothing, flags):
    """Recipes F2, F3, F5; both off it is DDPG's target: the first target critic at the target policy's action."""
    agent = different_targets(td3, make_agent(td3, spread=8.0))
    batch, noise = make_batch(), 2 * normal(BATCH, ACTION_DIM, seed=9)
    numbers = {"gamma": flags.get("gamma", 0.99), "std": flags.get("policy_noise", 0.2)}
    numbers["clip"] = flags.get("noise_clip", 0.5)
    targets = {x: target_of_td3(agent, batch, noise, *x, **numbers) for x in SWITCHES}
    target, before = targets[double, smoothing], flat(agent.critics)
    assert all((target - other).abs().max() > 1e-3 for x, other in targets.items() if x != (double, smoothing))
    expected, q = critic_step_towards(agent, batch, target), agent.critics(*batch[:2]).detach()
    switches = {"clipped_double_q": double, "target_smoothing": smoothing}
    stats = run_update(td3, agent, plain(td3, agent), batch, noise=noise, **switches, **flags)
    close(flat(agent.critics) - before, expected, 1e-6)
    close(stats["losses/qf_loss"], (q - target).square().sum() / BATCH, 1e-6)
    close(stats["losses/qf_values"], q.mean(), 1e-12)
    close(stats["losses/qf_grad_norm"], expected.norm(), 1e-6)


def actions_seen_by(critics: nn.Module) -> list[torch.Tensor]:
    """Fills with the actions of every call."""
    seen = []
    critics.register_forward_hook(lambda _, inputs, __: seen.append(inputs[1].detach()))
    return seen


@pytest.mark.parametrize("scale", [[0.4] * 17, [1.0] * 17, [2.0] * 17])
def test_smoothing_noise_is_each_samples_own_clipped_scaled_and_kept_in_range(scale):
    """Cases 94 and 95, Humanoid's range for scale .4: std .08, at most +-.2, and never outside of +-.4."""
    agent, size = make_agent(td3, scale, [0.0] * 17), 1000
    obs, flags = torch.ones(size, OBS_DIM, dtype=torch.float64), torch.zeros(size, dtype=torch.bool)
    batch = [obs, torch.zeros(size, 17, dtype=torch.float64), f64([0.0] * size), obs, flags, flags]
    half, last = scale[0], agent.target_actor.network[-1]
    for u in (0.0, 0.7, -9.0):
        with torch.no_grad():
            last.weight.zero_()
            last.bias.fill_(u)
        seen = actions_seen_by(agent.target_critics)
        run_update(td3, agent, plain(td3, agent, critic=0.0), batch, train_policy=False, noise=normal(size, 17))
        actions, centre = seen[0] / half, math.tanh(u)
        assert (actions[0] != actions[1]).any()  # equal states, different actions
        assert actions.min() >= max(-1, centre - 0.5) - 1e-6 and actions.max() <= min(1, centre + 0.5) + 1e-6
        if u == 0:
            close((actions.std(0) * half).mean(), 0.2 * half * 0.99, 0.003 * half)
            assert actions.abs().max() > 0.49  # the clip does bind, at .5 and not at .5 * std
        else:
            assert (actions == math.copysign(1, u)).any()


@both
def test_a_time_limit_is_no_death(module):
    """Case 14: the truncation flags have no say; terminations have, also where both are set."""
    steps = []
    batch = make_batch()
    for terminations, truncations in ((batch[4], batch[5]), (batch[4], ~batch[5]), (batch[5], batch[4])):
        agent = different_targets(module, make_agent(module))
        run_update(module, agent, plain(module, agent), [*batch[:4], terminations, truncations])
        steps.append(flat(agent.critics))
    assert torch.equal(steps[0], steps[1]) and not torch.equal(steps[0], steps[2])


@both
def test_what_follows_a_termination_has_no_say_even_if_it_is_nan(module):
    results = []
    for leak in (0.0, 1e6, math.nan):
        agent, batch = make_agent(module), make_batch()
        batch[3] = torch.where(batch[4][:, None], leak, batch[3])
        stats = run_update(module, agent, plain(module, agent), batch)
        assert stats["skipped"] == 0
        results.append(flat(agent.critics))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@both
@pytest.mark.parametrize("tau", [0.005, 0.3, 1.0])
def test_targets_follow_the_networks_by_tau(module, tau):
    """target + tau * (network - target), with the networks as they are after the step."""
    agent = different_targets(module, make_agent(module))
    before = [flat(slow) for slow, _ in pairs_of(module, agent)]
    run_update(module, agent, plain(module, agent), make_batch(), tau=tau)
    for old, (slow, fast) in zip(before, pairs_of(module, agent), strict=True):
        close(flat(slow), old + tau * (flat(fast) - old), 1e-12)
        assert (flat(slow) - old).norm() > 1e-3
        assert not any(p.requires_grad or p.grad is not None for p in slow.parameters())


def test_what_an_update_without_the_policy_moves():
    """Recipe F4: an update without the policy leaves policy, temperature and td3's targets alone."""
    for module, moved in ((sac, True), (td3, False)):
        agent = different_targets(module, make_agent(module))
        optimizers = adams(module, agent)
        before, slow = flat(agent.actor), [flat(slow) for slow, _ in pairs_of(module, agent)]
        stats = run_update(module, agent, optimizers, make_batch(), train_policy=False)
        assert torch.equal(flat(agent.actor), before) and not optimizers["policy"].state
        assert [not torch.equal(old, flat(x)) for old, (x, _) in zip(slow, pairs_of(module, agent), strict=True)] == (
            [True] if moved else [False, False]
        )
        assert set(stats) >= {"losses/qf_loss", "skipped"} and not any("actor" in name for name in stats)
        assert all(p.grad is None for p in agent.actor.parameters())  # the target is a constant
        if module is sac:
            assert agent.log_alpha == 0 and "losses/alpha_loss" not in stats


class Quadratic(nn.Module):
    """Critics of known slope: Q_i = offset_i - 0.5 * steepness_i * |a - centre_i|^2, whatever the observation."""

    def __init__(self, offset, steepness, centre):
        super().__init__()
        numbers = zip(("offset", "steepness", "centre"), (offset, steepness, centre), strict=True)
        for name, value in numbers:
            setattr(self, name, nn.Parameter(f64(value)))

    def forward(self, obs, actions, number=None):
        distances = (actions - self.centre[:, None]).square().sum(-1)
        return (self.offset[:, None] - 0.5 * self.steepness[:, None] * distances)[:number]


def quadratic_agent(module, offset, steepness, centre, **flags):
    """The script's policy before known critics, and optimisers that let only policy and temperature move."""
    agent = make_agent(module, spread=4.0, **flags)
    agent.critics = Quadratic(offset, steepness, centre)
    agent.target_critics = copy.deepcopy(agent.critics).requires_grad_(False)
    return agent, plain(module, agent, critic=0.0)


def last_layer_step(agent, obs, output_gradients) -> torch.Tensor:
    """Minus the gradient of weights and bias of the policy's last layer, from that of its outputs (B, n), by hand."""
    hidden = agent.actor.network[:-1](obs)
    return -flat([output_gradients.T @ hidden, output_gradients.sum(0)])


def test_policy_of_td3_climbs_the_slope_of_the_first_critic():
    """Recipe F1: dQ_1/da * da/dtheta by hand; the second critic, smaller or not, has no say."""
    agent, optimizers = quadratic_agent(td3, [0.0, -50.0], [2.0, 7.0], [[0.5, -0.2], [5.0, 5.0]])
    batch, last = make_batch(), agent.actor.network[-1]
    u = agent.actor.network(batch[0])
    actions = u.tanh() * f64(SCALE) + f64(SHIFT)
    slope = -2 * (actions - f64([0.5, -0.2]))
    expected = last_layer_step(agent, batch[0], -slope * f64(SCALE) * (1 - u.tanh().square()) / BATCH)
    before = flat(last)
    stats = run_update(td3, agent, optimizers, batch)
    close(flat(last) - before, expected, 1e-6)
    assert expected.abs().max() > 0.05
    close(stats["losses/actor_loss"], (actions - f64([0.5, -0.2])).square().sum(1).mean(), 1e-6)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
@pytest.mark.parametrize(("number", "subset"), [(2, 2), (3, 3), (3, 2), (10, 2), (1, 1)])
def test_policy_of_sac_climbs_the_slope_of_its_critics(alpha, number, subset):
    """Recipes F8, F15, F16: d/dmean and d/dlog_std by hand; the smallest critic of all, or REDQ's mean of all."""
    centre = f64(SHIFT) + normal(number, ACTION_DIM, seed=3)
    offset, steepness = [0.3 * e for e in range(number)], [1 + 0.1 * e for e in range(number)]
    flags = {"num_critics": number, "critic_subset": subset, "alpha": alpha}
    agent, optimizers = quadratic_agent(sac, offset, steepness, centre.tolist(), **flags)
    batch, noise, last = make_batch(), normal(2, BATCH, ACTION_DIM, seed=9), agent.actor.network[-1]
    mean, log_std = agent.actor.network(batch[0]).chunk(2, 1)
    u = mean + log_std.exp() * noise[1]
    actions, tanh = u.tanh() * f64(SCALE) + f64(SHIFT), u.tanh()
    offsets = actions - centre[:, None]
    q = f64(offset)[:, None] - 0.5 * f64(steepness)[:, None] * offsets.square().sum(-1)
    slopes = -f64(steepness)[:, None, None] * offsets
    if subset == number:
        chosen = q.argmin(0)
        assert number == 1 or len(chosen.unique()) > 1
        slope, value = slopes[chosen, torch.arange(BATCH)], q.amin(0)
    else:
        slope, value = slopes.mean(0), q.mean(0)
    per_u = (2 * alpha * tanh - slope * f64(SCALE) * (1 - tanh.square())) / BATCH
    by_outputs = torch.cat([per_u, per_u * log_std.exp() * noise[1] - alpha / BATCH], 1)
    expected, before = last_layer_step(agent, batch[0], by_outputs), flat(last)
    stats = run_update(sac, agent, optimizers, batch, noise=noise, **flags)
    close(flat(last) - before, expected, 1e-6)
    logprobs = squashed(mean, log_std, f64(SCALE), f64(SHIFT)).log_prob(actions)
    close(stats["losses/actor_loss"], (alpha * logprobs - value).mean(), 1e-6)
    close(stats["losses/entropy"], -logprobs.mean(), 1e-6)
    close(stats["losses/alpha_loss"], -alpha * (logprobs.mean() - ACTION_DIM), 1e-6)
    assert expected.abs().max() > 0.05


@both
def test_policy_follows_the_critics_as_they_are_after_their_step(module):
    """As in the papers' algorithms and in SB3."""
    agent, batch = make_agent(module), make_batch()
    stats = run_update(module, agent, plain(module, agent, critic=0.5, policy=0.0), batch)
    if module is td3:
        expected = -agent.critics(batch[0], agent.actor(batch[0]))[0].mean()
    else:
        actions, logprobs = agent.actor(batch[0], normal(2, BATCH, ACTION_DIM, seed=9)[1])
        expected = (logprobs - agent.critics(batch[0], actions).amin(0)).mean()
    close(stats["losses/actor_loss"], expected, 1e-12)


@both
def test_actor_loss_leaves_no_gradient_in_the_critics(module):
    """Case 101: the critics' gradients are those of their own loss, policy trained or not."""
    gradients = []
    for train_policy in (True, False):
        optimizers = adams(module, agent := make_agent(module))
        steps = watch_gradients(optimizers["critic"])
        run_update(module, agent, optimizers, make_batch(), train_policy=train_policy)
        gradients.append(flat(steps[0]))
        assert all(p.grad is None for p in agent.parameters())  # nor for the critics' next step
    assert torch.equal(*gradients) and gradients[0].any()


def test_alpha_is_a_constant_in_the_policys_loss():
    """With autotune off nothing but that loss could leave a gradient."""
    agent = make_agent(sac, alpha=0.3)
    optimizers = adams(sac, agent)
    steps = watch_gradients(optimizers["policy"])
    stats = run_update(sac, agent, optimizers, make_batch(), autotune=False)
    assert steps[0][-1] is None and agent.log_alpha not in optimizers["policy"].state
    close(agent.log_alpha, math.log(0.3), 1e-6)
    assert "losses/alpha_loss" not in stats


@pytest.mark.parametrize("alpha", [1.0, 0.1])
@pytest.mark.parametrize("offset", [1.0, -1.0])
def test_temperature_rises_below_its_target_entropy_and_falls_above(alpha, offset):
    """Recipe F11, through one step of Adam and one of plain descent; this update's losses still have the old one."""
    batch = make_batch()
    entropy = run_update(sac, agent := make_agent(sac), adams(sac, agent), batch)["losses/entropy"].item()
    for make, step in ((adams, 3e-4 * offset), (plain, alpha * offset)):
        agent = make_agent(sac, alpha=alpha, target_entropy=entropy + offset)
        optimizers = make(sac, agent)
        steps = watch_gradients(optimizers["policy"])
        stats = run_update(sac, agent, optimizers, batch, target_entropy=123.0)
        close(agent.log_alpha, math.log(alpha) + step, 1e-6)
        close(stats["losses/alpha"], alpha, 1e-6)
        close(stats["losses/entropy"], entropy, 1e-6)
        assert steps[0][-1] * offset < 0


@both
@pytest.mark.parametrize(
    ("utd_ratio", "policy_frequency", "period"),
    [(1.0, None, 1), (20.0, None, 20), (0.25, None, 1), (20.0, 1, 1), (1.0, 2, 2), (2.0, 7, 7)],
)
def test_policy_learns_once_per_step_unless_told_otherwise(module, utd_ratio, policy_frequency, period):
    args = module.Args(utd_ratio=utd_ratio, policy_frequency=policy_frequency)
    assert args.critics_per_policy_update == period
    assert sac.Args().critics_per_policy_update == 1 and td3.Args().critics_per_policy_update == 2


@both
@pytest.mark.parametrize("limit", [1e-3, 5e-3])
def test_gradients_of_critics_and_policy_are_clipped_apart(module, limit):
    """Each to the limit, reported as they were; the temperature's is one number and stays as it is."""
    norms = []
    for max_grad_norm in (math.inf, limit):
        agent, batch = make_agent(module), make_batch()
        before = [flat(part) for part in learners(module, agent).values()]
        # The policy's critics must not depend on the limit: they hardly move.
        optimizers = plain(module, agent, critic=1e-9)
        steps = watch_gradients(optimizers["critic"])
        stats = run_update(module, agent, optimizers, batch, max_grad_norm=max_grad_norm)
        norms.append([stats[f"losses/{x}_grad_norm"].item() for x in ("qf", "actor")])
        moved = [(flat(part) - old).norm() for part, old in zip(learners(module, agent).values(), before, strict=True)]
        close(flat(steps[0]).norm(), min(norms[-1][0], max_grad_norm), 1e-6)
        close(moved[1], min(norms[-1][1], max_grad_norm), 1e-6)
        if module is sac:
            assert moved[2] > 0.1
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert min(norms[0]) > 2 * limit


@both
@pytest.mark.parametrize(
    ("where", "bad"),
    [*itertools.product(["observations", "actions", "rewards"], [math.nan, math.inf, -math.inf]), ("rewards", 1e30)],
)
def test_an_update_with_a_number_that_is_not_finite_is_skipped_and_reported(module, where, bad):
    """A reward or action spoils the critics' step alone, an observation the policy's, too. Then all goes on.

    Of the finite reward the square overflows.
    """
    agent = make_agent(module, dtype=torch.float32)
    optimizers, clean = adams(module, agent), make_batch(dtype=torch.float32)
    run_update(module, agent, optimizers, clean)
    batch = [x.clone() for x in clean]
    batch[COLUMNS.index(where)].view(-1)[5] = bad
    parts = [agent.critics, optimizers["critic"]]
    parts += [agent.actor, *optimizers.values()] if where == "observations" else []
    before = state_of(*parts)
    stats = run_update(module, agent, optimizers, batch)
    assert stats["skipped"] == 1
    assert same(state_of(*parts), before)
    assert not stats["losses/qf_loss"].isfinite() or not stats["losses/qf_grad_norm"].isfinite()
    assert all(x.isfinite().all() for x in state_of(agent, *optimizers.values()))
    stats = run_update(module, agent, optimizers, clean)
    assert stats["skipped"] == 0 and all(x.isfinite() for x in stats.values())


@both
def test_a_bad_step_of_the_policy_alone_is_reported_too(module):
    """The critics' step was good: it stands, and the policy's does not."""
    agent, batch = make_agent(module), make_batch()
    optimizers = adams(module, agent)
    run_update(module, agent, optimizers, batch)
    agent.actor.network[0].weight.register_hook(lambda gradient: gradient * math.nan)
    policy, critics = state_of(agent.actor, optimizers["policy"]), flat(agent.critics)
    stats = run_update(module, agent, optimizers, batch)
    assert stats["skipped"] == 1 and same(state_of(agent.actor, optimizers["policy"]), policy)
    assert not torch.equal(flat(agent.critics), critics)


def test_a_bad_step_of_the_temperature_alone_is_reported_too(monkeypatch):
    monkeypatch.setattr(sac, "temperature_loss", lambda log_alpha, *_: log_alpha * math.nan)
    agent = make_agent(sac)
    optimizers = adams(sac, agent)
    stats = run_update(sac, agent, optimizers, make_batch())
    assert stats["skipped"] == 1 and agent.log_alpha == 0


@both
def test_what_update_returns_is_detached_scalars_and_leaves_the_batch_alone(module):
    agent, batch = make_agent(module), make_batch()
    before = [x.clone() for x in batch]
    stats = run_update(module, agent, adams(module, agent), batch)
    for name, x in stats.items():
        assert isinstance(x, torch.Tensor) and x.shape == () and not x.requires_grad, name
    assert all(torch.equal(a, b) for a, b in zip(batch, before, strict=True))
    assert list(stats)[-1] == "skipped"


@both
def test_policy_finds_the_best_action_and_the_critics_fit_the_rewards(module):
    """Every sign at once, in a few steps: of known critics, of rewards that end their episodes."""
    own = {"autotune": False} if module is sac else {}
    best, batch = f64([2.0, -0.5]), make_batch(64)
    agent, optimizers = quadratic_agent(module, [0.0] * 2, [5.0] * 2, [best.tolist()] * 2)
    optimizers = adams(module, agent, 1e-2) | {"critic": optimizers["critic"]}
    if module is sac:
        agent.log_alpha.data.fill_(math.log(0.01))
    for k in range(150):
        noise = normal(*([2] if module is sac else []), 64, ACTION_DIM, seed=k)
        run_update(module, agent, optimizers, batch, noise=noise, **own)
    close(act(module, agent, batch[0]), best.expand(64, 2), 0.15)
    agent, batch[4] = make_agent(module, hidden_size=32), torch.ones(64, dtype=torch.bool)
    optimizers = adams(module, agent, 1e-2)
    losses = [run_update(module, agent, optimizers, batch, False)["losses/qf_loss"] for _ in range(100)]
    assert losses[-1] < 0.2 * losses[0]


# ---------------------------------------------------------------------------------------------------------------------
# A real update of Stable-Baselines3
# ---------------------------------------------------------------------------------------------------------------------
class _Spaces(gym.Env):
    """SB3 needs an environment to know its spaces; nobody steps it."""

    observation_space = gym.spaces.Box(-10, 10, (OBS_DIM,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (ACTION_DIM,), np.float32)


def parameters_of(network: nn.Module) -> list[torch.Tensor]:
    """Of ours in the order and shapes of theirs."""
    if not hasattr(network, "weights"):
        return list(network.parameters())
    return [p for e in range(number_of(network)) for p in linear_parameters(network, e)]


def copy_into(theirs: nn.Module, ours: nn.Module) -> None:
    with torch.no_grad():
        for p, q in zip(theirs.parameters(), parameters_of(ours), strict=True):
            p.copy_(q)


def pairs_with_theirs(model, agent) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """(theirs, ours) of each network, both with their tensors in the same order and shapes."""
    pairs = [(model.critic, agent.critics), (model.critic_target, agent.target_critics)]
    if isinstance(model, TD3):
        pairs += [(model.actor, agent.actor), (model.actor_target, agent.target_actor)]
        return [(list(theirs.parameters()), parameters_of(ours)) for theirs, ours in pairs]
    *body, weight, bias = agent.actor.network.parameters()  # one layer for what are two of theirs
    heads = [part for pair in zip(weight.chunk(2), bias.chunk(2), strict=True) for part in pair]
    actor = [*model.actor.latent_pi.parameters(), *model.actor.mu.parameters(), *model.actor.log_std.parameters()]
    return [(actor, [*body, *heads]), *((list(x.parameters()), parameters_of(y)) for x, y in pairs)]


def copy_all_into(model, agent) -> None:
    with torch.no_grad():
        for theirs, ours in pairs_with_theirs(model, agent):
            for p, q in zip(theirs, ours, strict=True):
                p.copy_(q)


def equal_in_all(model, agent, tolerance: float) -> None:
    for theirs, ours in pairs_with_theirs(model, agent):
        close(flat(ours), flat(theirs), tolerance)


def sb3_model(kind, batches: list[list[torch.Tensor]], **options):
    """Theirs, with networks of our size, that will learn from these batches."""
    kwargs = {"net_arch": [16, 16], "activation_fn": nn.ReLU, "n_critics": 2}
    model = kind("MlpPolicy", _Spaces(), policy_kwargs=kwargs, buffer_size=8, device="cpu", **options)
    model.set_logger(Logger(folder=None, output_formats=[]))
    samples = [
        ReplayBufferSamples(obs, actions, next_obs, ends.float()[:, None], rewards[:, None])
        for obs, actions, rewards, next_obs, ends, _ in batches
    ]
    model.replay_buffer = types.SimpleNamespace(sample=lambda *_, **__: samples.pop(0))
    return model


def sb3_batches(number: int) -> list[list[torch.Tensor]]:
    batches = [make_batch(32, seed=10 * k, dtype=torch.float32) for k in range(number)]
    return [[obs, actions.tanh(), *rest] for obs, actions, *rest in batches]


def set_adam(optimizer: torch.optim.Adam, eps: float) -> None:
    for group in optimizer.param_groups:
        group["eps"] = eps


# Several updates with a large epsilon only, which is nearly plain descent: a tiny one makes steps of rounding errors.
@pytest.mark.parametrize(("lr", "eps", "updates"), [(3e-4, 1e-8, 1), (0.5, 1.0, 1), (0.5, 1.0, 3)])
@pytest.mark.parametrize(("alpha", "autotune"), [(1.0, True), (0.2, True), (0.2, False)])
def test_update_of_sac_equals_stable_baselines3(monkeypatch, lr, eps, updates, alpha, autotune):
    """SAC.train() on the same weights, batches and noise gives the same losses, weights, temperature and targets.

    Theirs halves the critics' loss and leaves alpha out of the temperature's gradient: with another epsilon Adam makes
    up for that. The 1e-6 in their log-prob is taken out; the action range is [-1, 1], where their density is right.
    """
    batches = sb3_batches(updates)
    agent = make_agent(sac, [1.0] * 2, [0.0] * 2, dtype=torch.float32, alpha=alpha, spread=3.0)
    different_targets(sac, agent, 6)
    temperature = f"auto_{alpha}" if autotune else alpha
    model = sb3_model(SAC, batches, learning_rate=lr, tau=0.3, gamma=0.95, ent_coef=temperature)
    copy_all_into(model, agent)
    model.actor.action_dist.epsilon = 0.0
    noise = normal(updates, 2, 32, ACTION_DIM, seed=4).float()
    queue = [x for pair in noise for x in (pair[1], pair[0])]  # they sample the policy's actions first
    monkeypatch.setattr(torch.distributions.normal, "_standard_normal", lambda *_, **__: queue.pop(0))
    set_adam(model.actor.optimizer, eps), set_adam(model.critic.optimizer, eps / 2)
    if autotune:
        set_adam(model.ent_coef_optimizer, eps / alpha)
    start, losses = flat(agent), []
    optimizers = adams(sac, agent, lr, eps)
    for k in range(updates):
        flags = {"tau": 0.3, "gamma": 0.95, "autotune": autotune}
        losses.append(run_update(sac, agent, optimizers, batches[k], noise=noise[k], **flags))
        if autotune and updates > 1:  # their temperature's Adam cannot follow a changing alpha
            losses[-1]["log_alpha"] = agent.log_alpha.detach().clone()
            with torch.no_grad():
                agent.log_alpha.fill_(math.log(alpha))
    if autotune and updates > 1:
        monkeypatch.setattr(model.ent_coef_optimizer, "step", lambda: None)
    model.train(updates, 32)

    assert (flat(agent) - start).abs().max() > 1e-4
    equal_in_all(model, agent, 1e-5)
    logged = model.logger.name_to_value
    mean = {name: torch.stack([x[name] for x in losses]).mean().item() for name in losses[0]}
    assert mean["losses/qf_loss"] == pytest.approx(2 * logged["train/critic_loss"], rel=1e-5)
    assert mean["losses/actor_loss"] == pytest.approx(logged["train/actor_loss"], rel=1e-5, abs=1e-5)
    assert mean["losses/alpha"] == pytest.approx(logged["train/ent_coef"], rel=1e-6)
    if autotune:
        assert agent.target_entropy == model.target_entropy
        if updates == 1:
            close(agent.log_alpha, model.log_ent_coef[0], 1e-6)
            # Their loss has log alpha where ours has alpha: the same direction.
            theirs = logged["train/ent_coef_loss"]
            gap = mean["losses/alpha_loss"] / alpha
            assert theirs == pytest.approx(gap * math.log(alpha), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("lr", "eps", "delay", "updates"),
    [(3e-4, 1e-8, 1, 1), (3e-4, 1e-8, 2, 2), *((0.5, 1.0, *x) for x in ((1, 1), (2, 1), (2, 2), (2, 4), (3, 3)))],
)
def test_updates_of_td3_equal_stable_baselines3(lr, eps, delay, updates):
    """TD3.train() on the same weights, batches and noise: losses, weights and all targets, with the policy's delay."""
    batches = sb3_batches(updates)
    agent = different_targets(td3, make_agent(td3, [1.0] * 2, [0.0] * 2, dtype=torch.float32, spread=3.0), 6)
    model = sb3_model(TD3, batches, learning_rate=lr, tau=0.3, gamma=0.95, policy_delay=delay)
    copy_all_into(model, agent)
    set_adam(model.actor.optimizer, eps), set_adam(model.critic.optimizer, eps)
    torch.manual_seed(3)
    noise = [torch.empty(32, ACTION_DIM).normal_(0, 0.2) / 0.2 for _ in range(updates)]
    torch.manual_seed(3)
    model.train(updates, 32)
    optimizers = adams(td3, agent, lr, eps)
    flags, start = {"tau": 0.3, "gamma": 0.95, "policy_frequency": delay}, flat(agent.critics)
    period = td3.Args(**flags).critics_per_policy_update
    losses = [
        run_update(td3, agent, optimizers, batches[k], (k + 1) % period == 0, noise=noise[k], **flags)
        for k in range(updates)
    ]
    assert (flat(agent.critics) - start).abs().max() > 1e-4
    equal_in_all(model, agent, 1e-5)
    logged = model.logger.name_to_value
    qf_losses = [x["losses/qf_loss"].item() for x in losses]
    assert np.mean(qf_losses) == pytest.approx(logged["train/critic_loss"], rel=1e-5)
    actor_losses = [x["losses/actor_loss"].item() for x in losses if "losses/actor_loss" in x]
    assert len(actor_losses) == updates // delay
    if actor_losses:
        assert np.mean(actor_losses) == pytest.approx(logged["train/actor_loss"], rel=1e-5, abs=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# A whole run of Stable-Baselines3
# ---------------------------------------------------------------------------------------------------------------------
gym.register("ShortHopper-v0", gym.spec("Hopper-v5").entry_point, max_episode_steps=15)  # it falls, or time is up


def drawn_as_ours(kind, args, monkeypatch) -> type:
    """Their algorithm, where each random number is the one that ours draws for the same end."""
    rng, noises = np.random.default_rng(args.seed), []  # noises: of the updates, standard normal

    class Algorithm(kind):
        def _setup_model(self):
            super()._setup_model()
            get = self.replay_buffer._get_samples
            self.replay_buffer.sample = lambda batch_size, env: get(self.drawn(batch_size), env)

        def drawn(self, batch_size: int) -> np.ndarray:
            shape = (batch_size, *self.action_space.shape)
            if kind is SAC:
                target, policy = torch.as_tensor(rng.standard_normal((2, *shape), np.float32))
                noises.extend([policy, target])  # they sample the policy's actions first
                rng.permutation(args.num_critics)
            else:
                noises.append(torch.as_tensor(rng.standard_normal(shape, np.float32)))
            return rng.integers(0, self.replay_buffer.size(), batch_size)

        def _sample_action(self, *_):
            obs, noise = self._last_obs, rng.standard_normal((1, *self.action_space.shape), np.float32)
            if self.num_timesteps < args.learning_starts:
                action = rng.uniform(-1, 1, noise.shape)
            elif kind is TD3:
                action = (self.predict(obs)[0] + args.exploration_noise * noise).clip(-1, 1)
            else:
                mean, log_std, _ = self.actor.get_action_dist_params(torch.as_tensor(obs, dtype=torch.float32))
                action = (mean + log_std.exp() * torch.as_tensor(noise)).tanh().detach().numpy()
            return action, action

    monkeypatch.setattr(torch.distributions.normal, "_standard_normal", lambda *_, **__: noises.pop(0))
    monkeypatch.setattr(torch.Tensor, "normal_", lambda x, mean, std: x.copy_(mean + std * noises.pop(0)))
    return Algorithm


@both
def test_a_run_equals_stable_baselines3(module, empty_folder, monkeypatch):
    """`main` and their `learn`, 200 random steps and 81 updates: the same transitions, the same networks at the end.

    Weights at the start and random numbers are shared, so this compares what lies between: exploration, what is stored
    where an episode terminates or is cut off, what learns when, and the updates. (SAC's temperature is fixed: theirs
    learns differently.)
    """
    agents = []

    def record(number, real, agent, *rest):
        agents.extend([copy.deepcopy(agent), agent] if number == 1 else [])
        return real(agent, *rest)

    wrap(monkeypatch, module, "update", record)
    own = {"autotune": False, "alpha": 0.2} if module is sac else {}
    flags = {"total_timesteps": 280, "learning_starts": 200, "batch_size": 64, "buffer_size": 1000, "seed": 5}
    args = module.Args(env_id="ShortHopper-v0", eval_every=0, checkpoint_replay=True, device="cpu", **flags, **own)
    module.main(args)
    start, agent = agents

    kind, own = (SAC, {"ent_coef": args.alpha}) if module is sac else (TD3, {})
    flags |= {"learning_starts": 199, "learning_rate": 3e-4, "policy_kwargs": {"net_arch": [args.hidden_size] * 2}}
    steps, env = flags.pop("total_timesteps"), gym.make(args.env_id)
    model = drawn_as_ours(kind, args, monkeypatch)("MlpPolicy", env, device="cpu", **flags, **own)
    copy_all_into(model, start)
    if module is sac:
        model.actor.action_dist.epsilon = 0.0
        set_adam(model.critic.optimizer, 0.5e-8)  # their loss is halved
    model.learn(steps)

    assert model._n_updates == steps - args.learning_starts + 1
    (path,) = Path("runs").rglob("replay_*.npz")
    ours, theirs = np.load(path), model.replay_buffer
    assert ours["terminations"].sum() > 2 and ours["truncations"].sum() > 2
    for name in ("observations", "next_observations", "actions", "rewards"):
        close(ours[name], getattr(theirs, name)[:steps, 0], 1e-3)
    assert np.array_equal(ours["terminations"], theirs.dones[:steps, 0] * (1 - theirs.timeouts[:steps, 0]))
    assert np.array_equal(ours["truncations"] & ~ours["terminations"], theirs.timeouts[:steps, 0])
    equal_in_all(model, agent, 1e-3)
    assert (flat(agent.actor) - flat(start.actor)).abs().max() > 0.005


# ---------------------------------------------------------------------------------------------------------------------
# What main hands to update, and how it explores
# ---------------------------------------------------------------------------------------------------------------------
RUN = {
    "env_id": "toy_envs:Line-v0", "total_timesteps": 96, "num_envs": 2, "learning_starts": 32, "batch_size": 8,
    "hidden_size": 8, "buffer_size": 1000, "eval_every": 0, "eval_episodes": 1, "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "own", "period"),
    [
        (sac, {"num_critics": 5, "critic_subset": 2, "policy_lr": 0.01, "q_lr": 0.02, "policy_frequency": 3}, 3),
        (td3, {"learning_rate": 0.01, "policy_frequency": 3}, 3),
        (td3, {"learning_rate": 0.01, "policy_frequency": 3, "delayed_policy": False}, 1),
    ],
)
def test_main_hands_over_fresh_noise_fresh_subsets_its_rates_and_the_delay(
    module, own, period, empty_folder, monkeypatch
):
    """Case 94 (a draw for each sample), REDQ (a new subset each time), case 14 (Line's episodes end by time limit)."""
    calls = []

    def record(_, real, agent, optimizers, batch, noise, *rest):
        calls.append((agent, optimizers, batch, noise, *rest))
        return real(agent, optimizers, batch, noise, *rest)

    wrap(monkeypatch, module, "update", record)
    module.main(module.Args(**RUN, **own))
    # As many updates as steps after the memory holds enough, the 32nd step's own included.
    assert len(calls) == 96 - 32 + 2
    noises = torch.stack([call[3] for call in calls])
    assert noises.shape[1:] == ((2, 8, 1) if module is sac else (8, 1))
    assert len(noises.unique()) == noises.numel()
    assert abs(noises.mean()) < 4 / math.sqrt(noises.numel()) and abs(noises.std() - 1) < 0.1
    assert [call[-2] for call in calls] == [(k + 1) % period == 0 for k in range(len(calls))]
    agent, optimizers, *_ = calls[0]
    groups = {k: optimizer.param_groups[0] for k, optimizer in optimizers.items()}
    if module is sac:
        groups["temperature"] = optimizers["policy"].param_groups[1]
    rates = {"critic": 0.02, "temperature": 0.02} if module is sac else {"critic": 0.01}
    assert {k: group["lr"] for k, group in groups.items()} == rates | {"policy": 0.01}
    assert sum(len(optimizer.param_groups) for optimizer in optimizers.values()) == len(groups)
    for k, parameters in learners(module, agent).items():
        assert [id(p) for p in groups[k]["params"]] == [id(p) for p in parameters] and groups[k]["fused"]
    truncations = torch.cat([call[2][5] for call in calls])
    assert truncations.any() and not torch.cat([call[2][4] for call in calls]).any()
    if module is sac:
        subsets = [tuple(call[4].tolist()) for call in calls]
        assert all(len(set(subset)) == 2 and set(subset) <= set(range(5)) for subset in subsets)
        assert {e for subset in subsets for e in subset} == set(range(5)) and len(set(subsets)) > 8


def explored(module, monkeypatch, **flags) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """(agent, observations (T, N, ..), actions) of a run, after its random steps; the policy hardly changes in it."""
    agents, steps = [], []
    rates = {"policy_lr": 1e-12} if module is sac else {"learning_rate": 1e-12}
    wrap(monkeypatch, module, "update", lambda _, real, *arguments: agents.append(arguments[0]) or real(*arguments))
    wrap(monkeypatch, module.ReplayMemory, "add", lambda _, real, *step: steps.append(step[1:3]) or real(*step))
    module.main(module.Args(**RUN | {"env_id": "toy_envs:LineScaled-v0"} | rates | flags))
    obs, actions = (torch.as_tensor(np.stack(x), dtype=torch.float32) for x in zip(*steps[16:], strict=True))
    assert obs.shape == (32, 2, 2) and actions.shape == (32, 2, 6)
    return agents[0], obs, actions


def test_sac_explores_with_samples_of_its_policy(empty_folder, monkeypatch):
    """Undone, tanh and Gaussian leave standard normal numbers, each step's and each environment's own."""
    agent, obs, actions = explored(sac, monkeypatch)
    mean, log_std = agent.actor.network(obs).detach().chunk(2, -1)
    noise = ((((actions - 15) / 5).clamp(-0.9999, 0.9999)).atanh() - mean) / log_std.exp()
    assert abs(noise.mean()) < 0.2 and abs(noise.std() - 1) < 0.15
    assert len(noise.flatten().round(decimals=4).unique()) > 370


def test_td3_explores_with_noise_in_half_action_ranges(empty_folder, monkeypatch):
    """Case 95: std .05 of a half range of 5 is .25; each step's, environment's and dimension's own."""
    agent, obs, actions = explored(td3, monkeypatch, exploration_noise=0.05)
    noise = (actions - agent.actor(obs).detach()) / 5
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 0.05) < 0.008
    assert len(noise.flatten().unique()) > 370


def test_td3_explores_with_a_walk_that_each_episode_starts_at_zero(empty_folder, monkeypatch):
    calls = []

    def record(_, real, state, noise, sigma):
        after = real(state, noise, sigma)
        calls.append((state.copy(), after.copy(), sigma))
        return after

    wrap(monkeypatch, td3, "ornstein_uhlenbeck", record)
    agent, obs, actions = explored(td3, monkeypatch, noise="ou", exploration_noise=0.05, exploration_noise_end=0.02)
    calls = calls[-32:]  # whether the walk runs in the random steps, too, does not matter: an episode ends with them
    for t, (state, after, sigma) in enumerate(calls):
        assert np.array_equal(state, calls[t - 1][1] if t % 16 else np.zeros((2, 6)))
        assert sigma == pytest.approx(0.05 - 0.03 * (32 + 2 * t) / 96)  # after the random steps
        close(actions[t], agent.actor(obs[t]) + 5 * torch.as_tensor(after), 1e-5)


def test_td3_clips_the_explored_action_to_its_range(empty_folder, monkeypatch):
    """Case 93: noise 10 leads to the bounds, not beyond, and so it is stored."""
    _, _, actions = explored(td3, monkeypatch, exploration_noise=10.0)
    assert actions.min() == 10 and actions.max() == 20
    assert ((actions == 10) | (actions == 20)).float().mean() > 0.8
