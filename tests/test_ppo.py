"""What holds for every PPO script: minibatches, the rule of --target-kl, schedules."""

import pytest
import torch
from harness import values, wrap
from script_cases import SCRIPTS

PPO = [script for script in SCRIPTS if script.name.startswith("ppo_")]
pytestmark = pytest.mark.parametrize("script", PPO, indirect=True, ids=str)


@pytest.mark.parametrize(("num_envs", "num_steps", "num_minibatches"), [(3, 7, 4), (1, 10, 3), (5, 5, 5)])
def test_every_sample_once_per_epoch_in_new_order(script, monkeypatch, num_envs, num_steps, num_minibatches):
    batches, size = [], num_envs * num_steps
    wrap(monkeypatch, script.module, "update", lambda number, real, *a: batches.append(a[2]) or real(*a))
    script.train(**script.varied, num_envs=num_envs, num_steps=num_steps, num_minibatches=num_minibatches,
                 total_timesteps=size, update_epochs=2)  # fmt: skip
    assert len(batches) == 2 * num_minibatches
    sizes = [len(batch[0]) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    advantages = [batch[-3] for batch in batches]  # as good as a name: no two are equal
    epochs = [torch.cat(advantages[:num_minibatches]), torch.cat(advantages[num_minibatches:])]
    assert [len(epoch) for epoch in epochs] == [size, size] and len(set(epochs[0].tolist())) == size
    assert torch.equal(*(epoch.sort().values for epoch in epochs)) and not torch.equal(*epochs)


@pytest.mark.parametrize(("kls", "epochs"), [([0.9, 0, 0, 0], 1), ([0, 0, 0, 0.7], 6)])
def test_target_kl_is_compared_with_the_mean_of_an_epoch(script, monkeypatch, kls, epochs):
    """0.2 against 0.225 and 0.175: not with the last minibatch, not with the largest, not with a factor of its own."""
    wrap(monkeypatch, script.module, "approx_kl", lambda number, real, x: x.new_tensor(kls[(number - 1) % 4]))
    metrics, _ = script.train(target_kl=0.2, update_epochs=6, num_minibatches=4, total_timesteps=64)
    assert metrics["charts/update_epochs"] == epochs


def test_target_kl_ends_the_epochs_after_one(script):
    assert script.train(target_kl=1e-9, learning_rate=0.1, update_epochs=6)[0]["charts/update_epochs"] == 1
    assert script.train(target_kl=1e9, update_epochs=6)[0]["charts/update_epochs"] == 6


def test_schedules_reach_neither_zero_nor_waste_an_update(script):
    _, run_dir = script.train(ent_coef=0.4, ent_coef_end=0.0)
    start = script.module.Args().learning_rate
    assert values(run_dir, "charts/learning_rate") == pytest.approx([start * part for part in (1, 0.75, 0.5, 0.25)])
    assert values(run_dir, "losses/ent_coef") == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert values(script.train(anneal_lr=False)[1], "charts/learning_rate") == pytest.approx([start] * 4)
