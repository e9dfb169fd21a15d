"""ppo_continuous.py as a whole: tests run `main`, or the script as a process, on environments with known answers."""

import csv
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import ppo_continuous as ppo
import pytest
import torch
from toy_envs import Line

TINY = {
    "env_id": "toy_envs:Line-v0",
    "total_timesteps": 256,
    "num_steps": 32,
    "num_envs": 2,
    "num_minibatches": 4,
    "update_epochs": 2,
    "eval_every": 0,
    "eval_episodes": 1,
    "log_every": 64,
    "checkpoint_every": 0,
    "device": "cpu",
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """Every test runs in an empty folder, with the toy environments' counters at zero."""
    monkeypatch.chdir(tmp_path)
    Line.signal_at, Line.steps_made, Line.seen = None, 0, []


def args(**changes) -> ppo.Args:
    return ppo.Args(**{**TINY, **changes})


def run_dirs() -> list[Path]:
    return sorted(Path("runs").glob("*"), key=lambda path: path.stat().st_mtime_ns)


def train(**changes) -> tuple[dict, Path]:
    """Metrics that main returned and the run's folder."""
    return ppo.main(args(**changes)), run_dirs()[-1]


def rows(run_dir: Path, timing: bool = False) -> list[list[str]]:
    """metrics.csv, without what depends on the clock."""
    with (run_dir / "metrics.csv").open() as file:
        table = list(csv.reader(file))
    assert table[0] == ["step", "metric", "value"]
    return [row for row in table[1:] if timing or not (row[1].startswith("time/") or row[1] == "charts/SPS")]


def values(run_dir: Path, metric: str) -> list[float]:
    return [float(row[2]) for row in rows(run_dir, timing=True) if row[1] == metric]


def refused(capsys, code: int = 2, **changes) -> str:
    """The one line on stderr with which main refuses these flags."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as error:
        ppo.main(args(**changes))
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.value.code == code and line.startswith("error: "), (error.value.code, line)
    if code == 2:
        assert sorted(Path().rglob("*")) == before, "a refused run has written something"
        assert line.count(". ") >= 1, f"no advice in: {line}"
    return line


# ---- reproducible, evaluation apart, resume ------------------------------------------------------------------------


def test_same_seed_twice_is_equal_to_the_bit_and_another_seed_is_not():
    first, second, third = (train(env_id="Pendulum-v1", seed=seed)[1] for seed in (1, 1, 2))
    assert rows(first) == rows(second)
    assert rows(first) != rows(third)
    checkpoints = [torch.load(path / "checkpoint.pt")["parts"]["agent"] for path in (first, second)]
    assert all(torch.equal(checkpoints[0][name], checkpoints[1][name]) for name in checkpoints[0])


def test_evaluation_changes_no_training_number():
    without, often = train(env_id="Pendulum-v1")[1], train(env_id="Pendulum-v1", eval_every=64, eval_episodes=3)[1]
    assert len(values(often, "eval/episodic_return")) > len(values(without, "eval/episodic_return")) == 1
    assert [r for r in rows(often) if "eval/" not in r[1]] == [r for r in rows(without) if "eval/" not in r[1]]


RESUME_FLAGS = [
    {"ent_coef": 0.01, "ent_coef_end": 0.0, "log_every": 128},
    {"kl_penalty": True, "target_kl": 1e-4, "log_every": 64},
]


@pytest.mark.parametrize("flags", RESUME_FLAGS)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_resumed_run_equals_the_uninterrupted_one(flags, signum, capsys):
    """On an environment whose episodes end with the rollout nothing is lost: metrics.csv is equal to the bit.

    Learning rate, entropy coefficient, both normalisers and the KL coefficient are in mid-course at the stop.
    """
    whole = train(seed=3, **flags)[1]
    Line.steps_made, Line.signal_at = 0, (100, signum)
    with pytest.raises(SystemExit) as stop:
        ppo.main(args(seed=3, **flags))
    Line.signal_at = None
    assert stop.value.code == 128 + signum
    stopped = run_dirs()[-1]
    assert f"--resume {stopped.as_posix()}" in capsys.readouterr().out
    assert 0 < len(rows(stopped)) < len(rows(whole)) and not (stopped / "summary.json").exists()
    ppo.main(ppo.Args(resume=str(stopped)))
    assert rows(stopped) == rows(whole)
    assert len({row[2] for row in rows(whole) if row[1] == "charts/learning_rate"}) > 1
    if "kl_penalty" in flags:
        assert len({row[2] for row in rows(whole) if row[1] == "losses/kl_coef"}) > 1
    summary = json.loads((stopped / "summary.json").read_text())
    assert summary["final_evaluation"] == json.loads((whole / "summary.json").read_text())["final_evaluation"]


def test_resume_elsewhere_goes_on_and_two_resumes_are_equal():
    """Pendulum's episodes do not end with the rollout: they start anew, everything else goes on."""
    ppo.main(args(env_id="Pendulum-v1", checkpoint_every=64))
    run_dir = run_dirs()[0]
    copy = Path("runs/copy")
    shutil.copytree(run_dir, copy)
    for folder in (run_dir, copy):
        ppo.main(ppo.Args(resume=str(folder), total_timesteps=512))
    assert rows(run_dir) == rows(copy)
    steps = [int(row[0]) for row in rows(run_dir)]
    assert steps == sorted(steps) and steps[-1] == 512 and steps.count(320) > 0
    assert torch.load(run_dir / "checkpoint.pt")["flags"]["total_timesteps"] == 512
    # The schedule is that of the new budget: iteration 5 of 8.
    assert values(run_dir, "charts/learning_rate")[4] == pytest.approx(3e-4 * (1 - 4 / 8))


def test_resume_cuts_what_was_logged_after_the_checkpoint():
    _, run_dir = train()
    before = rows(run_dir)
    with (run_dir / "metrics.csv").open("a") as file:
        file.write("512,losses/value_loss,1.0\n300,charts/episodic_return,5.0\n3")  # the last one torn by a kill
    ppo.main(ppo.Args(resume=str(run_dir / "checkpoint.pt"), total_timesteps=320))
    after = rows(run_dir)
    assert after[: len(before)] == before and not any(row[0] in ("512", "300", "3") for row in after)


def test_resume_of_a_finished_run_only_evaluates():
    metrics, run_dir = train()
    logged = rows(run_dir)
    again = ppo.main(ppo.Args(resume=str(run_dir)))
    assert again["eval/episodic_return"] == metrics["eval/episodic_return"]
    assert rows(run_dir) == [*logged, *logged[-2:]]  # nothing trained; the final evaluation once more


def test_resume_takes_its_flags_from_the_checkpoint(capsys):
    _, run_dir = train(learning_rate=1e-3, exp_name="x")
    resumed = ppo.main(ppo.Args(resume=str(run_dir), total_timesteps=320, log_every=32))
    assert resumed["charts/learning_rate"] == pytest.approx(1e-3 / 5)
    assert json.loads((run_dir / "config.json").read_text())["flags"]["log_every"] == 32
    line = refused(
        capsys, **{**{k: getattr(ppo.Args(), k) for k in TINY}, "resume": str(run_dir), "learning_rate": 2e-3}
    )
    assert "0.002" in line and "0.001" in line and "--learning-rate" in line


def test_evaluate_prints_the_returns_of_the_run_and_writes_nothing(capsys):
    """Observation statistics travel with the policy: another process gets the returns that training ended with."""
    _, run_dir = train(env_id="Pendulum-v1", eval_episodes=3)
    expected = json.loads((run_dir / "summary.json").read_text())["final_evaluation"]
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    command = [sys.executable, ppo.__file__, "--evaluate", str(run_dir)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert " ".join(f"{value:.2f}" for value in expected) in out and f"mean {np.mean(expected):.2f}" in out
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    state = torch.load(run_dir / "checkpoint.pt")
    state["parts"]["obs_rms"] |= {
        "mean": torch.zeros(3, dtype=torch.float64),
        "var": torch.ones(3, dtype=torch.float64),
    }
    torch.save(state, "fresh_statistics.pt")
    assert ppo.main(ppo.Args(evaluate="fresh_statistics.pt"))["eval/episodic_return"] != pytest.approx(
        np.mean(expected)
    )
    other_seed = ppo.main(ppo.Args(evaluate=str(run_dir), seed=9))["eval/episodic_return"]
    assert other_seed != pytest.approx(np.mean(expected))


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


@pytest.mark.parametrize("num_envs, num_steps, num_minibatches", [(3, 7, 4), (1, 10, 3), (5, 5, 5)])
def test_every_sample_once_per_epoch_in_new_order(monkeypatch, num_envs, num_steps, num_minibatches):
    batches, real = [], ppo.update
    monkeypatch.setattr(ppo, "update", lambda *a: batches.append(a[2]) or real(*a))
    size = num_envs * num_steps
    train(
        num_envs=num_envs, num_steps=num_steps, num_minibatches=num_minibatches, total_timesteps=size, update_epochs=2
    )
    assert len(batches) == 2 * num_minibatches
    epochs = [torch.cat([b[3] for b in batches[k * num_minibatches : (k + 1) * num_minibatches]]) for k in (0, 1)]
    assert [len(epoch) for epoch in epochs] == [size, size] and max(
        len(b[0]) for b in batches
    ) <= size // num_minibatches + 1
    assert len(set(epochs[0].tolist())) == size
    assert torch.equal(*(epoch.sort().values for epoch in epochs)) and not torch.equal(*epochs)


def test_observation_statistics_are_one_over_all_environments():
    _, run_dir = train(env_id="Pendulum-v1", num_envs=3)
    state = torch.load(run_dir / "checkpoint.pt")["parts"]["obs_rms"]
    assert state["mean"].shape == (3,) and state["count"] == 32 * 3 * 2  # 2 rollouts of 96: each observation acted on


def test_logged_numbers_are_the_environments():
    """Episode returns and lengths are unscaled and whole; the reward's parts add up to its mean."""
    metrics, run_dir = train(env_id="toy_envs:Counter-v0", norm_reward=True, num_steps=33)
    assert set(values(run_dir, "charts/episodic_return")) == set(values(run_dir, "charts/episodic_length")) == {4.0}
    assert len(values(run_dir, "charts/episodic_return")) == 198 // 4 - 1  # two environments, 99 steps each
    assert metrics["charts/reward_mean"] == metrics["charts/reward_min"] == metrics["charts/reward_max"] == 1
    metrics, _ = train(env_id="toy_envs:Line-v0", num_envs=3)
    assert metrics["rewards/near"] + metrics["rewards/time"] == pytest.approx(metrics["charts/reward_mean"], abs=1e-9)
    assert metrics["rewards/time"] == pytest.approx(-0.01)


def test_learns_to_reach_the_goal():
    metrics, run_dir = train(
        total_timesteps=8192, num_steps=128, learning_rate=3e-3, num_minibatches=8, update_epochs=10
    )
    assert values(run_dir, "charts/episodic_return")[0] < -11
    assert metrics["eval/episodic_return"] > -7.5  # full speed to the goal: -0.9 - 0.8 - ... and the time's, -4.66


# ---- the rules of PPO ----------------------------------------------------------------------------------------------


def test_target_kl_ends_the_epochs_after_one():
    assert train(target_kl=1e-9, learning_rate=0.1, update_epochs=6)[0]["charts/update_epochs"] == 1
    assert train(target_kl=1e9, update_epochs=6)[0]["charts/update_epochs"] == 6


@pytest.mark.parametrize("target, factor", [(1e-12, 2.0), (1e9, 0.5)])
def test_kl_penalty_adapts_its_coefficient_and_stops_no_epoch(target, factor):
    _, run_dir = train(kl_penalty=True, target_kl=target, kl_coef=3.0)
    assert values(run_dir, "losses/kl_coef") == pytest.approx([3 * factor**k for k in (1, 2, 3, 4)])
    assert values(run_dir, "charts/update_epochs") == [2.0] * 4


def test_schedules_reach_neither_zero_nor_waste_an_update():
    _, run_dir = train(ent_coef=0.4, ent_coef_end=0.0)
    assert values(run_dir, "charts/learning_rate") == pytest.approx([3e-4, 2.25e-4, 1.5e-4, 0.75e-4])
    assert values(run_dir, "losses/ent_coef") == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert values(train(anneal_lr=False)[1], "charts/learning_rate") == pytest.approx([3e-4] * 4)


# ---- faults --------------------------------------------------------------------------------------------------------


def test_nan_in_one_minibatch_is_skipped_and_counted(monkeypatch):
    real, calls = ppo.compute_gae, []

    def poisoned(*inputs):
        advantages, returns = real(*inputs)
        calls.append(0)
        if len(calls) == 2:
            advantages[3, 1] = torch.nan
        return advantages, returns

    monkeypatch.setattr(ppo, "compute_gae", poisoned)
    metrics, run_dir = train(max_skipped_updates=3)
    assert values(run_dir, "losses/skipped_updates") == [0, 2, 2, 2]  # one of four minibatches in each of two epochs
    assert all(torch.isfinite(x).all() for x in torch.load(run_dir / "checkpoint.pt")["parts"]["agent"].values())
    assert all(np.isfinite(v) for v in values(run_dir, "losses/policy_loss")) and np.isfinite(
        metrics["losses/approx_kl"]
    )


def test_nan_in_every_minibatch_stops_with_the_first_culprit_and_keeps_the_checkpoint(monkeypatch, capsys):
    real, calls = ppo.value_loss, []
    monkeypatch.setattr(
        ppo, "value_loss", lambda *a: real(*a) * (torch.nan if calls.append(0) or len(calls) > 20 else 1)
    )
    line = refused(capsys, code=3, max_skipped_updates=5, checkpoint_every=64)
    assert "losses/value_loss" in line and "5" in line
    state = torch.load(run_dirs()[-1] / "checkpoint.pt")
    # Four bad updates end the third iteration, which is saved, with parameters that no bad update has touched.
    assert state["run"]["global_step"] == 192 and all(torch.isfinite(x).all() for x in state["parts"]["agent"].values())


FAULTS = [("nan_obs", "observation"), ("nan_reward", "reward"), ("inf_final", "inf"), ("raise", "simulator broke")]


@pytest.mark.parametrize("fault, word", FAULTS)
def test_faulty_environment_stops_before_anything_has_seen_it(monkeypatch, capsys, fault, word):
    real = ppo.RunningMeanStd.update
    monkeypatch.setattr(ppo.RunningMeanStd, "update", lambda s, x: real(s, x) if np.isfinite(x).all() else 1 / 0)
    line = refused(capsys, code=3, env_id=f"toy_envs:Faulty_{fault}-v0", checkpoint_every=64)
    assert word in line and f"Faulty_{fault}" in line and "at step 140" in line  # two environments, 70 good steps each
    assert torch.load(run_dirs()[-1] / "checkpoint.pt")["run"]["global_step"] == 128


def test_faulty_environment_in_evaluation_stops_too(capsys):
    assert "simulator broke" in refused(capsys, code=3, env_id="toy_envs:Faulty_raise-v0", eval_every=64)


def test_full_disk_leaves_the_old_checkpoint_and_says_so(monkeypatch, capsys):
    real, calls = os.fsync, []

    def full(fileno):
        calls.append(0)
        if len(calls) > 4:  # metrics.csv, config.json and two checkpoints
            raise OSError(28, "No space left on device")
        real(fileno)

    monkeypatch.setattr(os, "fsync", full)
    line = refused(capsys, code=3, checkpoint_every=64)
    assert "No space left" in line and "checkpoint.pt" in line
    assert torch.load(run_dirs()[-1] / "checkpoint.pt")["run"]["global_step"] == 128
    assert not list(run_dirs()[-1].glob("*.tmp"))


def test_fifty_kills_of_a_checkpoint_writer_leave_a_whole_checkpoint(tmp_path):
    agent, run = ppo.Agent(17, 6), types.SimpleNamespace(global_step=0)
    path, rng = tmp_path / "checkpoint.pt", np.random.default_rng(0)
    ppo.save_checkpoint(path, args(), run, {"agent": agent}, rng)
    seen = set()
    for kill in range(50):
        child = os.fork()
        if child == 0:
            while True:
                run.global_step += 1
                ppo.save_checkpoint(path, args(), run, {"agent": agent}, rng)
        time.sleep(rng.uniform(0.002, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        state = torch.load(path, weights_only=True)
        seen.add(state["run"]["global_step"])
        assert torch.equal(state["parts"]["agent"]["actor_log_std"], agent.actor_log_std), kill
    assert len(seen) > 3  # the kills really came while it was writing


def test_three_kills_of_the_whole_script():
    command = [sys.executable, ppo.__file__, "--env-id", "Pendulum-v1", "--num-steps", "64", "--num-minibatches", "4"]
    command += ["--total-timesteps", "100000", "--checkpoint-every", "64", "--eval-every", "0", "--update-epochs", "1"]
    steps = [0]
    for kill in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.time() + 60
        checkpoint = Path("runs/none") if kill == 0 else run_dirs()[0] / "checkpoint.pt"
        started = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while time.time() < deadline and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == started):
            time.sleep(0.05)
            checkpoint = run_dirs()[0] / "checkpoint.pt" if run_dirs() else checkpoint
        time.sleep(0.1 * kill)
        process.kill()
        process.wait()
        steps.append(torch.load(checkpoint)["run"]["global_step"])
        command = [sys.executable, ppo.__file__, "--resume", str(run_dirs()[0])]
    assert steps == sorted(set(steps)) and len(run_dirs()) == 1
    logged = [int(row[0]) for row in rows(run_dirs()[0])]
    assert logged == sorted(logged)


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_prints_the_command_that_resumes(signum, code):
    command = [sys.executable, ppo.__file__, "--env-id", "Pendulum-v1", "--num-steps", "64", "--num-minibatches", "4"]
    process = subprocess.Popen(
        [*command, "--runs-dir", "my runs", "--total-timesteps", "64000", "--eval-every", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.time() + 60
    while time.time() < deadline and not any(
        "SPS" in path.read_text() for path in Path().glob("my runs/*/metrics.csv")
    ):
        time.sleep(0.05)
    process.send_signal(signum)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == code
    resume = out.strip().splitlines()[-1].split("Continue: python ")[1]
    step = torch.load(next(Path("my runs").glob("*")) / "checkpoint.pt")["run"]["global_step"]
    subprocess.run(
        f"{sys.executable} {resume} --total-timesteps {step + 64}", shell=True, check=True, capture_output=True
    )
    assert json.loads((next(Path("my runs").glob("*")) / "summary.json").read_text())["steps"] == step + 64


# ---- bad input -----------------------------------------------------------------------------------------------------

BAD_INPUT = [
    ({"env_id": "NoSuchEnv-v0"}, "NoSuchEnv"),
    ({"env_id": "HalfCheetah-v99"}, "HalfCheetah-v99"),
    ({"env_id": "no_such_module:Env-v0"}, "no_such_module"),
    ({"env_id": ""}, "--env-id"),
    ({"env_id": "CartPole-v1"}, "dqn.py"),
    ({"env_id": "toy_envs:Other_image-v0"}, "ppo_atari.py"),
    ({"env_id": "toy_envs:Other_dict-v0"}, "FlattenObservation"),
    ({"env_id": "toy_envs:Other_integer_action-v0"}, "Box of floats"),
    ({"total_timesteps": 63}, "--total-timesteps 63"),
    ({"total_timesteps": -1}, "--total-timesteps"),
    ({"num_envs": 0}, "--num-envs 0"),
    ({"num_steps": 0}, "--num-steps"),
    ({"num_minibatches": 33}, "--num-minibatches 33"),
    ({"num_minibatches": 65, "norm_adv": False}, "--num-minibatches 65"),
    ({"update_epochs": 0}, "--update-epochs"),
    ({"learning_rate": -1e-3}, "--learning-rate"),
    ({"learning_rate": float("nan")}, "--learning-rate nan"),
    ({"learning_rate": float("inf")}, "--learning-rate inf"),
    ({"gamma": 1.01}, "--gamma 1.01"),
    ({"gae_lambda": -0.1}, "--gae-lambda"),
    ({"clip_coef": 0.0}, "--clip-coef"),
    ({"vf_clip_coef": 0.0}, "--vf-clip-coef"),
    ({"clip_obs": 0.0}, "--clip-obs"),
    ({"clip_reward": -1.0}, "--clip-reward"),
    ({"max_grad_norm": 0.0}, "--max-grad-norm"),
    ({"ent_coef": -0.1}, "--ent-coef"),
    ({"target_kl": 0.0}, "--target-kl"),
    ({"kl_coef": -1.0}, "--kl-coef"),
    ({"seed": -1}, "--seed"),
    ({"eval_episodes": 0}, "--eval-episodes"),
    ({"eval_every": -5}, "--eval-every"),
    ({"log_every": -1}, "--log-every"),
    ({"checkpoint_every": -1}, "--checkpoint-every"),
    ({"max_skipped_updates": 0}, "--max-skipped-updates"),
    ({"runs_dir": "a_file/runs"}, "a_file"),
    ({"exp_name": "x" * 250}, "--exp-name"),
    ({"resume": ""}, "checkpoint.pt"),
    ({"resume": "nowhere"}, "nowhere"),
    ({"resume": "a_file"}, "a_file"),
    ({"evaluate": "nowhere/checkpoint.pt"}, "nowhere"),
    ({"resume": "other_script.pt"}, "sac.py"),
    ({"resume": "other_format.pt"}, "format 99"),
    ({"evaluate": "no_checkpoint.pt"}, "no_checkpoint.pt"),
]


@pytest.mark.parametrize("flags, words", BAD_INPUT, ids=lambda value: str(value)[:60])
def test_bad_input_is_refused_in_one_line_before_anything_is_written(capsys, flags, words):
    Path("a_file").write_text("not a checkpoint")
    torch.save({"script": "sac", "format_version": 1, "flags": {}}, "other_script.pt")
    torch.save({"script": "ppo_continuous", "format_version": 99, "flags": {}}, "other_format.pt")
    torch.save([1, 2], "no_checkpoint.pt")
    assert words in refused(capsys, **flags)


def test_cuda_is_refused_without_one(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cuda" in refused(capsys, device="cuda")


def test_checkpoint_of_another_environment_is_refused(capsys):
    _, run_dir = train()
    files = {path: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    defaults = {k: getattr(ppo.Args(), k) for k in TINY}
    assert "Pendulum-v1" in refused(capsys, **{**defaults, "env_id": "Pendulum-v1", "resume": str(run_dir)})
    state = torch.load(run_dir / "checkpoint.pt")
    state["flags"]["env_id"] = "Pendulum-v1"  # as if the id now named an environment of other shape
    torch.save(state, "moved.pt")
    for flag in ("resume", "evaluate"):
        assert "does not fit" in refused(capsys, **{**defaults, flag: "moved.pt"})
    assert "exclude" in refused(capsys, **{**defaults, "resume": str(run_dir), "evaluate": str(run_dir)})
    assert {path: path.stat().st_mtime_ns for path in run_dir.iterdir()} == files


def test_next_step_autoreset_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(ppo, "make_envs", lambda args, n, seed: gym.make_vec("Pendulum-v1", n, "sync"))
    assert "SAME_STEP" in refused(capsys)


def test_video_that_cannot_be_rendered_is_refused(capsys):
    assert "videos need EGL" in refused(capsys, env_id="toy_envs:Constant-v0", capture_video=True)


def test_exit_code_and_stderr_of_the_process():
    command = [sys.executable, ppo.__file__, "--gamma", "2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and result.stderr.startswith("error: --gamma 2.0")
    assert subprocess.run([*command, "--no-such-flag"], capture_output=True).returncode == 2
    assert list(Path().iterdir()) == []


# ---- every flag does something -------------------------------------------------------------------------------------

CHANGED = {
    "seed": 2, "num_envs": 4, "total_timesteps": 320, "learning_rate": 1e-3, "anneal_lr": False, "adam_eps": 1e-1,
    "num_steps": 64, "gamma": 0.9, "gae_lambda": 0.5, "num_minibatches": 2, "update_epochs": 3, "norm_adv": False,
    "clip_coef": 1e-5, "clip_vloss": False, "vf_clip_coef": 1e-5, "ent_coef": 0.5, "vf_coef": 5.0,
    "max_grad_norm": 1e-3, "target_kl": 1e-9, "kl_penalty": True, "norm_obs": False, "clip_obs": 0.1,
    "norm_reward": False, "clip_reward": 0.1, "env_id": "Pendulum-v1", "log_every": 128, "eval_every": 128,
    "eval_episodes": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_flag_changes_the_metrics(name):
    base = {"env_id": "Pendulum-v1"} if name == "eval_episodes" else {}  # Line's episodes are all the same
    assert rows(train(**base)[1]) != rows(train(**{**base, name: CHANGED[name]})[1])


def test_flags_that_need_another_flag_change_the_metrics():
    assert rows(train(ent_coef=0.5)[1]) != rows(train(ent_coef=0.5, ent_coef_end=0.0)[1])
    assert rows(train(kl_penalty=True)[1]) != rows(train(kl_penalty=True, kl_coef=50.0)[1])
    assert rows(train(kl_penalty=True)[1]) != rows(train(kl_penalty=True, target_kl=1e-9)[1])


def test_remaining_flags():
    """Those that leave the metrics alone; together with the tests above every field of Args is tried."""
    ppo.main(args(exp_name="mine", runs_dir="elsewhere/deep"))
    assert next(Path("elsewhere/deep").iterdir()).name.startswith("toy_envs:Line-v0__mine__1__")
    train(torch_deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()
    train(torch_deterministic=True, checkpoint_every=64)
    assert torch.are_deterministic_algorithms_enabled()
    tried_elsewhere = {"exp_name", "runs_dir", "torch_deterministic", "checkpoint_every", "device", "compile", "track",
                       "wandb_project_name", "wandb_entity", "capture_video", "max_skipped_updates", "resume",
                       "evaluate", "ent_coef_end", "kl_coef"}  # fmt: skip
    assert {field.name for field in dataclasses.fields(ppo.Args)} == tried_elsewhere | set(CHANGED)


def test_slash_in_an_environment_id_becomes_a_dash():
    gym.register("space/Line-v0", Line, max_episode_steps=16)
    assert train(env_id="space/Line-v0")[1].name.startswith("space-Line-v0__")


def test_checkpoint_every():
    steps = []
    real = ppo.save_checkpoint
    try:
        ppo.save_checkpoint = lambda *a: steps.append(a[2].global_step) or real(*a)
        train(checkpoint_every=128)
        train(checkpoint_every=0)
    finally:
        ppo.save_checkpoint = real
    assert steps == [128, 256, 256]


# ---- odd but legal -------------------------------------------------------------------------------------------------


def test_odd_environment():
    """No render_mode in its constructor, infos of odd types, a reward's part also in the reset's info, big seeds."""
    metrics, _ = train(env_id="toy_envs:Odd-v0", seed=2**31 - 1, num_envs=3, eval_every=64)
    assert metrics["rewards/part"] == pytest.approx(1) and "rewards/dict" not in metrics


def test_copied_checkpoint_overwrites_nothing():
    """A checkpoint outside its run's folder goes on in a new folder, with its counters."""
    ours, other = train()[1], train(seed=2)[1]
    copy = shutil.copy(ours / "checkpoint.pt", other / "backup.pt")
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    assert ppo.main(ppo.Args(resume=copy, total_timesteps=320))["global_step"] == 320
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert len(run_dirs()) == 3 and {int(row[0]) for row in rows(run_dirs()[-1])} == {288, 320}


def test_checkpoint_of_a_version_with_other_flags():
    """A flag that is gone is passed over, one that is new has its default."""
    _, run_dir = train()
    state = torch.load(run_dir / "checkpoint.pt")
    state["flags"]["gone"] = 1
    del state["flags"]["clip_obs"]
    torch.save(state, run_dir / "checkpoint.pt")
    assert ppo.main(ppo.Args(resume=str(run_dir), total_timesteps=320))["global_step"] == 320


def test_log_with_a_blank_line_is_read():
    _, run_dir = train()
    with (run_dir / "metrics.csv").open("a") as file:
        file.write("\n")
    ppo.main(ppo.Args(resume=str(run_dir), total_timesteps=320))


def test_a_folder_with_an_apostrophe():
    ppo.main(args(runs_dir="my run's"))
    assert (next(Path("my run's").iterdir()) / "summary.json").exists()


def test_main_works_in_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(ppo.main(args())))
    thread.start()
    thread.join()
    assert results[0]["global_step"] == 256


def test_evaluation_that_meets_a_nan_stops(monkeypatch, capsys):
    real = ppo.make_eval_env

    def faulty(*a):
        env = real(*a)
        return gym.wrappers.TransformReward(env, lambda r: np.nan)

    monkeypatch.setattr(ppo, "make_eval_env", faulty)
    assert "in evaluation" in refused(capsys, code=3)


def test_weights_and_biases_without_login_or_package_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(login=lambda prompt: False))
    assert "not logged in" in refused(capsys, track=True)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "--track" in refused(capsys, track=True)


def test_compile_without_a_compiler_is_refused(monkeypatch, capsys):
    def broken(function):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    assert "C++ compiler" in refused(capsys, compile=True)


def test_disk_that_is_full_from_the_start(monkeypatch, capsys):
    """TensorBoard's own complaint at the end does not hide the exit code."""
    real = ppo.Path.open

    def full(self, mode="r", **options):
        if self.name == "metrics.csv" and "a" in mode:
            raise OSError(28, "No space left on device")
        return real(self, mode, **options)

    monkeypatch.setattr(ppo.Path, "open", full)
    monkeypatch.setattr(ppo.SummaryWriter, "close", lambda self: (_ for _ in ()).throw(OSError(28, "No space")))
    assert "metrics.csv" in refused(capsys, code=3)


# ---- what a run leaves behind --------------------------------------------------------------------------------------


def test_files_of_a_run():
    metrics, run_dir = train(eval_episodes=3)
    assert {path.name.split(".")[0] for path in run_dir.iterdir()} == {
        "metrics",
        "config",
        "checkpoint",
        "summary",
        "events",
    }
    config, summary = (json.loads((run_dir / f"{name}.json").read_text()) for name in ("config", "summary"))
    assert config["flags"] == {**dataclasses.asdict(args(eval_episodes=3))} and config["device"] == "cpu"
    assert {"python", "torch", "gymnasium", "numpy"} <= config["versions"].keys()
    assert config["commit"] is None or len(config["commit"]) == 40
    assert summary["steps"] == 256 and len(summary["final_evaluation"]) == 3
    parts = [summary[f"{part}_seconds"] for part in ("environment", "update", "rest")]
    assert min(parts) > 0 and sum(parts) == pytest.approx(summary["wall_seconds"])
    assert summary["last_training_return"] == pytest.approx(np.mean(values(run_dir, "charts/episodic_return")[-100:]))
    assert metrics["eval/episodic_return"] == pytest.approx(np.mean(summary["final_evaluation"]))
    assert {row[1] for row in rows(run_dir, timing=True)} == metrics.keys() - {"global_step"}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    assert set(events.Tags()["scalars"]) == metrics.keys() - {"global_step"}
    logged = [(event.step, event.value) for event in events.Scalars("losses/value_loss")]
    assert logged == [(int(r[0]), pytest.approx(float(r[2]))) for r in rows(run_dir) if r[1] == "losses/value_loss"]


def test_checkpoint_loads_with_torch_defaults_and_holds_all():
    _, run_dir = train()
    state = torch.load(run_dir / "checkpoint.pt")
    assert state.keys() == {"format_version", "script", "flags", "run", "parts", "rng"}
    assert state["parts"].keys() == {"agent", "optimizer", "obs_rms", "reward_rms"}


def test_progress_without_a_terminal_is_rare(capsys):
    train(total_timesteps=64 * 40)
    assert capsys.readouterr().err.count("\r") <= 3


def test_video_and_weights_and_biases(monkeypatch):
    """The video of each evaluation is handed over explicitly; every metric goes with its step."""
    logged, inits = [], []
    fake = types.SimpleNamespace(
        init=lambda **kwargs: inits.append(kwargs), log=logged.append, finish=lambda: logged.append("finished"),
        Video=lambda path: ("video", path) if Path(path).stat().st_size > 0 else None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", fake)
    _, run_dir = train(capture_video=True, track=True, wandb_project_name="p", wandb_entity="e", eval_every=128)
    videos = {path.name for path in (run_dir / "videos").glob("*.mp4")}
    assert videos == {f"step_{step}-episode-0.mp4" for step in (0, 128, 256)}
    handed = [Path(value[1]).name for entry in logged[:-1] for value in entry.values() if isinstance(value, tuple)]
    assert set(handed) == videos and len(handed) == 3 and logged[-1] == "finished"
    assert (inits[0]["project"], inits[0]["entity"], inits[0]["name"]) == ("p", "e", run_dir.name)
    losses = [
        (entry["global_step"], entry["losses/value_loss"]) for entry in logged[:-1] if "losses/value_loss" in entry
    ]
    assert losses == [(int(r[0]), float(r[2])) for r in rows(run_dir) if r[1] == "losses/value_loss"]


def test_real_weights_and_biases_offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    _, run_dir = train(track=True)
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb")) and [path.name for path in Path().iterdir()] == ["runs"]


# ---- devices -------------------------------------------------------------------------------------------------------


def test_smoke_on_the_best_device():
    """HalfCheetah on CUDA when there is one, else on the CPU."""
    metrics = train(env_id="HalfCheetah-v5", device=DEVICE, total_timesteps=512, num_steps=128)[0]
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["rewards/forward"] + metrics["rewards/ctrl"] == pytest.approx(
        metrics["charts/reward_mean"], abs=1e-6
    )
    assert not list(Path().rglob("MUJOCO_LOG.TXT"))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_cuda_agrees_with_cpu():
    losses = [values(train(device=device)[1], "losses/value_loss") for device in ("cpu", "cuda")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_compiled_update_agrees_with_eager():
    eager, compiled = (train(env_id="Pendulum-v1", device=DEVICE, compile=flag)[1] for flag in (False, True))
    for metric in ("losses/policy_loss", "losses/value_loss", "losses/approx_kl", "losses/grad_norm"):
        assert values(eager, metric) == pytest.approx(values(compiled, metric), rel=1e-3, abs=1e-5)
