"""benchmark/record.py and benchmark/sb3.py: the data are what the script's own policy did; the rival has our settings.

Nothing here may use the network: every connection raises.
"""

import dataclasses
import hashlib
import json
import math
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import minari
import numpy as np
import plot
import pytest
import record
import run
import sac
import sb3
import td3
import torch
import tyro
from harness import files
from toy_envs import Line

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SCRIPTS = {"sac": sac, "td3": td3}
# The toys again, by name: an environment's spec can be stored only if it names where its class lies.
TOYS = {
    "Limit": ("CounterEnv", {}),
    "Ends": ("CounterEnv", {"ends_at": 3}),
    "Both": ("CounterEnv", {"ends_at": 4}),
    "Alias": ("CounterEnv", {"alias": True}),
    "Scaled": ("Line", {"low": 10.0, "high": 20.0, "shape": [2, 3]}),
    "Breaks": ("FaultyEnv", {"fault": "nan_obs", "good": 40}),
}
for toy, (cls, options) in TOYS.items():
    gym.register(f"{toy}-v0", f"toy_envs:{cls}", max_episode_steps=4, kwargs=options)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **keywords):
        raise AssertionError("the network was used")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def workplace(empty_folder, monkeypatch, tmp_path):
    """An empty folder, in which the datasets lie, too."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))


TRAINED: dict[tuple[str, str], dict] = {}


def trained(script: str, env_id: str) -> str:
    """A checkpoint.pt in the current folder, of a policy trained for a moment; made once."""
    if (script, env_id) not in TRAINED:
        module = SCRIPTS[script]
        flags = {"total_timesteps": 60, "learning_starts": 30, "hidden_size": 32, "batch_size": 16, "buffer_size": 100}
        here = {"runs_dir": "training", "device": "cpu", "eval_every": 0, "eval_episodes": 1}
        module.main(module.Args(env_id=env_id, **flags, **here))
        TRAINED[script, env_id] = torch.load(max(Path("training").glob("*/checkpoint.pt"), key=os.path.getmtime))
    path = Path(f"{script}_{env_id}.pt")
    torch.save(TRAINED[script, env_id], path)
    return str(path)


def recorded(*checkpoints: str, dataset: str = "toy/some-v0", **flags) -> minari.MinariDataset:
    record.main(record.Args(checkpoint=checkpoints, dataset=dataset, **flags))
    return minari.load_dataset(dataset)


def whole_agent(script: str, env_id: str):
    """The agent of that checkpoint as the script itself would restore it, critics and all, and its flags."""
    module, checkpoint = SCRIPTS[script], torch.load(trained(script, env_id))
    args = module.Args(**checkpoint["flags"])
    env = module.make_eval_env(args, 0)
    size, (scale, shift) = math.prod(env.observation_space.shape), module.action_transform(env.action_space)
    agent = module.Agent(size, scale, shift, args if script == "sac" else args.hidden_size)
    agent.load_state_dict(checkpoint["parts"]["agent"])
    return agent, args


def content(dataset: minari.MinariDataset) -> list[np.ndarray]:
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    return [getattr(episode, name) for episode in dataset for name in names]


def same(left: minari.MinariDataset, right: minari.MinariDataset) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, content(left), content(right)))


# ---------------------------------------------------------------------------------------------------------------------
# What is stored
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("toy", "steps", "ends"),
    [
        ("Limit", 10, [(4, 0, 1), (4, 0, 1), (2, 0, 1)]),
        ("Alias", 10, [(4, 0, 1), (4, 0, 1), (2, 0, 1)]),
        ("Ends", 10, [(3, 1, 0), (3, 1, 0), (3, 1, 0), (1, 0, 1)]),
        ("Ends", 9, [(3, 1, 0), (3, 1, 0), (3, 1, 0)]),
        ("Both", 5, [(4, 1, 1), (1, 0, 1)]),
        ("Limit", 1, [(1, 0, 1)]),
    ],
)
def test_rows_and_ends_of_episodes(script, toy, steps, ends):
    """T + 1 observations, the last one the episode's own; terminated, truncated and cut by the budget stay apart."""
    dataset = recorded(trained(script, f"{toy}-v0"), steps=steps)
    assert dataset.total_steps == steps
    assert [(len(e.rewards), e.terminations[-1], e.truncations[-1]) for e in dataset] == ends
    for episode in dataset:
        length = len(episode.rewards)
        assert episode.observations[:, 0].tolist() == list(range(length + 1))  # a counter: 0 is a reset's
        assert episode.actions.shape == (length, 1)
        assert not episode.terminations[:-1].any()
        assert not episode.truncations[:-1].any()
        assert episode.rewards.tolist() == [1] * length
        assert episode.rewards.dtype == episode.actions.dtype == np.float32
        assert episode.observations.dtype == np.float64
        assert episode.terminations.dtype == episode.truncations.dtype == bool


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("sample", [True, False])
def test_actions_are_what_the_environment_got(script, sample):
    checkpoint = trained(script, "Scaled-v0")
    Line.seen.clear()
    dataset = recorded(checkpoint, steps=40, sample=sample, exploration_noise=0.5)
    actions = np.concatenate([episode.actions for episode in dataset])
    assert actions.shape == (40, 2, 3)
    assert np.array_equal(actions, np.array(Line.seen)[:40])
    assert actions.min() >= 10
    assert actions.max() <= 20
    assert np.ptp(actions) > (2 if sample else 0)


ENVIRONMENTS = ["Pendulum-v1", "Hopper-v5", "Scaled-v0"]


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("script", SCRIPTS)
def test_actions_follow_from_observations_and_seed(script, env_id, sample):
    """By hand: the actor on each stored observation, with the numbers of the generator that --seed gives."""
    checkpoint = trained(script, env_id)
    dataset = recorded(checkpoint, steps=230, sample=sample, seed=5, exploration_noise=0.3)
    (agent, _), env = whole_agent(script, env_id), gym.make(env_id)
    scale, _ = SCRIPTS[script].action_transform(env.action_space)
    for k, (seed, episode) in enumerate(zip(seeds(dataset), dataset, strict=True)):
        rng = np.random.default_rng([5, 2, k])
        assert seed == rng.integers(2**31)
        assert np.array_equal(env.reset(seed=seed)[0], episode.observations[0])
        for obs, action in zip(episode.observations[:-1], episode.actions, strict=True):
            noise = (
                rng.standard_normal((1, scale.size), np.float32) if sample else np.zeros((1, scale.size), np.float32)
            )
            x = torch.as_tensor(obs.reshape(1, -1), dtype=torch.float32)
            with torch.no_grad():
                wanted = agent.actor(x, torch.as_tensor(noise))[0] if script == "sac" else agent.actor(x)
            wanted = wanted.numpy() + (0.3 * noise * scale if script == "td3" else 0)
            wanted = wanted.reshape(action.shape).clip(env.action_space.low, env.action_space.high)
            np.testing.assert_allclose(action, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_returns_are_those_of_the_scripts_own_play(script, env_id):
    dataset = recorded(trained(script, env_id), steps=450, seed=3, exploration_noise=0.0)
    agent, args = whole_agent(script, env_id)
    env, whole = SCRIPTS[script].make_eval_env(args, 0), list(dataset)[:-1]
    assert whole
    for k, episode in enumerate(whole):
        rng = np.random.default_rng([3, 2, k])
        seed = int(rng.integers(2**31))
        rewards = SCRIPTS[script].play(agent, env, seed, *([rng] if script == "sac" else []))[0]
        assert episode.rewards.tolist() == np.float32(rewards).tolist()


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_recovered_environment_repeats_the_data(env_id):
    """Reset to an episode's seed and given its actions, the stored environment gives its observations and rewards."""
    dataset = recorded(trained("sac", env_id), steps=230)
    for evaluation in (False, True):
        env = dataset.recover_environment(eval_env=evaluation)
        assert env.spec.max_episode_steps == gym.spec(env_id).max_episode_steps
        assert env.action_space == dataset.action_space
        for seed, episode in zip(seeds(dataset), dataset, strict=True):
            obs, rewards = [env.reset(seed=seed)[0]], []
            for action in episode.actions:
                step = env.step(action)
                obs.append(step[0]), rewards.append(np.float32(step[1]))
            assert np.array_equal(obs, episode.observations)
            assert rewards == episode.rewards.tolist()


def seeds(dataset: minari.MinariDataset) -> list[int]:
    return [episode["seed"] for episode in dataset.storage.get_episode_metadata(range(len(dataset)))]


@pytest.mark.parametrize("script", SCRIPTS)
def test_same_flags_give_the_same_bits(script):
    checkpoint = trained(script, "Pendulum-v1")
    np.random.seed(6), torch.manual_seed(6)  # the global generators have no part in it
    first = recorded(checkpoint, dataset="one-v0", steps=210)
    np.random.seed(7), torch.manual_seed(7)
    second = recorded(checkpoint, dataset="two-v0", steps=210)
    other = recorded(checkpoint, dataset="three-v0", steps=210, seed=2)
    assert same(first, second)
    assert not same(first, other)
    assert len(set(seeds(first) + seeds(other))) == 4
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in Path("datasets").rglob("*.hdf5")}
    assert len(digests) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Policy files, mixtures, scores, description
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_policy_file_acts_as_the_checkpoint(script):
    checkpoint = trained(script, "Hopper-v5")
    record.main(record.Args(checkpoint=(checkpoint,), export=Path("policy.pt")))
    assert not Path("datasets").exists()
    policy, origin = torch.load("policy.pt", weights_only=True), torch.load(checkpoint)
    assert set(policy) == {"format_version", "script", "flags", "run", "parts"}
    assert policy["script"] == script
    assert set(policy["parts"]) == {"agent"}
    actor = policy["parts"]["agent"]
    assert actor.keys() == {name for name in origin["parts"]["agent"] if name.startswith("actor.")}
    assert all(value.dtype == torch.float32 for value in actor.values())
    assert not {"runs_dir", "resume", "evaluate"} & policy["flags"].keys()
    assert same(recorded(checkpoint, dataset="a-v0", steps=60), recorded("policy.pt", dataset="b-v0", steps=60))
    record.main(record.Args(checkpoint=("policy.pt",), export=Path("again.pt")))
    assert torch.load("again.pt", weights_only=True)["parts"]["agent"].keys() == actor.keys()


@pytest.mark.parametrize("script", SCRIPTS)
def test_policy_file_of_the_largest_task_is_under_a_megabyte(script):
    """Humanoid-v5's actor of default size; only its numbers are made up."""
    module, env = SCRIPTS[script], gym.make("Humanoid-v5")
    args, spaces = module.Args(env_id="Humanoid-v5"), module.action_transform(env.action_space)
    agent = module.Agent(348, *spaces, args if script == "sac" else args.hidden_size)
    state = torch.load(trained(script, "Limit-v0"))
    torch.save(state | {"flags": vars(args), "parts": {"agent": agent.state_dict()}}, "large.pt")
    record.main(record.Args(checkpoint=("large.pt",), export=Path("policy.pt")))
    assert Path("policy.pt").stat().st_size < 1_000_000 < Path("large.pt").stat().st_size


def test_a_run_folder_is_a_checkpoint():
    Path("run").mkdir()
    Path(trained("sac", "Limit-v0")).rename("run/checkpoint.pt")
    assert recorded("run", steps=6).total_steps == 6


def test_mixture_has_equal_shares_and_each_part_is_its_policys():
    first, second = trained("sac", "Pendulum-v1"), trained("td3", "Pendulum-v1")
    mixed = recorded(first, second, dataset="mixed-v0", steps=421)
    assert [len(episode.rewards) for episode in mixed] == [200, 10, 200, 11]
    assert [bool(episode.truncations[-1]) for episode in mixed] == [True] * 4
    assert len(set(seeds(mixed))) == 4
    assert mixed.storage.metadata["algorithm_name"] == "sac + td3"
    alone = recorded(first, dataset="alone-v0", steps=210)
    assert all(map(np.array_equal, content(mixed)[:10], content(alone)))
    agent = whole_agent("td3", "Pendulum-v1")[0]
    with torch.no_grad():
        modes = agent.actor(torch.as_tensor(mixed[2].observations[:-1])).numpy()
    assert 0.1 < np.std(mixed[2].actions - modes) < 0.3  # 0.1 of half the range, which is 2


def test_reference_scores_given():
    dataset = recorded(trained("sac", "Limit-v0"), steps=4, ref_min_score=-2.0, ref_max_score=8.0)
    assert minari.get_normalized_score(dataset, np.array([-2.0, 3.0, 8.0])).tolist() == [0, 0.5, 1]


def test_reference_scores_measured(monkeypatch):
    """Random actions cover the whole range from seeds of their own; the expert's is the mean return of its mode."""
    Line.seen.clear()
    expert = trained("sac", "Scaled-v0")
    monkeypatch.setattr(record, "reference_scores", measured := Spy(record.reference_scores))
    dataset = recorded(trained("sac", "Scaled-v0"), steps=4, ref_max_score=0.0, ref_episodes=30)
    drawn = np.array(Line.seen[-124:-4])  # 30 episodes of 4 steps, then the dataset's
    assert 10 <= drawn.min() < 10.1 < 19.9 < drawn.max() <= 20
    assert abs(drawn.mean() - 15) < 0.5
    rewards, position = [], 0.0
    for k, action in enumerate(drawn):
        position = (0 if k % 4 == 0 else position) + 0.1 * action.mean()
        rewards.append(-abs(position - 1) - 0.01)
    assert measured.results[0]["ref_min_score"] == pytest.approx(np.sum(rewards) / 30, rel=1e-6)
    assert minari.get_normalized_score(dataset, np.float64(0)) == 1

    dataset = recorded(expert, dataset="two-v0", steps=4, ref_min_score=-1e6, expert=expert, ref_episodes=3)
    (agent, args), rng = whole_agent("sac", "Scaled-v0"), np.random.default_rng([1, 1])
    env = sac.make_eval_env(args, 0)
    wanted = np.mean([sum(sac.play(agent, env, int(rng.integers(2**31)), None)[0]) for _ in range(3)])
    assert dataset.storage.metadata["ref_max_score"] == pytest.approx(wanted, rel=1e-12)
    assert dataset.storage.metadata["num_episodes_average_score"] == 3


class Spy:
    """A function that keeps what it returned."""

    def __init__(self, function):
        self.function, self.results = function, []

    def __call__(self, *arguments):
        self.results.append(self.function(*arguments))
        return self.results[-1]


def test_without_an_expert_there_are_no_scores_and_it_is_said(capsys):
    dataset = recorded(trained("sac", "Limit-v0"), steps=4)
    assert "warning: no reference scores. Give --expert" in capsys.readouterr().err
    assert "ref_min_score" not in dataset.storage.metadata
    with pytest.raises(ValueError, match="Reference score not provided"):
        minari.get_normalized_score(dataset, np.zeros(1))


def test_metadata_say_how_to_make_it_again():
    checkpoints = trained("sac", "Hopper-v5"), trained("td3", "Hopper-v5")
    flags = {"steps": 61, "seed": 4, "exploration_noise": 0.2, "ref_min_score": 1.0, "ref_max_score": 2.0}
    dataset = recorded(*checkpoints, author="me", **flags)
    metadata = dataset.storage.metadata
    assert metadata["author"] == {"me"}
    assert "benchmark/record.py at commit" in metadata["code_permalink"]
    assert {requirement.split("==")[0] for requirement in metadata["requirements"]} == {"gymnasium", "mujoco"}
    assert "Hopper-v5, actions sampled" in metadata["description"]
    assert "31 steps of td3_Hopper-v5.pt (td3.py, seed 1, after 60 steps" in metadata["description"]
    assert hashlib.sha256(Path(checkpoints[0]).read_bytes()).hexdigest()[:16] in metadata["description"]
    program, script, *words = shlex.split(metadata["description"].split("Made by: ")[1])
    args = tyro.cli(record.Args, args=words)
    assert (program, script) == ("python", "benchmark/record.py")
    assert args == record.Args(checkpoint=checkpoints, dataset="toy/some-v0", author="me", **flags)
    record.main(dataclasses.replace(args, dataset="again-v0"))
    assert same(dataset, minari.load_dataset("again-v0"))


def test_command_line_in_a_fresh_process():
    """From another folder, with --datasets-dir, twice --checkpoint, and without a network."""
    checkpoint = trained("sac", "Pendulum-v1")
    code = "import socket, runpy, sys; socket.socket.connect = socket.getaddrinfo = None; sys.argv = sys.argv[1:]; "
    code += "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
    flags = ["--checkpoint", checkpoint, "--checkpoint", checkpoint, "--dataset", "toy/set-v3", "--steps", "30"]
    command = [sys.executable, "-c", code, str(ROOT / "benchmark" / "record.py"), *flags, "--datasets-dir", "elsewhere"]
    done = subprocess.run([*command, "--no-sample"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "30 steps" in done.stdout
    dataset = minari.MinariDataset(Path("elsewhere/toy/set-v3/data").absolute())
    assert [len(episode.rewards) for episode in dataset] == [15, 15]
    assert not Path("datasets").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------


def refused(capsys, code=2, **flags) -> str:
    before = files()
    with pytest.raises(SystemExit) as error:
        record.main(record.Args(**flags))
    lines = capsys.readouterr().err.strip().splitlines()
    assert error.value.code == code
    assert files() == before, "something was written"
    assert lines[-1].startswith("error: ")
    assert code == 3 or (len(lines) == 1 and lines[0].count(". ") >= 1), lines
    return lines[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"checkpoint": ()}, "Give --checkpoint"),
        ({"checkpoint": ("none.pt",)}, "none.pt is missing or no checkpoint"),
        ({"checkpoint": ("text.pt",)}, "text.pt is missing or no checkpoint"),
        ({"checkpoint": ("list.pt",)}, "list.pt is missing or no checkpoint"),
        ({"checkpoint": (".",)}, "checkpoint.pt is missing"),
        ({"checkpoint": ("ppo.pt",)}, "a checkpoint of ppo_continuous.py"),
        ({"checkpoint": ("os.pt",)}, "a checkpoint of os.py"),
        ({"checkpoint": ("future.pt",)}, "format 99"),
        ({"checkpoint": ("unknown.pt",)}, "environment None-v0 cannot be made"),
        ({"checkpoint": ("callable.pt",)}, "its spec not stored"),
        ({"checkpoint": ("headless.pt",)}, "does not fit Limit-v0"),
        ({"checkpoint": ("misfit.pt",)}, "does not fit Pendulum-v1"),
        ({"checkpoint": ("good.pt", "pendulum.pt")}, "different environments: Limit-v0, Pendulum-v1"),
        ({"expert": "pendulum.pt"}, "different environments"),
        ({"expert": "none.pt"}, "none.pt is missing"),
        ({"expert": "good.pt", "ref_max_score": 1.0}, "--expert and --ref-max-score"),
        ({"ref_min_score": 1.0}, "--ref-min-score alone"),
        ({"ref_min_score": 5.0, "ref_max_score": 5.0}, "is not above"),
        ({"expert": "good.pt", "ref_episodes": 2}, "is not above"),  # every episode of Limit returns 4
        ({"ref_max_score": math.nan}, "--ref-max-score nan"),
        ({"ref_min_score": -math.inf, "ref_max_score": 1.0}, "--ref-min-score -inf"),
        ({"ref_episodes": 0, "expert": "good.pt"}, "--ref-episodes 0"),
        ({"steps": 0}, "--steps 0"),
        ({"steps": -3}, "--steps -3"),
        ({"steps": 1, "checkpoint": ("good.pt", "good.pt")}, "--steps 1"),
        ({"seed": -1}, "--seed -1"),
        ({"exploration_noise": -0.1}, "--exploration-noise -0.1"),
        ({"dataset": ""}, "--dataset and --export"),
        ({"dataset": "hopper"}, "'hopper' is no dataset id"),
        ({"dataset": "hopper/medium"}, "is no dataset id"),
        ({"dataset": "../medium-v0"}, "is no dataset id"),
        ({"dataset": "/hopper/medium-v0"}, "is no dataset id"),
        ({"dataset": "old/set-v0"}, "dataset old/set-v0 exists"),
        ({"datasets_dir": Path("text.pt")}, "cannot write in"),
        ({"export": Path("new.pt")}, "--dataset and --export"),
        ({"dataset": "", "export": Path("text.pt")}, "new file"),
        ({"dataset": "", "export": Path("none/new.pt")}, "existing folder"),
        ({"dataset": "", "export": Path("new.pt"), "checkpoint": ("good.pt", "good.pt")}, "one policy"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_written(capsys, flags, words):
    Path(trained("sac", "Limit-v0")).rename("good.pt")
    Path(trained("sac", "Pendulum-v1")).rename("pendulum.pt")
    Path("text.pt").write_text("hello")
    torch.save([1, 2], "list.pt")
    good = torch.load("good.pt")
    for name, changes in {
        "ppo": {"script": "ppo_continuous"},
        "os": {"script": "os"},
        "future": {"format_version": 99},
        "unknown": {"flags": good["flags"] | {"env_id": "None-v0"}},
        "callable": {"flags": good["flags"] | {"env_id": "toy_envs:Counter-v0"}},
        "headless": {"parts": {"agent": {}}},
        "misfit": {"flags": good["flags"] | {"env_id": "Pendulum-v1"}},
    }.items():
        torch.save(good | changes, f"{name}.pt")
    Path("datasets/old/set-v0").mkdir(parents=True)
    capsys.readouterr()
    assert words in refused(capsys, **{"checkpoint": ("good.pt",), "dataset": "toy/some-v0", **flags})


def test_environment_that_breaks_leaves_nothing(capsys):
    """In the middle of the recording, after episodes that were good."""
    Path(trained("sac", "Limit-v0")).rename("good.pt")
    good = torch.load("good.pt")
    torch.save(good | {"flags": good["flags"] | {"env_id": "Breaks-v0"}}, "breaks.pt")
    line = refused(capsys, code=3, checkpoint=("breaks.pt",), dataset="toy/some-v0", steps=100)
    assert "observation/reward not finite" in line


def test_environment_that_breaks_under_random_actions_leaves_nothing(capsys):
    """While the reference score of random play is measured."""
    Path(trained("sac", "Limit-v0")).rename("good.pt")
    good = torch.load("good.pt")
    torch.save(good | {"flags": good["flags"] | {"env_id": "Breaks-v0"}}, "breaks.pt")
    line = refused(capsys, code=3, checkpoint=("breaks.pt",), dataset="toy/some-v0", steps=4, ref_max_score=9.0)
    assert "at random play" in line and "not finite" in line


@pytest.mark.parametrize(("name", "low", "high"), [("hopper_medium", 1100, 1500), ("hopper_expert", 2900, 3300)])
def test_committed_policies_play_as_their_names_say(name, low, high):
    """The mode's return over five starts; the actor alone, under a megabyte."""
    file = ROOT / "benchmark" / "policies" / f"{name}.pt"
    assert file.stat().st_size < 1e6
    policy = record.load_policy(str(file))
    env = policy.make_env()
    assert low < np.mean([policy.play(env, seed, None) for seed in range(5)]) < high


def test_committed_replay_is_one_run_of_hopper():
    file = ROOT / "benchmark" / "policies" / "hopper_replay.npz"
    assert file.stat().st_size < 12e6
    with np.load(file) as archive:
        data = dict(archive)
    assert {len(column) for column in data.values()} == {100_000}
    goes_on = ~(data["terminations"] | data["truncations"])[:-1]
    assert np.array_equal(data["next_observations"][:-1][goes_on], data["observations"][1:][goes_on])
    assert not np.array_equal(data["next_observations"][:-1][~goes_on], data["observations"][1:][~goes_on])
    assert data["observations"].shape[1:] == (11,) and np.abs(data["actions"]).max() <= 1


def test_write_that_fails_leaves_no_dataset(monkeypatch, capsys):
    def full(*arguments, **keywords):
        raise OSError("no space left on device")

    from minari.dataset._storages.hdf5_storage import HDF5Storage

    monkeypatch.setattr(HDF5Storage, "update_episodes", full)
    checkpoint = trained("sac", "Limit-v0")
    with pytest.raises(SystemExit, match="3"):
        recorded(checkpoint, steps=4)
    assert "no space left on device" in capsys.readouterr().err
    assert not Path("datasets/toy/some-v0").exists()
    monkeypatch.undo()


# ---------------------------------------------------------------------------------------------------------------------
# sb3.py
# ---------------------------------------------------------------------------------------------------------------------


def model_of(algorithm: str, **given):
    """The model that benchmark/sb3.py would train, and our flags."""
    module = SCRIPTS[algorithm]
    flags = sb3.flags_of_script(sb3.Args(algorithm=algorithm, env_id="Hopper-v5", device="cpu", **given), module)
    flags.device = module.choose_device(flags.device)
    env = module.make_eval_env(flags, 0)
    return sb3.make_model(algorithm, sb3.hyperparameters(algorithm, flags, env.action_space.shape), env), flags


COMMON = {"buffer_size": 5000, "batch_size": 17, "learning_starts": 123, "gamma": 0.9, "tau": 0.1, "hidden_size": 40}


@pytest.mark.parametrize("given", [{}, {**COMMON, "seed": 9, "learning_rate": 1e-2}])
@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_hyperparameters_arrive(algorithm, given):
    model, flags = model_of(algorithm, **given)
    for name in ("buffer_size", "batch_size", "learning_starts", "gamma", "tau", "seed"):
        assert getattr(model, name) == getattr(flags, name) == given.get(name, getattr(SCRIPTS[algorithm].Args(), name))
    assert (model.train_freq.frequency, model.train_freq.unit.value, model.gradient_steps) == (1, "step", 1)
    rate = given.get("learning_rate", 3e-4)
    optimizers = [model.actor.optimizer, model.critic.optimizer]
    optimizers += [model.ent_coef_optimizer] if algorithm == "sac" else []
    assert all(type(optimizer) is torch.optim.Adam for optimizer in optimizers)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [rate] * len(optimizers)
    assert all(optimizer.param_groups[0]["eps"] == 1e-8 for optimizer in optimizers)
    assert not model.use_sde
    assert model.replay_buffer.handle_timeout_termination
    scale = np.ones(3, np.float32)
    agent = SCRIPTS[algorithm].Agent(11, scale, scale, flags if algorithm == "sac" else flags.hidden_size)
    for theirs, ours in ((model.critic, agent.critics), (model.actor, agent.actor)):
        numbers = [sum(p.numel() for p in network.parameters()) for network in (theirs, ours)]
        assert numbers[0] == numbers[1]


def test_own_hyperparameters_of_sac_arrive():
    model, flags = model_of("sac")
    assert model.log_ent_coef.item() == math.log(flags.alpha) == 0
    assert model.target_entropy == -3
    model, _ = model_of("sac", alpha=0.2, target_entropy=-1.5)
    assert model.log_ent_coef.exp().item() == pytest.approx(0.2)
    assert model.target_entropy == -1.5
    model, _ = model_of("sac", alpha=0.2, autotune=False)
    assert model.ent_coef_optimizer is None
    assert model.ent_coef_tensor.item() == pytest.approx(0.2)


def test_own_hyperparameters_of_td3_arrive():
    model, _ = model_of("td3")
    assert (model.policy_delay, model.target_policy_noise, model.target_noise_clip) == (2, 0.2, 0.5)
    draws = np.array([model.action_noise() for _ in range(2000)])
    assert draws.shape == (2000, 3)
    assert draws.std(0) == pytest.approx([0.1] * 3, rel=0.1)
    model, _ = model_of("td3", policy_frequency=3, policy_noise=0.4, noise_clip=0.6, exploration_noise=0.7)
    assert (model.policy_delay, model.target_policy_noise, model.target_noise_clip) == (3, 0.4, 0.6)
    assert repr(model.action_noise) == "NormalActionNoise(mu=[0. 0. 0.], sigma=[0.7 0.7 0.7])"


@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_evaluation_starts_as_the_scripts_does(algorithm, monkeypatch):
    model, _ = model_of(algorithm, seed=3)
    agent, args = whole_agent(algorithm, "Hopper-v5")
    args = dataclasses.replace(args, seed=3, eval_episodes=4)
    env, module = gym.make("Hopper-v5"), SCRIPTS[algorithm]
    starts = []
    monkeypatch.setattr(env, "reset", lambda *, seed: starts.append(seed) or type(env).reset(env, seed=seed))
    monkeypatch.setattr(module, "make_eval_env", lambda *arguments: env)
    module.evaluate(args, agent, Path(), "")
    ours = starts[:4]
    starts.clear()
    returns, lengths = sb3.evaluate(model, env, args)
    assert starts == ours
    assert len(set(starts)) == 4
    assert (returns, lengths) == sb3.evaluate(model, env, args)  # nothing is sampled
    total, (obs, _) = 0.0, env.reset(seed=starts[0])
    for _ in range(lengths[0]):
        obs, reward, terminated, truncated, _ = env.step(model.predict(obs, deterministic=True)[0])
        total += reward
    assert (total, terminated or truncated) == (returns[0], True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"policy_frequency": 3}, "--policy-frequency means nothing to Stable-Baselines3's SAC"),
        ({"exploration_noise": 0.3}, "--exploration-noise means nothing"),
        ({"algorithm": "td3", "alpha": 0.3}, "--alpha means nothing to Stable-Baselines3's TD3"),
        ({"env_id": "None-v0"}, "None-v0"),
        ({"env_id": "CartPole-v1"}, "dqn.py"),
        ({"total_timesteps": 0}, "--total-timesteps 0"),
        ({"eval_episodes": 0}, "--eval-episodes 0"),
        ({"tau": 2.0}, "--tau 2.0"),
        ({"device": "none"}, "--device none"),
        ({"runs_dir": "file/runs", "total_timesteps": 6000}, "is not writable"),
    ],
)
def test_bad_input_of_sb3_is_refused(capsys, flags, words):
    Path("file").touch()
    before = files()
    with pytest.raises(SystemExit) as error:
        sb3.main(sb3.Args(**{"env_id": "Pendulum-v1", **flags}))
    assert error.value.code == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]
    assert files() == before


@pytest.mark.parametrize("algorithm", SCRIPTS)
def test_run_py_collects_its_runs_and_plot_py_draws_them(algorithm, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    flags = f"--algorithm {algorithm} --total-timesteps 80 --learning-starts 40 --eval-episodes 3 --eval-every 32"
    task, folders = "toy_envs:Line-v0", {"runs_dir": Path("runs"), "results_dir": Path("results")}
    args = run.Args(scripts=(str(ROOT / "benchmark" / "sb3.py"),), tasks=(task,), seeds=1, name=algorithm, **folders)
    assert run.main(dataclasses.replace(args, flags=f"{flags} --device cpu")) == 0, capsys.readouterr().out
    result = json.loads(Path(f"results/sb3+{algorithm}/{task}__1.json").read_text())
    assert (result["failed"], result["steps"], result["seed"], result["hardware"]["device"]) == (False, 80, 1, "cpu")
    assert [step for step, _ in result["evaluation_curve"]] == [0, 32, 64, 80]
    assert len(result["final_evaluation"]) == 3
    assert result["evaluation_curve"][-1][1] == result["final"] == np.mean(result["final_evaluation"])
    assert [step for step, _ in result["learning_curve"]] == [16, 32, 48, 64, 80]  # Line's episodes have 16 steps
    assert result["training_return"] == pytest.approx(np.mean([value for _, value in result["learning_curve"]]))
    assert result["steps_per_second"] == pytest.approx(80 / result["wall_seconds"])
    assert (result["flags"]["algorithm"], result["flags"]["learning_starts"]) == (algorithm, 40)
    assert result["flags"]["learning_rate"] == 3e-4
    assert result["versions"]["stable_baselines3"] and " python benchmark/sb3.py --env-id" in result["command"]
    assert run.main(dataclasses.replace(args, flags=f"{flags} --device cpu")) == 0
    assert "done" in capsys.readouterr().out
    plot.draw_run(next(Path("runs").glob("toy_envs*")))
    ours = Path("results", algorithm, f"{task}__1.json")
    ours.parent.mkdir()
    ours.write_text(json.dumps(result | {"variant": algorithm}))
    loaded = plot.load_results(Path("results"), algorithm)
    assert list(loaded) == [algorithm, f"sb3+{algorithm}"]
    assert f"| sb3+{algorithm} | {task} | 1 | 80 |" in plot.table(algorithm, loaded)
    assert plot.draw_results(loaded, Path("images/both.png")).exists()
    assert list(plot.load_results(Path("results"), "sb3")) == [f"sb3+{algorithm}"]
