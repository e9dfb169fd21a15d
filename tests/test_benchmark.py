"""The benchmark's tools, on a stand-in script that leaves a run's files in a fraction of a second."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tyro

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import plot  # noqa: E402
import run  # noqa: E402
import speed  # noqa: E402

# Episode k ends at step k and returns k + seed. $FAKE_ORDER makes one seed crash, or wait, half way.
FAKE_SCRIPT = '''"""A stand-in for a training script."""

import argparse, json, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--env-id")
parser.add_argument("--seed", type=int)
parser.add_argument("--exp-name")
parser.add_argument("--runs-dir")
parser.add_argument("--total-timesteps", type=int, default=1000)
parser.add_argument("--resume")
args = parser.parse_args()
bonus = 0

if args.resume:
    run = Path(args.resume)
    flags = json.loads((run / "config.json").read_text())["flags"]
    start = int((run / "checkpoint.pt").read_text())
else:
    flags, start = vars(args), 0
    run = Path(args.runs_dir, f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{time.time_ns()}")
    run.mkdir(parents=True)
    config = {"script": "fake", "flags": flags, "versions": {"fake": "1"}, "device": "cpu", "commit": "abc"}
    (run / "config.json").write_text(json.dumps(config | {"threads": os.environ["OMP_NUM_THREADS"]}))
    (run / "metrics.csv").write_text("step,metric,value\\n")
order, steps, seed = json.loads(os.environ.get("FAKE_ORDER", "{}")), flags["total_timesteps"], flags["seed"]


def stop(signum, frame):
    (run / "checkpoint.pt").write_text(str(steps // 2))
    sys.exit(128 + signum)


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
metrics = (run / "metrics.csv").open("a")
for step in range(start + 1, steps + 1):
    metrics.write(f"{step},charts/episodic_return,{step + seed + bonus}\\n{step},charts/SPS,5\\n")
    if step == steps // 2 and order.get("seed") == seed and not args.resume:
        metrics.flush()
        if order["checkpoint"]:
            (run / "checkpoint.pt").write_text(str(step))
        if order["do"] == "crash":
            raise RuntimeError("the fake went wrong")
        (run / "waiting").write_text(str(os.getpid()))
        time.sleep(20)
metrics.write(f"{steps // 2},eval/episodic_return,900\\n{steps},eval/episodic_return,500\\n")
if seed < 3:
    metrics.write(f"{steps // 2},eval/q_overestimation,-7.5\\n{steps},eval/q_overestimation,3\\n")
metrics.close()
(run / "checkpoint.pt").write_text(str(steps))
summary = dict(steps=steps, wall_seconds=60.0, steps_per_second=9.0, environment_seconds=2.0, update_seconds=3.0)
summary |= dict(rest_seconds=1.0, last_training_return=10.0 * seed + bonus, final_evaluation=[400.0, 600.0])
(run / "summary.json").write_text(json.dumps(summary))
'''


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty folder with the stand-in script; the signal handlers are put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FAKE_ORDER", raising=False)
    Path("fake.py").write_text(FAKE_SCRIPT)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def bench(seeds=1, tasks=("Task-v0",), **changes) -> int:
    """Run the benchmark in this process; returns its exit code."""
    args = {"scripts": ("fake.py",), "runs_dir": Path("runs"), "results_dir": Path("results")}
    return run.main(run.Args(tasks=tasks, seeds=seeds, **(args | changes)))


def bench_process(*flags: str) -> subprocess.Popen:
    """Start the benchmark in a process of its own."""
    command = [sys.executable, str(BENCHMARK / "run.py"), "--scripts", "fake.py", "--tasks", "Task-v0", "--seeds", "1"]
    return subprocess.Popen(
        [*command, "--runs-dir", "runs", "--results-dir", "results", *flags], stdout=subprocess.PIPE
    )


def result(name="Task-v0__1", variant="fake") -> dict:
    return json.loads(Path("results", variant, f"{name}.json").read_text())


def folders(pattern="Task-v0__fake__1__*") -> list[Path]:
    return sorted(Path("runs").glob(pattern))


def wait_for_half(deadline=10.0) -> int:
    """Wait until the stand-in waits half way; returns its process id."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        for path in Path("runs").glob("*/waiting"):
            if path.read_text():
                return int(path.read_text())
        time.sleep(0.02)
    raise TimeoutError("the stand-in never got half way")


def order(monkeypatch, do: str, checkpoint: bool, seed: int = 1) -> None:
    monkeypatch.setenv("FAKE_ORDER", json.dumps({"do": do, "checkpoint": checkpoint, "seed": seed}))


# ---------------------------------------------------------------------------------------------------------------------
# run.py
# ---------------------------------------------------------------------------------------------------------------------


def test_a_result_holds_what_the_run_left():
    assert bench(seeds=2, tasks=("a/B-v0", "Task-v0"), flags="--total-timesteps 4000", threads=2) == 0
    names = sorted(path.name for path in Path("results/fake").iterdir())
    assert names == ["Task-v0__1.json", "Task-v0__2.json", "a-B-v0__1.json", "a-B-v0__2.json"]
    got = result("a-B-v0__2")
    assert (got["task"], got["seed"], got["failed"], got["commit"]) == ("a/B-v0", 2, False, "abc")
    assert (got["flags"]["total_timesteps"], got["versions"], got["hardware"]["device"]) == (4000, {"fake": "1"}, "cpu")
    assert (got["steps"], got["wall_seconds"], got["steps_per_second"]) == (4000, 60.0, 9.0)
    assert (got["environment_seconds"], got["update_seconds"], got["rest_seconds"]) == (2.0, 3.0, 1.0)
    assert (got["training_return"], got["final_evaluation"], got["final"]) == (20.0, [400.0, 600.0], 500.0)
    assert (got["best"], got["evaluation_curve"]) == ([2000, 900.0], [[2000, 900.0], [4000, 500.0]])
    assert got["overestimation_curve"] == [[2000, -7.5], [4000, 3.0]]
    assert (got["threads"], got["workers"]) == (2, 2)
    assert got["command"] == "OMP_NUM_THREADS=2 python fake.py --env-id a/B-v0 --seed 2 --total-timesteps 4000"
    assert json.loads((folders("a-B-v0__fake__2__*")[0] / "config.json").read_text())["threads"] == "2"
    # 4000 episodes in 200 bins of 20: the first holds steps 1..20, whose mean return is 10.5 + seed.
    assert len(got["learning_curve"]) == 200
    assert (got["learning_curve"][0], got["learning_curve"][-1]) == ([20, 12.5], [4000, 3992.5])


def test_bins_of_the_learning_curve():
    episodes = [(1, 1.0), (25, 3.0), (26, 10.0), (26, 20.0), (100, 7.0)]
    assert run.learning_curve(episodes, 100, points=4) == [[25, 2.0], [50, 15.0], [100, 7.0]]
    assert run.learning_curve([], 100) == []
    assert run.thinned(list(range(1000)))[::199] == [0, 999]
    assert len(run.thinned(list(range(1000)))) == 200


def test_what_is_done_is_skipped(capsys):
    assert bench(seeds=2) == 0
    before = Path("results/fake/Task-v0__1.json").stat().st_mtime_ns
    assert bench(seeds=3) == 0
    assert Path("results/fake/Task-v0__1.json").stat().st_mtime_ns == before
    assert [len(folders(f"Task-v0__fake__{seed}__*")) for seed in (1, 2, 3)] == [1, 1, 1]
    assert capsys.readouterr().out.count("done      fake on Task-v0") == 2


def test_a_finished_run_without_result_is_collected():
    bench()
    Path("results/fake/Task-v0__1.json").unlink()
    assert bench() == 0
    assert (result()["steps"], len(folders())) == (1000, 1)


def test_a_folder_made_by_hand_is_not_counted():
    bench()
    folders()[0].rename("by_hand")
    for path in Path("runs/launch").iterdir():
        path.unlink()
    Path("results/fake/Task-v0__1.json").unlink()
    Path("by_hand").rename("runs/Task-v0__fake__1__9999999999999999999")
    assert bench() == 0
    assert len(folders()) == 2
    assert len(result()["starts"]) == 1


def test_sigterm_is_passed_on_and_the_run_resumed(monkeypatch):
    order(monkeypatch, "wait", checkpoint=False)
    process = bench_process()
    wait_for_half()
    process.terminate()
    assert process.wait(timeout=10) == 143
    assert (folders()[0] / "checkpoint.pt").read_text() == "500"  # the stand-in's handler wrote it
    assert not Path("results").exists()
    assert bench() == 0
    assert len(folders()) == 1
    assert [start["resumed"] for start in result()["starts"]] == [False, True]
    assert (result()["learning_curve"][0], len(result()["learning_curve"])) == ([5, 4.0], 200)


def test_kill_of_the_benchmark_then_of_the_run(monkeypatch, capsys):
    order(monkeypatch, "wait", checkpoint=True)
    process = bench_process()
    child = wait_for_half()
    process.kill()
    process.wait()
    assert bench() == 1  # the run itself still goes on: nobody else may work in its folder
    assert "BUSY" in capsys.readouterr().out
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while bench() == 1 and "BUSY" in capsys.readouterr().out and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(folders()) == 1
    assert result()["starts"][-1]["resumed"]
    assert not result()["failed"]


def test_a_run_without_checkpoint_starts_anew(monkeypatch):
    order(monkeypatch, "crash", checkpoint=False)
    assert bench() == 1
    monkeypatch.delenv("FAKE_ORDER")
    assert bench() == 0
    assert len(folders()) == 2
    assert not result()["starts"][-1]["resumed"]


def test_failures_are_kept_and_retried(monkeypatch):
    order(monkeypatch, "crash", checkpoint=False)
    assert bench(seeds=2) == 1
    assert not result("Task-v0__2")["failed"]
    failed = result()
    assert (failed["failed"], failed["exit_code"], failed["steps"]) == (True, 1, 500)
    assert failed["stderr"][-1] == "RuntimeError: the fake went wrong"
    assert len(failed["learning_curve"]) == 200
    assert bench(seeds=2) == 1
    assert len(result()["earlier_failures"]) == 1
    order(monkeypatch, "crash", checkpoint=True)
    assert bench(seeds=2) == 1
    monkeypatch.delenv("FAKE_ORDER")
    assert bench(seeds=2) == 0
    assert not result()["failed"]
    assert result()["starts"][-1]["resumed"]
    assert [entry["exit_code"] for entry in result()["earlier_failures"]] == [1, 1, 1]


def test_other_flags_are_refused(monkeypatch, capsys):
    assert bench(flags="--total-timesteps 500") == 0
    before = Path("results/fake/Task-v0__1.json").read_bytes()
    assert bench() == 1
    assert "results/fake/Task-v0__1.json was made with other flags" in capsys.readouterr().out
    assert Path("results/fake/Task-v0__1.json").read_bytes() == before
    assert bench(flags="--total_timesteps=500") == 0  # the same flags in another spelling
    assert bench(name="long") == 0
    assert result(variant="fake+long")["steps"] == 1000
    assert len(folders()) == 1


def test_other_flags_are_refused_for_an_unfinished_run(monkeypatch, capsys):
    order(monkeypatch, "crash", checkpoint=True)
    bench(flags="--total-timesteps 500")
    monkeypatch.delenv("FAKE_ORDER")
    Path("results/fake/Task-v0__1.json").unlink()
    assert bench() == 1
    assert "was made with other flags" in capsys.readouterr().out
    assert not Path("results/fake/Task-v0__1.json").exists()


def test_flags_that_the_script_refused_may_be_corrected():
    assert bench(flags="--no-such-flag") == 1
    assert result()["exit_code"] == 2
    assert bench(flags="--total-timesteps 400") == 0
    assert result()["earlier_failures"][0]["asked_flags"] == ["--no-such-flag"]


@pytest.mark.parametrize("flags", ["--seed 3", "--env-id X", "--exp_name=y", "stray", '"open'])
def test_flags_that_cannot_be_passed_on(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        bench(flags=flags)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: --flags")
    assert not Path("runs").exists()


def test_flags_may_start_with_dashes_on_the_command_line():
    process = bench_process("--flags", "--total-timesteps=300")
    assert process.wait(timeout=10) == 0
    assert result()["steps"] == 300


def write_patch(old: str, new: str) -> Path:
    header = "diff --git a/fake.py b/fake.py\n--- a/fake.py\n+++ b/fake.py\n"
    lines = FAKE_SCRIPT.split("\n")
    at = lines.index("bonus = 0")
    body = f" {lines[at - 1]}\n-{old}\n+{new}\n {lines[at + 1]}\n"
    Path("more.patch").write_text(f"{header}@@ -{at},3 +{at},3 @@\n{body}")
    return Path("more.patch")


def test_a_patch_changes_a_copy():
    patch = write_patch("bonus = 0", "bonus = 5")
    assert bench(patch=patch, name="label") == 0
    assert result(variant="fake+more+label")["training_return"] == 15.0
    assert (result(variant="fake+more+label")["patch"], Path("fake.py").read_text()) == ("more.patch", FAKE_SCRIPT)
    assert result(variant="fake+more+label")["flags"]["exp_name"] == "fake+more+label"


def test_a_patch_that_does_not_apply_is_refused(capsys):
    patch = write_patch("bonus = 1", "bonus = 5")
    with pytest.raises(SystemExit) as stop:
        bench(patch=patch)
    assert (stop.value.code, capsys.readouterr().err.startswith("error: more.patch does not apply")) == (2, True)


def test_results_stay_small(monkeypatch, capsys):
    bench(flags="--total-timesteps 20000")
    assert Path("results/fake/Task-v0__1.json").stat().st_size < 20_000
    monkeypatch.setattr(run, "RESULT_BYTES", 1000)
    assert bench(name="big") == 1
    assert "more than the 1000 allowed" in capsys.readouterr().out
    assert not Path("results/fake+big").exists()


# ---------------------------------------------------------------------------------------------------------------------
# plot.py
# ---------------------------------------------------------------------------------------------------------------------


def test_bootstrap_interval_by_hand():
    # Resampling five seeds of which one scored 1, the count of ones is binomial(5, 1/5):
    # P(0) = 0.33, P(<= 2) = 0.942, P(<= 3) = 0.993, so the 2.5 and 97.5 % points of the mean are 0 and 3/5.
    assert plot.interval([[0.0, 0.0, 0.0, 0.0, 1.0]]) == pytest.approx((0.0, 0.6))
    # Within strata nothing varies, so nothing may vary in the whole; pooled, it would.
    assert plot.interval([[0.0, 0.0, 0.0], [10.0, 10.0]]) == pytest.approx((4.0, 4.0))
    assert plot.interval([[1.0]]) is None
    low, high = plot.band(np.array([[0.0, 7.0]] * 4 + [[1.0, 7.0]]))
    assert low == pytest.approx([0.0, 7.0])
    assert high == pytest.approx([0.6, 7.0])


def test_interquartile_mean_and_verdict():
    assert plot.iqm(np.array([-50.0, 1.0, 2.0, 100.0])) == 1.5
    assert plot.compare((0.0, 2.0), (2.0, 3.0)) == "indistinguishable"
    assert plot.compare((0.0, 9.0), (2.0, 3.0)) == "indistinguishable"
    assert (plot.compare((4.0, 5.0), (2.0, 3.0)), plot.compare((0.0, 1.0), (2.0, 3.0))) == ("higher", "lower")
    assert plot.compare(None, (2.0, 3.0)) == "too few seeds"


def test_running_mean():
    assert plot.running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2) == pytest.approx([1.0, 2.0, 4.0, 6.0])


def test_the_newest_run_is_drawn(capsys):
    bench(seeds=2)
    newest = folders("Task-v0__fake__1__*")[0]
    os.utime(newest / "metrics.csv", (time.time() + 60, time.time() + 60))
    capsys.readouterr()
    plot.main([])
    picture = newest / "learning_curve.png"
    assert capsys.readouterr().out.strip() == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    other = folders("Task-v0__fake__2__*")[0]
    plot.main([str(other)])
    assert (other / "learning_curve.png").exists()


@pytest.mark.parametrize("argv", [[], ["--results"], ["nowhere"], ["--table", "x.md"]])
def test_nothing_to_draw(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        plot.main(argv)
    error = capsys.readouterr().err
    assert (stop.value.code, error.startswith("error: "), error.count("\n")) == (2, True, 1)


def test_table_goes_between_the_markers(capsys):
    bench(seeds=3, tasks=("a/B-v0", "Task-v0"))
    bench(seeds=3, name="same", flags="--total-timesteps 500")
    bench(seeds=3, name="more", patch=write_patch("bonus = 0", "bonus = 500"))
    page = Path("page.md")
    page.write_text("# Top\n<!-- results:fake -->\nold\n<!-- /results:fake -->\nend\n")
    for _ in range(2):  # the second time replaces the first table
        plot.main(["--results", "fake", "--results-dir", "results", "--images-dir", "images", "--table", "page.md"])
    text = page.read_text()
    assert text.startswith("# Top\n<!-- results:fake -->\n| script | task |")
    assert text.endswith("\n<!-- /results:fake -->\nend\n")
    assert (text.count("| script | task |"), "old" in text) == (1, False)
    rows = {tuple(row.split(" | ")[:2]): row.split(" | ") for row in text.splitlines() if row.startswith("| fake")}
    assert rows["| fake", "a/B-v0"][2:7] == [
        "3",
        "1,000",
        "20.00 ± 10.00 [10.00, 30.00]",
        "20.00",
        "500.0 [500.0, 500.0]",
    ]
    # Overestimation is known of two seeds, -7.5 at half time, which does not count, and 3 at the end.
    assert rows["| fake", "a/B-v0"][7:] == ["900.0", "3.000 [3.000, 3.000]", "1.000", "- |"]
    assert rows["| fake+same", "Task-v0"][-1] == "indistinguishable |"
    assert rows["| fake+more+more", "Task-v0"][-1] == "higher |"
    assert "- fake: IQM over 2 tasks 1.000" in text
    assert "2 at a time with OMP_NUM_THREADS=1. Commit: abc." in text
    assert Path("images/fake.png").read_bytes().startswith(b"\x89PNG")


def test_an_experiment_is_compared_with_its_own_base(capsys, monkeypatch):
    """`fake+trial` has variants, so it is an experiment; `fake+same` has none, `sb3+fake` is another's `fake`."""
    names = ("", "same", "trial", "trial+less", "trial+more", "other")
    for name in names:
        bench(name=name)
    Path("results/fake").rename("results/sb3+fake")
    Path("results/fake+other").rename("results/sb3+fake+trial")
    bench()
    loaded = plot.load_results(Path("results"), "fake")
    assert list(loaded) == ["fake", "fake+same", "sb3+fake"]
    loaded = plot.load_results(Path("results"), "fake+trial")
    assert list(loaded) == ["fake+trial", "fake+trial+less", "fake+trial+more", "sb3+fake+trial"]
    plot.main(["--results", "--results-dir", "results", "--images-dir", "images"])
    assert sorted(path.name for path in Path("images").iterdir()) == ["fake+trial.png", "fake.png"]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| fake+trial+less")]
    assert len(rows) == 1 and rows[0].endswith("| too few seeds |")


def test_overestimation_has_panels_of_its_own_where_it_is_known(monkeypatch):
    bench(seeds=3, tasks=("a/B-v0", "Task-v0"))
    loaded, drawn, real = plot.load_results(Path("results"), "fake"), [], plot.draw_panel
    for value in loaded["fake"]["a/B-v0"]:
        del value["overestimation_curve"]  # results from before it was kept
    assert loaded["fake"]["Task-v0"][2]["overestimation_curve"] == []
    monkeypatch.setattr(plot, "draw_panel", lambda axes, *panel: drawn.append((axes, *panel)) or real(axes, *panel))
    plot.draw_results(loaded, Path("images/fake.png"))
    seen = [(axes.get_title(), axes.get_ylabel(), axes.get_legend_handles_labels()[1]) for axes, *_ in drawn]
    returns = [(task, "return", ["fake (3 seeds)"]) for task in ("Task-v0", "a/B-v0")]
    assert seen == [*returns, ("Task-v0", "overestimation of Q", ["fake (2 seeds)"])]
    line = drawn[-1][0].get_lines()[-1]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([500, 1000], [-7.5, 3.0])
    assert "overestimation of Q" in plot.table("fake", loaded)
    for task in loaded["fake"].values():
        for value in task:
            value.pop("overestimation_curve", None)
    assert "overestimation of Q" not in plot.table("fake", loaded)


def test_failed_runs_are_counted_in_the_table(monkeypatch):
    order(monkeypatch, "crash", checkpoint=False, seed=3)
    bench(seeds=3)
    text = plot.table("fake", plot.load_results(Path("results"), "fake"))
    assert "| fake | Task-v0 | 2 (1 failed) | 1,000 | 15.00 ± 7.071 [10.00, 20.00] |" in text


@pytest.mark.parametrize("content", ["nothing", "<!-- /results:x -->\n<!-- results:x -->", "<!-- results:x -->"])
def test_a_page_without_markers_is_left_alone(content):
    Path("page.md").write_text(content)
    with pytest.raises(SystemExit):
        plot.insert_table(Path("page.md"), "x", "table")
    assert Path("page.md").read_text() == content


# ---------------------------------------------------------------------------------------------------------------------
# speed.py
# ---------------------------------------------------------------------------------------------------------------------


def test_sides_take_turns_and_the_warm_up_is_left_out(monkeypatch, tmp_path):
    turns = []

    def speeds(windows, loop):
        measured = windows - speed.WARM_UP
        return {
            "loop": [1.0] * speed.WARM_UP + [loop] * measured,
            "update": [0.0] * speed.WARM_UP + [loop + 5] * measured,
        }

    def ours(workload, windows, device, threads, variant):
        turns.append((variant, threads))
        return speeds(windows, 100.0 * threads), "cpu"

    def peers(name, windows, device, threads):
        turns.append((name, threads))
        return speeds(windows, 80.0 / threads)

    monkeypatch.setattr(speed, "our_speeds", ours)
    monkeypatch.setattr(speed, "peer_speeds", peers)
    variants = {"ours": [], "ours --fast": ["--fast"]}
    workload = speed.Workload(script="fake", window=10, flags=[], peers={"peer": None}, variants=variants)
    measurements = speed.measure(workload, speed.Args(repetitions=2, windows=2))
    assert turns == [(side, threads) for threads in (1, 2) for side in ("ours", "ours --fast", "peer")] * 2
    medians = speed.medians_of(measurements, "loop")
    ours, peer = {"1": 100.0, "2": 200.0, "best": 200.0}, {"1": 80.0, "2": 40.0, "best": 80.0}
    assert medians == {"ours": ours, "ours --fast": ours, "peer": peer}
    ratio = {"1": 1.25, "2": 5.0, "best": 2.5}
    assert speed.ratios_of(medians, workload.peers) == {"ours / peer": ratio, "ours --fast / peer": ratio}
    assert workload.command(1, "cpu", "ours --fast")[2] == "--fast"
    updates = speed.medians_of(measurements, "update")
    assert updates["peer"] == {"1": 85.0, "2": 45.0, "best": 85.0}
    parts = {
        part: {"medians": m, "ratios": speed.ratios_of(m, workload.peers)}
        for part, m in (("loop", medians), ("update", updates))
    }
    table = speed.table_of(parts, {"torch": "2.13.0"})
    assert "| ours / peer, whole loop | **1.25** | **5.00** | **2.50** |" in table
    assert "| peer, whole loop | 80 | 40 | 80 |" in table and "| peer, updates alone | 85 | 45 | 85 |" in table


def test_our_speed_is_read_from_the_run(monkeypatch):
    monkeypatch.setattr(speed, "ROOT", Path.cwd())
    command = ["python", "fake.py", "--env-id", "T", "--seed", "1", "--exp-name", "e"]
    monkeypatch.setattr(speed.Workload, "command", lambda *_: command)
    workload = speed.Workload(script="fake", window=1, flags=[], peers={})
    Path("fake.py").write_text(FAKE_SCRIPT.replace('"--runs-dir"', '"--runs-dir", default="runs"').replace("1000", "7"))
    speeds, device = speed.our_speeds(workload, 7, "cpu", 1, "ours")
    assert speeds["loop"] == [5.0] * 7 and device == "cpu"
    assert not Path("runs").exists()


def test_recorded_command_measures_the_same_again(monkeypatch):
    given = []

    def measure(workload, args):
        given.append((args.workloads, args.repetitions, args.windows))
        sides = ["ours", "ours --compile", *workload.peers]
        return [
            {"side": side, "threads": threads, "device": "cpu", "loop": 1.0, "update": 2.0}
            for side in sides
            for threads in args.threads
        ]

    monkeypatch.setattr(speed, "measure", measure)
    speed.main(speed.Args(workloads=("sac",), repetitions=4, windows=7, results_dir=Path()))
    words = json.loads(Path("sac.json").read_text())["sac"]["command"].split()
    speed.main(tyro.cli(speed.Args, args=[*words[2:], "--results-dir", "."]))
    assert given[0] == given[1] == (("sac",), 4, 7)


def test_update_speed_is_steps_over_the_time_spent_in_updates():
    """Readings of a clock that runs during updates only: none in the first window, then 2 and 4 seconds."""
    assert speed.speeds_of([0.0, 0.0, 2.0, 6.0], 100) == [0.0, 50.0, 25.0]


def test_clock_of_the_peer_tells_rollouts_from_updates():
    """A real model of Stable-Baselines3, 3 windows of 50 steps, of which the first trains nothing."""
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", "Pendulum-v1", learning_starts=50, batch_size=4, policy_kwargs={"net_arch": [4]})
    speeds = speed.sb3_speeds(model, 3, 50)
    assert len(speeds["loop"]) == len(speeds["update"]) == 3
    assert all(update > loop > 0 for update, loop in zip(speeds["update"], speeds["loop"], strict=True))
    assert speeds["loop"][0] > speeds["loop"][1]
