"""What every script must do, whatever it learns: reproducible, resumable, safe against faults, honest about bad input.

The scripts and what is particular to each are in script_cases.py. Whole runs of `main`, and of the script as a process.
"""

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import sync
import torch
from harness import (
    DEVICE,
    SCRIPTS_DIR,
    Process,
    checkpoint,
    equal,
    files,
    read,
    rows,
    run_dirs,
    saved_step,
    tensors,
    values,
    wait_until,
    words,
    wrap,
)
from script_cases import SCRIPTS
from toy_envs import NanReset

LARGEST_SEED = 2**31 - 1


def flags_id(value) -> str:
    """Flags and what belongs to them as a part of the name of a test case."""
    flags = ",".join(f"{name}={flag}" for name, flag in value.items()) if isinstance(value, dict) else ""
    return (flags or ",".join(sorted(value)) if isinstance(value, dict | set) else str(value))[:60]


def test_every_script_is_tested():
    assert {f"{script.name}.py" for script in SCRIPTS} == {script.name for script in sync.find_scripts(SCRIPTS_DIR)}


# ---- reproducible, evaluation apart --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "flags"),
    [(script, flags) for script in SCRIPTS for flags in (script.varied, *script.real)],
    indirect=["script"],
    ids=flags_id,
)
def test_same_seed_twice_is_equal_to_the_bit_and_another_seed_is_not(script, flags):
    first, second, third = (script.train(**flags, seed=seed)[1] for seed in (1, 1, 2))
    assert rows(first) == rows(second)
    assert rows(first) != rows(third)
    assert equal(checkpoint(first)["parts"], checkpoint(second)["parts"])
    assert not equal(checkpoint(first)["parts"], checkpoint(third)["parts"])


def test_evaluation_changes_no_training_number(script):
    without, often = (
        script.train(**script.varied, **more)[1] for more in ({}, {"eval_every": script.unit, "eval_episodes": 3})
    )
    assert len(values(often, "eval/episodic_return")) > len(values(without, "eval/episodic_return")) == 1
    assert [r for r in rows(often) if "eval/" not in r[1]] == [r for r in rows(without) if "eval/" not in r[1]]
    assert equal(checkpoint(often)["parts"], checkpoint(without)["parts"])


def test_evaluate_prints_the_returns_of_the_run_and_writes_nothing(script):
    """All that acting needs travels in the checkpoint: another process gets the returns that training ended with."""
    flags = {**script.tiny, **script.process, "eval_episodes": 3}
    code, _, errors = script.start(**flags).wait()
    assert code == 0, errors
    run_dir, before = run_dirs()[-1], files()
    code, out, errors = script.start(evaluate=run_dir).wait()
    assert code == 0, errors
    expected, printed = read(run_dir, "summary")["final_evaluation"], returns_in(out)
    assert printed == pytest.approx([np.mean(expected), *expected], abs=0.006)
    other_seed = returns_in(script.start(evaluate=run_dir, seed=9).wait()[1])
    assert len(other_seed) == 4 and other_seed[0] != pytest.approx(np.mean(expected), abs=0.006)
    assert files() == before


def returns_in(out: str) -> list[float]:
    """The numbers of the line `...: mean 2.00 of 1.00 2.00 3.00`."""
    return [float(word) for word in out.split("mean ")[1].replace(" of ", " ").split()]


def test_evaluate_records_if_asked(script):
    _, run_dir = script.train()
    before = files(run_dir).keys()
    script.main(evaluate=str(run_dir), capture_video=True)
    added = [path for path in files(run_dir).keys() - before if path.is_file()]
    assert len(added) == 1 and added[0].match("videos/evaluate_*.mp4") and added[0].stat().st_size > 0


def test_policy_used_elsewhere_as_the_page_says_acts_as_in_evaluation(script, monkeypatch):
    """The last Python block of docs/X.md, on an environment whose action range is not [-1, 1] where that is allowed."""
    page = (Path(__file__).parents[1] / "docs" / f"{script.name}.md").read_text()
    flags = {"env_id": "toy_envs:LineScaled-v0"} if script.name in ("sac", "td3") else {}
    script.train(**flags)[1].rename("runs/NAME")
    exec(page.split("```python\n")[-1].split("```")[0], namespace := {})
    pairs = []

    class Seen(gym.Wrapper):
        def reset(self, **options):
            self.obs, info = self.env.reset(**options)
            return self.obs, info

        def step(self, action):
            pairs.append((np.array(self.obs), action))
            self.obs, *rest = self.env.step(action)
            return self.obs, *rest

    wrap(monkeypatch, script.module, "make_eval_env", lambda number, real, *a: Seen(real(*a)))
    script.main(evaluate="runs/NAME")
    assert pairs
    for obs, action in pairs[: len(pairs) // (2 if script.name == "sac" else 1)]:  # sac.py then samples
        ours = namespace["act"](obs)
        if script.name == "ppo_atari":  # sampled
            assert isinstance(ours, int) and 0 <= ours < 3
        else:
            assert ours == pytest.approx(action.ravel(), abs=1e-5)


# ---- resume --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("script", "flags", "in_mid_course"),
    [(script, *case) for script in SCRIPTS for case in script.resume],
    indirect=["script"],
    ids=flags_id,
)
def test_resumed_run_equals_the_uninterrupted_one(script, flags, in_mid_course, signum, monkeypatch, capsys):
    """On an environment whose episodes end with the rollout nothing is lost: metrics.csv is equal to the bit.

    Everything with a course of its own (schedules, statistics, coefficients) is somewhere on its way at the stop.
    """
    whole = script.train(seed=3, **flags)[1]
    # An off-policy script stops after the step: the last one of the second unit, with which episodes end, too.
    memory = getattr(script.module, "ReplayMemory", None)
    owner, name, call = (memory, "add", script.unit) if memory else (script.module, "update", script.updates * 3 // 2)

    def signalled(number, real, *arguments):
        if number == call:
            signal.raise_signal(signum)
        return real(*arguments)

    wrap(monkeypatch, owner, name, signalled)
    with pytest.raises(SystemExit) as stop:
        script.train(seed=3, **flags)
    assert stop.value.code == 128 + signum
    stopped = run_dirs()[-1]
    assert f"--resume {stopped.as_posix()}" in capsys.readouterr().out
    assert 0 < saved_step(stopped) < 4 * script.unit
    assert len(rows(stopped)) < len(rows(whole)) and not (stopped / "summary.json").exists()
    script.main(resume=str(stopped))
    assert rows(stopped) == rows(whole)
    assert equal(checkpoint(stopped)["parts"], checkpoint(whole)["parts"])
    for metric in in_mid_course:
        assert len(set(values(whole, metric))) > 1
    assert read(stopped, "summary")["final_evaluation"] == read(whole, "summary")["final_evaluation"]


@pytest.mark.parametrize("number", [1, 3])
def test_signal_during_an_evaluation_is_no_less_resumable(script, number, monkeypatch):
    """What is evaluated has been saved, or not, before the signal came: only the next look at it may end the run."""

    def signalled(call, real, *arguments):
        if call == number:
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    wrap(monkeypatch, script.module, "evaluate", signalled)
    with pytest.raises(SystemExit) as stop:
        script.train(eval_every=script.unit)
    (run_dir,) = run_dirs()
    assert stop.value.code == 128 + signal.SIGTERM
    assert (number - 1) * script.unit < saved_step(run_dir) <= number * script.unit
    assert script.main(resume=str(run_dir))["global_step"] == 4 * script.unit
    evaluated = [int(step) for step, metric, _ in rows(run_dir) if metric == "eval/episodic_return"]
    assert evaluated == [k * script.unit for k in range(5)]


def test_resume_elsewhere_goes_on_and_two_resumes_are_equal(script):
    """Where episodes do not end with the rollout they start anew; everything else goes on."""
    _, run_dir = script.train(**script.varied, checkpoint_every=script.unit)
    copy = Path("runs/copy")
    shutil.copytree(run_dir, copy)
    for folder in (run_dir, copy):
        script.main(resume=str(folder), **script.units(8))
    assert rows(run_dir) == rows(copy)
    steps = [int(row[0]) for row in rows(run_dir)]
    assert steps == sorted(steps) and steps[-1] == 8 * script.unit and 5 * script.unit in steps
    assert checkpoint(run_dir)["flags"][script.budget] == 8 * script.unit


def test_resumed_environments_do_not_repeat_the_first_episodes(script, monkeypatch):
    seeds = []

    def seen(number, real, *arguments):
        envs = real(*arguments)
        reset = envs.reset
        envs.reset = lambda *, seed=None, options=None: seeds.append(seed) or reset(seed=seed, options=options)
        return envs

    wrap(monkeypatch, script.module, "make_envs", seen)
    _, run_dir = script.train(seed=7)
    script.main(resume=str(run_dir), **script.units(8))
    assert seeds == [7, 7 + 4 * script.unit]


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.schedule], indirect=True, ids=str)
def test_schedule_of_a_resumed_run_is_that_of_its_new_budget(script):
    flags, metric = script.schedule
    _, run_dir = script.train(**flags, checkpoint_every=script.unit)
    script.main(resume=str(run_dir), **script.units(8))
    _, whole = script.train(**flags, **script.units(8))
    course, whole_course = (values(folder, metric) for folder in (run_dir, whole))
    assert course[4:] == whole_course[4:] and course[:4] != whole_course[:4] and course[3] != course[4]


def test_resume_cuts_what_was_logged_after_the_checkpoint(script):
    _, run_dir = script.train()
    before = rows(run_dir)
    with (run_dir / "metrics.csv").open("a") as file:  # the last line torn by a kill
        file.write(f"{8 * script.unit},losses/x,1.0\n{5 * script.unit - 1},charts/episodic_return,5.0\n3")
    script.main(resume=str(run_dir / "checkpoint.pt"), **script.units(5))
    after = rows(run_dir)
    assert after[: len(before)] == before and len(after) > len(before)
    assert not {str(8 * script.unit), str(5 * script.unit - 1), "3"} & {row[0] for row in after}


def test_resume_of_a_finished_run_only_evaluates(script):
    metrics, run_dir = script.train()
    logged, parts = rows(run_dir), checkpoint(run_dir)["parts"]
    again = script.main(resume=str(run_dir))
    assert again["eval/episodic_return"] == metrics["eval/episodic_return"]
    evaluation = [row for row in logged if row[0] == logged[-1][0] and row[1].startswith("eval/")]
    assert rows(run_dir) == [*logged, *evaluation]  # nothing trained; the final evaluation once more
    assert equal(checkpoint(run_dir)["parts"], parts)


def test_resume_takes_its_flags_from_the_checkpoint(script, capsys):
    flag, rate = f"--{script.rate.replace('_', '-')}", {script.rate: 1e-3}
    _, run_dir = script.train(**rate, exp_name="x")
    resumed = script.main(resume=str(run_dir), log_every=script.unit // 2, **script.units(5))
    assert resumed["charts/learning_rate"] == script.train(**rate, **script.units(5))[0]["charts/learning_rate"]
    assert read(run_dir, "config")["flags"] == vars(script.args(**rate, exp_name="x", log_every=script.unit // 2,
                                                                **script.units(5)))  # fmt: skip
    line = script.stopped(capsys, 2, script.module.Args(resume=str(run_dir), **{script.rate: 2e-3}))
    assert "0.002" in line and "0.001" in line and flag in line


def test_copied_checkpoint_overwrites_nothing(script):
    """A checkpoint outside its run's folder goes on in a new folder, with its counters."""
    ours, other = script.train()[1], script.train(seed=2)[1]
    copy = shutil.copy(ours / "checkpoint.pt", other / "backup.pt")
    before = files(other)
    assert script.main(resume=copy, **script.units(5))["global_step"] == 5 * script.unit
    assert files(other) == before
    steps = [int(row[0]) for row in rows(run_dirs()[-1])]
    assert len(run_dirs()) == 3 and 4 * script.unit < min(steps) <= max(steps) == 5 * script.unit


def test_checkpoint_of_a_version_with_other_flags(script):
    """A flag that is gone is passed over, one that is new has its default."""
    _, run_dir = script.train(exp_name="x")
    state = checkpoint(run_dir)
    state["flags"]["gone"] = 1
    del state["flags"]["exp_name"]
    torch.save(state, run_dir / "checkpoint.pt")
    assert script.main(resume=str(run_dir), **script.units(5))["global_step"] == 5 * script.unit
    assert checkpoint(run_dir)["flags"] == vars(script.args(**script.units(5)))


def test_log_with_a_blank_line_is_read(script):
    _, run_dir = script.train()
    with (run_dir / "metrics.csv").open("a") as file:
        file.write("\n")
    assert script.main(resume=str(run_dir), **script.units(5))["global_step"] == 5 * script.unit


# ---- faults --------------------------------------------------------------------------------------------------------


def test_nan_in_one_minibatch_is_skipped_and_counted(script, monkeypatch):
    """The step leaves no trace in parameters, moments and Adam's count; the means leave it out."""
    name, call, bad_updates = script.poisoned
    skipped = []

    def poisoned(number, real, *inputs):
        result = real(*inputs)
        if number == call:
            tensors(result)[0].view(-1)[7] = torch.nan
        return result

    def watched(number, real, *arguments):
        (optimizer,) = (x for x in arguments if isinstance(x, torch.optim.Optimizer))

        def state() -> list[torch.Tensor]:
            return [x.detach().clone() for x in tensors([optimizer.param_groups, optimizer.state_dict()])]

        before = state()
        norm, skip = real(*arguments)
        assert equal(before, state()) == bool(skip)
        skipped.append(bool(skip))
        return norm, skip

    wrap(monkeypatch, script.module, name, poisoned)
    wrap(monkeypatch, script.module, "gradient_step", watched)
    _, run_dir = script.train(max_skipped_updates=3)
    assert values(run_dir, "losses/skipped_updates") == [0, bad_updates, bad_updates, bad_updates]
    assert sum(skipped) == bad_updates and len(skipped) >= 4 * script.updates
    assert all(torch.isfinite(x).all() for x in tensors(checkpoint(run_dir)["parts"]))
    assert all(np.isfinite(float(value)) for _, name, value in rows(run_dir) if name.startswith("losses/"))


def test_nan_in_every_minibatch_stops_with_the_first_culprit_and_keeps_the_checkpoint(script, monkeypatch, capsys):
    """Half the updates of the third unit are bad, which is saved, with parameters that no bad update has touched."""
    start, most = script.updates * 5 // 2, script.updates // 2 + 1
    wrap(monkeypatch, script.module, script.loss,
         lambda number, real, *a: real(*a) * (torch.nan if number > start else 1))  # fmt: skip
    args = script.args(max_skipped_updates=most, checkpoint_every=script.unit)
    line = script.stopped(capsys, 3, args)
    assert f"losses/{script.loss}" in line and str(most) in line
    assert saved_step(run_dirs()[-1]) == 3 * script.unit
    assert all(torch.isfinite(x).all() for x in tensors(checkpoint(run_dirs()[-1])["parts"]))


@pytest.mark.parametrize(
    ("script", "env_id", "word"),
    [(script, *case) for script in SCRIPTS for case in script.faults.items()],
    indirect=["script"],
    ids=str,
)
def test_faulty_environment_stops_before_anything_has_seen_it(script, env_id, word, monkeypatch, capsys):
    if hasattr(script.module, "RunningMeanStd"):
        wrap(monkeypatch, script.module.RunningMeanStd, "update",
             lambda number, real, self, x: real(self, x) if np.isfinite(x).all() else 1 / 0)  # fmt: skip
    line = script.stopped(capsys, 3, script.args(env_id=env_id, checkpoint_every=script.unit))
    assert word in line and env_id in line and "at step 140" in line  # two environments, 70 good steps each
    assert saved_step(run_dirs()[-1]) == 128
    assert all(torch.isfinite(x).all() for x in tensors(checkpoint(run_dirs()[-1])["parts"]))


def test_faulty_environment_in_evaluation_stops_too(script, capsys):
    args = script.args(env_id=script.evaluation_fault, eval_every=script.unit)
    assert "simulator broke" in script.stopped(capsys, 3, args)


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.name != "ppo_atari"], indirect=True, ids=str)  # (bytes)
def test_nan_at_the_reset_of_an_evaluation_stops(script, monkeypatch, capsys):
    wrap(monkeypatch, script.module, "make_eval_env", lambda number, real, *a: NanReset(real(*a)))
    line = script.stopped(capsys, 3, script.args(env_id="toy_envs:Constant-v0"))  # where all later steps are good
    assert "in evaluation" in line and "not finite" in line


def test_second_signal_quits_at_once_but_not_the_same_one_sent_twice(script, monkeypatch):
    """Launchers may send a signal to all processes and through their parent; a person takes longer to repeat it."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with contextlib.ExitStack() as stack:
        caught = script.module.catch_signals(stack)
        for clock[0] in (100.0, 100.0, 100.9):
            signal.raise_signal(signal.SIGTERM)
        assert caught[0] == signal.SIGTERM
        clock[0] = 102.0
        with pytest.raises(SystemExit) as stop:
            signal.raise_signal(signal.SIGINT)
    assert stop.value.code == 130


def test_evaluation_that_meets_a_nan_stops(script, monkeypatch, capsys):
    wrap(monkeypatch, script.module, "make_eval_env",
         lambda number, real, *a: gym.wrappers.TransformReward(real(*a), lambda reward: np.nan))  # fmt: skip
    assert "in evaluation" in script.stopped(capsys, 3, script.args())


def test_full_disk_leaves_the_old_checkpoint_and_says_so(script, monkeypatch, capsys):
    def full(number, real, fileno):
        if number > 4:  # metrics.csv, config.json and two checkpoints
            raise OSError(28, "No space left on device")
        real(fileno)

    wrap(monkeypatch, os, "fsync", full)
    line = script.stopped(capsys, 3, script.args(checkpoint_every=script.unit))
    assert "No space left" in line and "checkpoint.pt" in line
    assert saved_step(run_dirs()[-1]) == 2 * script.unit
    assert not list(run_dirs()[-1].glob("*.tmp"))


def test_disk_that_is_full_from_the_start(script, monkeypatch, capsys):
    """TensorBoard's own complaint at the end does not hide the exit code."""

    def full(number, real, self, mode="r", **options):
        if self.name == "metrics.csv" and "a" in mode:
            raise OSError(28, "No space left on device")
        return real(self, mode, **options)

    def full_at_close(number, real, self):
        raise OSError(28, "No space left on device")

    wrap(monkeypatch, script.module.Path, "open", full)
    wrap(monkeypatch, script.module.SummaryWriter, "close", full_at_close)
    assert "metrics.csv" in script.stopped(capsys, 3, script.args())


def test_fifty_kills_of_a_checkpoint_writer_leave_a_whole_checkpoint(script):
    network, run = torch.nn.Linear(100, 100), types.SimpleNamespace(global_step=0)
    path, rng = Path("checkpoint.pt"), np.random.default_rng(0)

    def save() -> None:
        script.module.save_checkpoint(path, script.args(), run, {"network": network}, rng)

    save()
    seen = set()
    for kill in range(50):
        child = os.fork()
        if child == 0:
            while True:
                run.global_step += 1
                save()
        time.sleep(rng.uniform(0.002, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        state = torch.load(path, weights_only=True)
        seen.add(state["run"]["global_step"])
        assert equal(state["parts"]["network"], network.state_dict()), kill
    assert len(seen) > 3  # the kills really came while it was writing


def test_three_kills_of_the_whole_script(script):
    endless = {**script.units(4000), "checkpoint_every": script.unit}
    process = script.start(**script.tiny | script.process | endless)
    steps = [0]
    for kill in range(3):
        wait_until(lambda: any(saved_step(path.parent) > steps[-1] for path in Path().glob("runs/*/checkpoint.pt")))
        time.sleep(0.1 * kill)
        process.send(signal.SIGKILL)
        assert process.wait()[0] == -signal.SIGKILL
        steps.append(saved_step(run_dirs()[0]))
        process = script.start(resume=run_dirs()[0])
    assert steps == sorted(set(steps)) and len(run_dirs()) == 1
    Process.end_all()
    logged = [int(row[0]) for row in rows(run_dirs()[0])]
    assert logged == sorted(logged)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_prints_the_command_that_resumes(script, signum):
    process = script.start(**script.tiny | script.process | script.units(4000) | {"runs_dir": "my runs"})
    wait_until(lambda: any("SPS" in path.read_text() for path in Path().glob("my runs/*/metrics.csv")))
    process.send(signum)
    code, out, errors = process.wait()
    assert code == 128 + signum, errors
    path, *resume = shlex.split(out.strip().splitlines()[-1].split("Continue: python ")[1])
    run_dir = run_dirs("my runs")[0]
    budget = saved_step(run_dir) + script.unit
    code, _, errors = Process(Path(path), [*resume, *words({script.budget: budget})]).wait()
    assert code == 0, errors
    assert read(run_dir, "summary")["steps"] == budget


# ---- bad input -----------------------------------------------------------------------------------------------------

BAD_INPUT = [
    ({"seed": -1}, "--seed"),
    ({"seed": 2**31}, "--seed"),
    ({"learning_rate": -1e-3}, "--learning-rate"),
    ({"learning_rate": float("nan")}, "--learning-rate nan"),
    ({"learning_rate": float("inf")}, "--learning-rate inf"),
    ({"total_timesteps": -1}, "--total-timesteps"),
    ({"env_id": "NoSuchEnv-v0"}, "NoSuchEnv"),
    ({"env_id": "no_such_module:Env-v0"}, "no_such_module"),
    ({"env_id": ""}, "--env-id"),
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
    ({"resume": "other_script.pt"}, "another.py"),
    ({"resume": "other_format.pt"}, "format 99"),
    ({"evaluate": "no_checkpoint.pt"}, "no_checkpoint.pt"),
]


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (script, flags, message)
        for script in SCRIPTS
        for flags, message in (*BAD_INPUT, *script.bad_input)
        if flags.keys() <= script.flags
    ],
    indirect=["script"],
    ids=flags_id,
)
def test_bad_input_is_refused_in_one_line_before_anything_is_written(script, capsys, flags, message):
    Path("a_file").write_text("not a checkpoint")
    torch.save({"script": "another", "format_version": 1, "flags": {}}, "other_script.pt")
    torch.save({"script": script.name, "format_version": 99, "flags": {}}, "other_format.pt")
    torch.save([1, 2], "no_checkpoint.pt")
    assert message in script.refused(capsys, **flags)


def test_cuda_is_refused_without_one(script, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cuda" in script.refused(capsys, device="cuda")


def test_checkpoint_of_another_environment_is_refused(script, capsys):
    _, run_dir = script.train()
    before = files(run_dir)

    def refused(**flags) -> str:
        return script.stopped(capsys, 2, script.module.Args(**flags))

    assert script.other_env in refused(env_id=script.other_env, resume=str(run_dir))
    state = checkpoint(run_dir)
    state["flags"]["env_id"] = script.other_env  # as if the id now named an environment of other shape
    torch.save(state, "moved.pt")
    for flag in ("resume", "evaluate"):
        assert "does not fit" in refused(**{flag: "moved.pt"})
    assert "exclude" in refused(resume=str(run_dir), evaluate=str(run_dir))
    assert files(run_dir) == before


@pytest.mark.parametrize("mode", ["NEXT_STEP", "DISABLED", None])
def test_other_autoreset_is_refused(script, capsys, monkeypatch, mode):
    def other(number, real, *arguments):
        envs = real(*arguments)
        envs.metadata = {"autoreset_mode": gym.vector.AutoresetMode[mode]} if mode else {}
        return envs

    wrap(monkeypatch, script.module, "make_envs", other)
    assert "SAME_STEP" in script.refused(capsys)


def test_other_spaces_in_evaluation_are_refused(script, capsys, monkeypatch):
    other = script.module.Args(env_id=script.other_env)
    wrap(monkeypatch, script.module, "make_eval_env", lambda number, real, args, *rest: real(other, *rest))
    assert "evaluation differs" in script.refused(capsys, eval_every=0)


def test_video_that_cannot_be_rendered_is_refused(script, capsys):
    assert script.unrenderable in script.refused(capsys, env_id=script.unrenderable, capture_video=True)


def test_weights_and_biases_without_login_or_package_is_refused(script, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(login=lambda prompt: False))
    assert "wandb login" in script.refused(capsys, track=True)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "--track" in script.refused(capsys, track=True)


def test_evaluation_wants_neither_weights_and_biases_nor_a_compiler(script, monkeypatch):
    """A run that was tracked and compiled can be played where both are missing: its flags come from the checkpoint."""
    _, run_dir = script.train()
    state = checkpoint(run_dir)
    state["flags"] |= {"track": True, "compile": True}
    torch.save(state, run_dir / "checkpoint.pt")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(torch, "compile", None)
    assert "eval/episodic_return" in script.main(evaluate=str(run_dir))


def test_compile_without_a_compiler_is_refused(script, monkeypatch, capsys):
    def broken(function):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    assert "C++ compiler" in script.refused(capsys, compile=True)


def test_exit_code_and_stderr_of_the_process(script):
    code, out, errors = script.start(eval_episodes=0).wait()
    assert (code, out, errors.count("\n")) == (2, "", 1) and errors.startswith("error: --eval-episodes 0")
    assert script.start(no_such_flag=True).wait()[0] == 2
    assert list(Path().iterdir()) == []


# ---- every flag does something -------------------------------------------------------------------------------------

# Flags that leave the metrics alone: the tests of this file try them.
OTHER_FLAGS = {
    "exp_name", "runs_dir", "torch_deterministic", "checkpoint_every", "device", "compile", "track",
    "wandb_project_name", "wandb_entity", "capture_video", "max_skipped_updates", "resume", "evaluate",
}  # fmt: skip


def changes(script) -> dict:
    """For each flag (its changed value, the flags that it needs)."""
    table = {"seed": 2, "log_every": 2 * script.unit, "eval_every": 2 * script.unit, **script.changed}
    return {name: value if isinstance(value, tuple) else (value, {}) for name, value in table.items()}


@pytest.mark.parametrize(
    ("script", "flag"),
    [(script, flag) for script in SCRIPTS for flag in changes(script)],
    indirect=["script"],
    ids=str,
)
def test_flag_changes_the_metrics(script, flag):
    value, needs = changes(script)[flag]
    assert script.plain_rows(**needs) != rows(script.train(**{**needs, flag: value})[1])


def test_every_flag_is_tried(script):
    assert script.flags == OTHER_FLAGS | changes(script).keys() | script.own_flags


def test_run_folder_is_named_by_flags(script, monkeypatch):
    """The folder may be deep, and hold spaces and an apostrophe; a slash in an environment's id becomes a dash."""
    assert script.train()[1].name.startswith(f"{script.tiny['env_id']}__{script.name}__1__")
    spec = dataclasses.replace(gym.spec(script.tiny["env_id"].split(":")[-1]), id="space/Toy-v0")
    monkeypatch.setitem(gym.registry, spec.id, spec)
    script.train(env_id=spec.id, exp_name="mine", seed=7, runs_dir="else where's/deep")
    run_dir = run_dirs("else where's/deep")[0]
    assert run_dir.name.startswith("space-Toy-v0__mine__7__") and (run_dir / "summary.json").exists()
    assert len(run_dirs()) == 1


def test_torch_deterministic(script):
    for flag in (False, True):
        torch.utils.deterministic.fill_uninitialized_memory = True  # PyTorch's default
        script.train(torch_deterministic=flag)
        assert torch.are_deterministic_algorithms_enabled() == flag
        assert not torch.utils.deterministic.fill_uninitialized_memory  # a fill of every new tensor, for nothing


def test_checkpoint_every(script, monkeypatch):
    steps = []
    wrap(monkeypatch, script.module, "save_checkpoint",
         lambda number, real, *a: steps.append(a[2].global_step) or real(*a))  # fmt: skip
    script.train(checkpoint_every=2 * script.unit)
    script.train(checkpoint_every=0)
    assert steps == [2 * script.unit, 4 * script.unit, 4 * script.unit]


# ---- what a run leaves behind --------------------------------------------------------------------------------------


def test_files_of_a_run(script):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics, run_dir = script.train(eval_episodes=3)
    assert {path.name.split(".")[0] for path in run_dir.iterdir()} == {
        "metrics", "config", "checkpoint", "summary", "events",
    }  # fmt: skip
    config, summary = read(run_dir, "config"), read(run_dir, "summary")
    assert config["flags"] == dataclasses.asdict(script.args(eval_episodes=3)) and config["device"] == "cpu"
    assert {"python", "torch", "gymnasium", "numpy"} <= config["versions"].keys()
    assert config["commit"] is None or len(config["commit"]) == 40
    assert summary["steps"] == 4 * script.unit and len(summary["final_evaluation"]) == 3
    parts = [summary[f"{part}_seconds"] for part in ("environment", "update", "rest")]
    assert min(parts) > 0 and sum(parts) == pytest.approx(summary["wall_seconds"])
    assert summary["steps_per_second"] == pytest.approx(summary["steps"] / summary["wall_seconds"])
    assert summary["last_training_return"] == pytest.approx(np.mean(values(run_dir, "charts/episodic_return")[-100:]))
    assert metrics["eval/episodic_return"] == pytest.approx(np.mean(summary["final_evaluation"]))
    assert {row[1] for row in rows(run_dir, timing=True)} == metrics.keys() - {"global_step"}
    events, loss = EventAccumulator(str(run_dir)).Reload(), f"losses/{script.loss}"
    assert set(events.Tags()["scalars"]) == metrics.keys() - {"global_step"}
    logged = [(event.step, event.value) for event in events.Scalars(loss)]
    assert logged == [(int(r[0]), pytest.approx(float(r[2]))) for r in rows(run_dir) if r[1] == loss] != []


def test_logged_numbers_are_the_environments(script):
    """Episode returns and lengths are whole and neither scaled nor clipped; so are the rewards."""
    flags, known = script.known
    metrics, run_dir = script.train(**flags)
    returns, lengths = (values(run_dir, f"charts/episodic_{what}") for what in ("return", "length"))
    assert set(returns) == {known["return"]} and set(lengths) == {known["length"]}
    steps = metrics["global_step"] // script.tiny["num_envs"]
    assert len(returns) == len(lengths) == steps // known["length"] * script.tiny["num_envs"]
    assert [metrics[f"charts/reward_{what}"] for what in ("mean", "min", "max")] == [known["reward"]] * 3


def test_checkpoint_loads_with_torch_defaults_and_holds_all(script):
    state = checkpoint(script.train()[1])
    assert state.keys() == {"format_version", "script", "flags", "run", "parts", "rng"}
    assert state["parts"].keys() == script.parts


def test_progress_without_a_terminal_is_rare(script, capsys):
    started = time.monotonic()
    script.train(**script.units(16))
    # At the start, at the end, and every ten seconds between them.
    assert capsys.readouterr().err.count("\r") <= 3 + (time.monotonic() - started) / 10


def test_video_and_weights_and_biases(script, monkeypatch):
    """The video of each evaluation is handed over explicitly; every metric goes with its step."""
    logged, inits = [], []
    fake = types.SimpleNamespace(
        login=None, init=lambda **k: inits.append(k), log=logged.append, finish=lambda: logged.append("finished"),
        Video=lambda path: ("video", path) if Path(path).stat().st_size > 0 else None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", fake)
    flags = {"wandb_project_name": "p", "wandb_entity": "e", "eval_every": 2 * script.unit}
    _, run_dir = script.train(capture_video=True, track=True, **flags)
    videos = {path.name for path in (run_dir / "videos").glob("*.mp4")}
    assert videos == {f"step_{number * script.unit}-episode-0.mp4" for number in (0, 2, 4)}
    handed = [Path(value[1]).name for entry in logged[:-1] for value in entry.values() if isinstance(value, tuple)]
    assert set(handed) == videos and len(handed) == 3 and logged[-1] == "finished"
    assert (inits[0]["project"], inits[0]["entity"], inits[0]["name"]) == ("p", "e", run_dir.name)
    loss = f"losses/{script.loss}"
    losses = [(entry["global_step"], entry[loss]) for entry in logged[:-1] if loss in entry]
    assert losses == [(int(r[0]), float(r[2])) for r in rows(run_dir) if r[1] == loss] != []


def test_real_weights_and_biases_offline(script, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    try:
        _, run_dir = script.train(track=True)
    finally:
        wandb.teardown()  # its server process stays where it was started: in the folder of this test
    assert list(run_dir.glob("wandb/offline-run-*/*.wandb")) and [path.name for path in Path().iterdir()] == ["runs"]


def test_main_works_in_a_thread(script):
    results = []
    thread = threading.Thread(target=lambda: results.append(script.train()[0]))
    thread.start()
    thread.join()
    assert results[0]["global_step"] == 4 * script.unit


# ---- devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "flags"),
    [(script, flags) for script in SCRIPTS for flags in script.real],
    indirect=["script"],
    ids=flags_id,
)
def test_smoke_on_the_best_device(script, flags):
    """What the script is meant for, on CUDA when there is one, else on the CPU; with the largest seed."""
    metrics, _ = script.train(**{**flags, "device": DEVICE, "seed": LARGEST_SEED})
    assert all(np.isfinite(value) for value in metrics.values())
    assert [path.name for path in Path().iterdir()] == ["runs"]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_cuda_agrees_with_cpu(script):
    losses = [values(script.train(device=device)[1], f"losses/{script.loss}") for device in ("cpu", "cuda")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_compiled_update_agrees_with_eager(script):
    eager, compiled = (script.train(**script.varied, device=DEVICE, compile=flag)[1] for flag in (False, True))
    # A share of samples jumps with one sample; what an average over a rollout explains is no work of the update.
    metrics = {row[1] for row in rows(eager) if row[1].startswith("losses/")}
    for metric in metrics - {"losses/clipfrac", "losses/explained_variance"}:
        assert values(eager, metric) == pytest.approx(values(compiled, metric), rel=1e-3, abs=1e-5), metric
