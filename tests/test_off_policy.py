"""What holds for sac.py and td3.py on whole runs: what is stored, when it is learned from, what evaluation says."""

import shutil
import signal
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from harness import checkpoint, equal, rows, run_dirs, saved_step, values, wrap
from script_cases import SCRIPTS
from toy_envs import Line

OFF_POLICY = [script for script in SCRIPTS if script.name in ("sac", "td3")]
pytestmark = pytest.mark.parametrize("script", OFF_POLICY, indirect=True, ids=str)
KEYS = ["observations", "actions", "rewards", "next_observations", "terminations", "truncations", "env_ids"]


def replay(run_dir: Path) -> dict[str, np.ndarray]:
    """The replay memory that a run has left."""
    (path,) = run_dir.glob("replay_*.npz")
    with np.load(path) as file:
        return dict(file)


def stored(script, **flags) -> dict[str, np.ndarray]:
    """The transitions of a run of 64 steps in one environment."""
    return replay(script.train(num_envs=1, total_timesteps=64, checkpoint_replay=True, **flags)[1])


# ---- what is stored ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "starts", "ends", "terminated"),
    [
        ("Counter", [0, 1, 2, 3], [1, 2, 3, 4], False),
        ("CounterAlias", [0, 1, 2, 3], [1, 2, 3, 4], False),
        ("CounterEnds", [0, 1, 2], [1, 2, 3], True),
        ("CounterBoth", [0, 1, 2, 3], [1, 2, 3, 4], True),
    ],
)
def test_true_last_observation_and_both_flags_are_stored(script, env_id, starts, ends, terminated):
    """No reset's observation, no step that ignores the action; `terminated` is never merged with `truncated`."""
    data, length = stored(script, env_id=f"toy_envs:{env_id}-v0"), len(starts)
    episodes = 64 // length
    assert data["observations"][: episodes * length, 0].tolist() == starts * episodes
    assert data["next_observations"][: episodes * length, 0].tolist() == ends * episodes
    last = np.arange(64) % length == length - 1
    assert np.array_equal(data["terminations"], last & terminated)
    assert np.array_equal(data["truncations"], last & (env_id != "CounterEnds"))


def test_pendulum_stores_no_termination(script):
    """1000 steps, five time limits."""
    flags = {"env_id": "Pendulum-v1", "num_envs": 1, "total_timesteps": 1000, "utd_ratio": 0.0}
    data = replay(script.train(**flags, checkpoint_replay=True)[1])
    assert not data["terminations"].any() and data["truncations"].nonzero()[0].tolist() == [199, 399, 599, 799, 999]


def test_stored_actions_are_those_of_the_environment(script, monkeypatch):
    """In its own units and shape, inside its range; at random over all of it before learning starts."""
    monkeypatch.setattr(Line, "seen", seen := [])
    data = stored(script, env_id="toy_envs:LineScaled-v0", learning_starts=40, eval_episodes=1)
    acted = np.array(seen[:64]).reshape(64, -1)  # what follows is the evaluation
    assert seen[0].shape == (2, 3) and data["actions"].shape == (64, 6)
    assert np.array_equal(data["actions"], acted)
    assert acted.min() >= 10 and acted.max() <= 20
    assert np.histogram(acted[:40], 4, (10, 20))[0].min() > 40  # of 240, 60 expected in each quarter


def test_no_rounding_takes_an_action_out_of_its_range(script, monkeypatch):
    """In float32, middle and half of [-0.5, 1.9] add up to 1.9000001: a policy that has saturated would be outside."""
    space = gym.make("toy_envs:LineRounded-v0").action_space
    scale, shift = script.module.action_transform(space)
    assert shift + scale > space.high and shift - scale < space.low
    monkeypatch.setattr(Line, "seen", seen := [])
    ends = [shift + scale, shift - scale]
    real = script.module.Actor.forward

    def saturated(self, obs, *noise, **options):
        if script.name == "sac":
            return torch.as_tensor(np.array(ends[len(seen) % 2])).expand(len(obs), 1), real(self, obs, *noise)[1]
        return torch.as_tensor(np.array(ends[len(seen) % 2])).expand(len(obs), 1)

    monkeypatch.setattr(script.module.Actor, "forward", saturated)
    quiet = {} if script.name == "sac" else {"exploration_noise": 0.0}
    flags = {"total_timesteps": 20, "learning_starts": 4, "utd_ratio": 0.0, "eval_episodes": 1}
    script.train(env_id="toy_envs:LineRounded-v0", **flags, **quiet)
    acted = np.concatenate(seen[4:])  # in training, then in evaluation
    assert set(acted.tolist()) == {space.low.item(), space.high.item()}
    data = stored(script, env_id="toy_envs:LineRounded-v0", learning_starts=4, utd_ratio=0.0, **quiet)
    assert set(data["actions"][4:, 0].tolist()) == {space.low.item(), space.high.item()}


def test_several_environments_are_told_apart(script):
    data = replay(script.train(env_id="toy_envs:Counter-v0", checkpoint_replay=True)[1])
    assert list(data) == KEYS and all(len(column) == 256 for column in data.values())
    for k in range(2):
        assert data["observations"][data["env_ids"] == k, 0].tolist() == [0, 1, 2, 3] * 32
    kinds = {"observations": np.float32, "rewards": np.float32, "terminations": bool, "truncations": bool}
    assert {name: data[name].dtype for name in kinds} == kinds


def test_memory_keeps_the_newest(script):
    _, run_dir = script.train(env_id="toy_envs:Counter-v0", buffer_size=21, checkpoint_replay=True)
    data = replay(run_dir)
    assert [data["observations"][data["env_ids"] == k, 0].tolist() for k in range(2)] == [[2, 3, *[0, 1, 2, 3] * 2]] * 2


# ---- when it is learned from ---------------------------------------------------------------------------------------


def test_compiled_variants_agree_with_eager(script):
    """REDQ with layer normalisation, DDPG; the defaults' turn is in test_contract.py."""
    variants = {
        "sac": {"num_critics": 3, "critic_subset": 2, "layer_norm": True, "autotune": False, "max_grad_norm": 0.1},
        "td3": {"clipped_double_q": False, "delayed_policy": False, "target_smoothing": False, "max_grad_norm": 0.1},
    }
    flags = {**variants[script.name], "env_id": "Pendulum-v1", "total_timesteps": 128}
    eager, compiled = (script.train(**flags, compile=flag)[1] for flag in (False, True))
    for metric in {row[1] for row in rows(eager) if row[1].startswith("losses/")}:
        assert values(eager, metric) == pytest.approx(values(compiled, metric), rel=1e-3, abs=1e-5), metric


@pytest.mark.parametrize("compiled", [False, True])
def test_no_matrix_product_for_gradients_that_nobody_wants(script, monkeypatch, compiled):
    """Target 3 (actor) + 2 (critics), critics 2 forward + 3 backward; policy 3 + 2 forward, 2 + 5 backward.

    The critics' gradients in the policy's loss would be two more, and so they are where a compiled graph leaves the
    backward pass to another one.
    """
    products, real, update = [], torch.compile, script.module.update

    def profiled(step):
        def call(*arguments):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                result = step(*arguments)
            kinds = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
            products.append(sum(event.name in kinds for event in profile.events()))
            return result

        return call

    if compiled:
        monkeypatch.setattr(torch, "compile", lambda f, **kw: profiled(real(f, **kw)) if f is update else real(f, **kw))
    else:
        monkeypatch.setattr(script.module, "update", profiled(update))
    flags = {"env_id": "Hopper-v5", "num_envs": 1, "hidden_size": 64, "batch_size": 64, "learning_starts": 64}
    flags |= {"total_timesteps": 80, "utd_ratio": 1.0, "policy_frequency": 2, "device": "cpu"}
    script.train(**flags, compile=compiled)
    assert sorted(products[-4:]) == [10, 10, 22, 22]


@pytest.mark.parametrize(("num_envs", "utd_ratio", "expected"), [(1, 1.0, 247), (4, 1.0, 248), (2, 0.3, 74), (2, 0, 0)])
def test_update_ratio_is_kept_for_any_number_of_environments(script, monkeypatch, num_envs, utd_ratio, expected):
    """The ratio is per environment step, and counts from the first full memory: 10 steps (12 of four environments)."""
    sizes = []
    wrap(monkeypatch, script.module, "update", lambda number, real, *a: sizes.append(len(a[2][0])) or real(*a))
    metrics, _ = script.train(num_envs=num_envs, utd_ratio=utd_ratio, learning_starts=10)
    assert metrics["charts/updates"] == len(sizes) == expected and set(sizes) <= {8}


def test_policy_frequency(script, monkeypatch):
    """One policy update per so many of the critics; None is one per step of the environment (SAC)."""

    def policy_updates(**flags) -> int:
        steps = []
        with monkeypatch.context() as patch:
            wrap(patch, script.module, "policy_loss", lambda number, real, *a: steps.append(1) or real(*a))
            script.train(learning_starts=2, **flags)
        return len(steps)

    assert policy_updates(policy_frequency=3) == 64 // 3
    if script.name == "sac":
        assert (policy_updates(), policy_updates(utd_ratio=2.0)) == (64, 256)
    else:
        assert (policy_updates(), policy_updates(delayed_policy=False)) == (32, 64)


def test_policy_that_is_never_updated_stops_the_run(script, monkeypatch, capsys):
    """Updates of the critics alone, which lie between those of the policy, go well and excuse nothing."""
    wrap(monkeypatch, script.module, "policy_loss", lambda number, real, *a: real(*a) * torch.nan)
    line = script.stopped(capsys, 3, script.args(policy_frequency=2, max_skipped_updates=3))
    assert "losses/actor_loss" in line and "3 updates" in line


@pytest.mark.parametrize(("learning_starts", "updates"), [(258, 0), (257, 0), (256, 2), (254, 4)])
def test_budget_inside_warm_up_only_warns(script, capsys, learning_starts, updates):
    """Two environments, 256 steps: with 256 the last step's updates are the only ones."""
    assert script.train(learning_starts=learning_starts, utd_ratio=1.0)[0]["charts/updates"] == updates
    assert ("warning: learning never starts" in capsys.readouterr().err) == (updates == 0)


def test_resume_without_time_to_fill_the_memory_warns(script, capsys):
    before, run_dir = script.train(learning_starts=200, utd_ratio=1.0)
    after = script.main(resume=str(run_dir), total_timesteps=384)
    assert before["charts/updates"] == after["charts/updates"] == 58
    assert capsys.readouterr().err.count("warning: learning never starts") == 1


def test_memories_that_the_run_did_not_make_are_left_alone(script):
    """Without --checkpoint-replay nothing is deleted; with it what is left of earlier ones and of broken writes is."""
    for keep in (False, True):
        _, run_dir = script.train(total_timesteps=128, checkpoint_replay=keep)
        for name in ("replay_7.npz", "replay_8.npz.tmp"):
            (run_dir / name).write_bytes(b"x")
        script.main(resume=str(run_dir), total_timesteps=256)
        left = {path.name for path in run_dir.glob("replay_*")}
        assert left == ({"replay_256.npz"} if keep else {"replay_7.npz", "replay_8.npz.tmp"})


@pytest.mark.parametrize("as_termination", [False, True])
def test_value_does_not_end_at_a_time_limit(script, monkeypatch, as_termination):
    """Reward 1 at every step, cut into episodes of 5: Q is 1 / (1 - gamma) = 5. Were each fifth step a death, it would
    be 1 / (1 - 0.8 gamma) = 2.8: the states are all alike.

    (SAC's return holds entropy, too: the temperature is as good as zero here.)
    """
    if as_termination:
        wrap(monkeypatch, script.module.ReplayMemory, "add",
             lambda number, real, self, *step: real(self, *step[:-2], step[-2] | step[-1], step[-1]))  # fmt: skip
    still = {"autotune": False, "alpha": 1e-9, "q_lr": 1e-2} if script.name == "sac" else {"learning_rate": 1e-2}
    _, run_dir = script.train(
        env_id="toy_envs:Constant-v0", gamma=0.8, tau=0.1, utd_ratio=1.0, batch_size=32, total_timesteps=1600, **still
    )
    assert values(run_dir, "losses/qf_values")[-1] == pytest.approx(1 / 0.36 if as_termination else 5, abs=0.1)


# ---- checkpoint and memory -----------------------------------------------------------------------------------------


def test_signal_stops_after_the_step(script, monkeypatch):
    """Not at the next logging interval, which may be minutes of updates away; and what is left is done later."""

    def signalled(number, real, *step):
        if number == 10:
            signal.raise_signal(signal.SIGTERM)
        real(*step)

    flags = {"log_every": 10**6, "checkpoint_replay": True, "learning_starts": 2, "utd_ratio": 1.0}
    wrap(monkeypatch, script.module.ReplayMemory, "add", signalled)
    with pytest.raises(SystemExit) as stop:
        script.train(**flags)
    (run_dir,) = run_dirs()
    assert (stop.value.code, saved_step(run_dir), checkpoint(run_dir)["run"]["updates"]) == (143, 20, 20)
    metrics = script.main(resume=str(run_dir), checkpoint_replay=True)
    assert (metrics["global_step"], metrics["charts/updates"]) == (256, 256)


def test_evaluations_and_checkpoints_come_between_two_logging_intervals(script, monkeypatch):
    saved = []
    wrap(monkeypatch, script.module, "save_checkpoint",
         lambda number, real, *a: saved.append(a[2].global_step) or real(*a))  # fmt: skip
    _, run_dir = script.train(log_every=100, eval_every=48, checkpoint_every=70)
    evaluated = [int(step) for step, metric, _ in rows(run_dir) if metric == "eval/episodic_return"]
    assert evaluated == [0, 48, 96, 144, 192, 240, 256] and saved == [70, 140, 210, 256]
    assert {"100", "200"} <= {step for step, metric, _ in rows(run_dir) if metric == "charts/updates"}


def test_memory_beside_a_copied_checkpoint_is_loaded(script, capsys):
    """A checkpoint and its memory that were taken elsewhere go on as where they were; without the memory a warning."""
    _, run_dir = script.train(checkpoint_replay=True, learning_starts=200)
    for path in (run_dir / "checkpoint.pt", run_dir / "replay_256.npz"):
        shutil.copy(path, path.name)
    again = script.main(resume="checkpoint.pt", total_timesteps=320)
    here = script.main(resume=str(run_dir), total_timesteps=320)
    assert again["charts/updates"] == here["charts/updates"] and again["losses/qf_loss"] == here["losses/qf_loss"]
    assert "warning" not in capsys.readouterr().err
    Path("replay_256.npz").unlink()
    assert script.main(resume="checkpoint.pt", total_timesteps=320)["charts/updates"] < here["charts/updates"]
    assert "warning: replay_256.npz is missing" in capsys.readouterr().err


def test_numbers_too_small_to_matter_are_zero(script):
    """Without this the momenta of dead ReLUs, which decay for ever, slow every step down on the CPU."""
    torch.set_flush_denormal(False)
    assert (torch.tensor([1e-39]) * 1).item() > 0
    script.train()
    assert (torch.tensor([1e-39]) * 1).item() == 0
    torch.set_flush_denormal(False)


def test_memory_is_saved_beside_each_checkpoint_and_alone(script, monkeypatch):
    """Whenever the two writes are cut short, a checkpoint and the memory of its step are there."""
    seen = []

    def saving(number, real, path, *a):
        seen.append(sorted(p.name for p in path.parent.glob("replay_*.npz")))
        real(path, *a)

    wrap(monkeypatch, script.module, "save_checkpoint", saving)
    _, run_dir = script.train(checkpoint_every=64, checkpoint_replay=True)
    assert seen == [["replay_64.npz"], *(sorted([f"replay_{k}.npz", f"replay_{k + 64}.npz"]) for k in (64, 128, 192))]
    assert [path.name for path in run_dir.glob("replay_*")] == ["replay_256.npz"]
    assert len(replay(run_dir)["rewards"]) == 256


def test_resume_without_memory_fills_it_with_the_policy_before_the_next_update(script, monkeypatch):
    """No random actions, no update until --learning-starts transitions are there again."""

    def constant(number, real, *inputs, **options):
        result = real(*inputs, **options)
        return 0 * result + 0.25 if script.name == "td3" else (0 * result[0] + 0.25, result[1])

    flags = {"learning_starts": 40, "utd_ratio": 1.0} | ({"exploration_noise": 0.0} if script.name == "td3" else {})
    _, run_dir = script.train(**flags)
    _, other = script.train(**flags, checkpoint_replay=True)
    assert not list(run_dir.glob("replay_*"))
    updates, sizes = checkpoint(run_dir)["run"]["updates"], []
    wrap(monkeypatch, script.module.ReplayMemory, "sample",
         lambda number, real, self, *a: sizes.append(len(self)) or real(self, *a))  # fmt: skip
    wrap(monkeypatch, script.module.Actor, "forward", constant)
    monkeypatch.setattr(Line, "seen", seen := [])
    assert script.main(resume=str(run_dir), total_timesteps=384)["charts/updates"] == updates + 128 - 38
    assert sizes[0] == 40 and np.all(np.array(seen) == 0.25)
    assert script.main(resume=str(other), total_timesteps=384)["charts/updates"] == updates + 128


def test_memory_that_cannot_be_read_is_refused(script, capsys):
    _, run_dir = script.train(checkpoint_replay=True)
    (run_dir / "replay_256.npz").write_bytes(b"no archive")
    line = script.stopped(capsys, 2, script.module.Args(resume=str(run_dir), total_timesteps=384))
    assert "replay_256.npz" in line and "Delete it" in line


def test_resumed_memory_that_had_wrapped_gives_the_same_samples(script):
    """Sampling counts from the oldest transition: where the ring began does not matter."""
    flags = {"buffer_size": 50, "checkpoint_replay": True, "checkpoint_every": 128}
    _, whole = script.train(**flags)
    _, part = script.train(**flags, total_timesteps=128)
    copy = Path(shutil.copytree(part, "runs/copy"))
    script.main(resume=str(copy), total_timesteps=256)
    assert equal(checkpoint(copy)["parts"], checkpoint(whole)["parts"])
    assert [r for r in rows(copy) if int(r[0]) > 128] == [r for r in rows(whole) if int(r[0]) > 128]


def test_full_disk_while_the_memory_is_saved(script, monkeypatch, capsys):
    def full(number, real, *arguments, **arrays):
        if number > 1:
            raise OSError(28, "No space left on device")
        real(*arguments, **arrays)

    wrap(monkeypatch, np, "savez", full)
    line = script.stopped(capsys, 3, script.args(checkpoint_every=64, checkpoint_replay=True))
    assert "No space left" in line and "replay_128.npz" in line
    assert saved_step(run_dirs()[-1]) == 64 and len(replay(run_dirs()[-1])["rewards"]) == 64


# ---- evaluation ----------------------------------------------------------------------------------------------------


class Constant(torch.nn.Module):
    """Critics that know one number."""

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[6.0], [8.0]]).expand(2, len(obs))


@pytest.mark.parametrize(("env_id", "length", "bootstrapped"), [("Counter", 4, True), ("CounterEnds", 3, False)])
def test_overestimation_is_q_less_the_discounted_return(script, monkeypatch, env_id, length, bootstrapped):
    """Q says 7. Reward 1 a step, gamma 0.5; at a time limit the tail is what Q says of the last state and action."""
    args = script.args(env_id=f"toy_envs:{env_id}-v0", gamma=0.5, eval_episodes=2)
    space = gym.make(args.env_id).action_space
    inputs = (1, *script.module.action_transform(space), args if script.name == "sac" else args.hidden_size)
    agent = script.module.Agent(*inputs)
    agent.critics = Constant()
    bonuses = []
    if script.name == "sac":
        wrap(monkeypatch, script.module, "squashed_log_prob",
             lambda number, real, *a: bonuses.append(-(logprob := real(*a)).item()) or logprob)  # fmt: skip
    scores, metrics = script.module.evaluate(args, agent, Path(), "x")
    assert scores == [length, length] and metrics["eval/episodic_length"] == length
    realised = sum(0.5**t for t in range(length)) + 0.5**length * 7 * bootstrapped
    expected = [7 - realised] * 2
    if script.name == "sac":  # two episodes with the mode come first; alpha is 1; the first bonus is not in Q(s, a)
        episodes = np.reshape(bonuses, (4, length + 1))[2:]
        for k, bonus in enumerate(episodes):
            expected[k] -= sum(0.5**t * bonus[t] for t in range(1, length + bootstrapped))
    assert metrics["eval/q_overestimation"] == pytest.approx(np.mean(expected), abs=1e-5)


def test_returns_are_the_modes_and_overestimation_the_samples(script, monkeypatch):
    """SAC's Q is the value of sampling; the score that counts is the mode's."""

    def play(number, real, agent, env, seed, *rng):
        if not rng:
            return [1.0], 6.0, 0.0
        return ([1.0], [0.0], 0.0, 0.0) if rng[0] is None else ([2.0], [0.0], 7.0, 0.0)

    wrap(monkeypatch, script.module, "play", play)
    metrics, _ = script.train()
    assert (metrics["eval/episodic_return"], metrics["eval/q_overestimation"]) == (1, 5)


def test_every_evaluation_starts_from_the_same_states(script, monkeypatch):
    seeds = []
    wrap(monkeypatch, script.module, "play", lambda number, real, *a: seeds.append(a[2]) or real(*a))
    script.train(eval_every=64, eval_episodes=2, env_id="Pendulum-v1")
    half = 2 if script.name == "td3" else 4  # SAC plays each start with the mode, then with a sample
    assert seeds == seeds[:half] * 5 and len(set(seeds[:half])) == 2
