"""Draw learning curves and print result tables.

    python benchmark/plot.py                                  the newest run under runs/
    python benchmark/plot.py runs/HalfCheetah-v5__...         one run
    python benchmark/plot.py --results                        every script in benchmark/results
    python benchmark/plot.py --results ppo_continuous --table docs/ppo_continuous.md

A run's curve goes to <run>/learning_curve.png. --results draws docs/images/<script>.png, one panel a task (and one for
the critics' overestimation where an algorithm logs it), and prints a Markdown table; --table also puts that table
between `<!-- results:SCRIPT -->` and `<!-- /results:SCRIPT -->` in a file. `script+label` is compared with `script`. An
experiment of its own has labels with a plus: `--results td3+ablation` compares `td3+ablation+X` with `td3+ablation`.

Intervals are 95 % percentile intervals of a stratified bootstrap: within each task the seeds are resampled (Agarwal et
al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", 2021, arXiv:2108.13264). The generator's
seed is fixed, so the same results give the same table. Variants whose intervals overlap are called indistinguishable.
"""

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from common import EVALUATION_RETURN, TRAINING_RETURN, insert_table, read_json, read_metrics, refuse, slug
from scipy.stats import trim_mean

plt.switch_backend("Agg")  # pictures go to files: no display is needed

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
RESAMPLES = 10_000


# ---------------------------------------------------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------------------------------------------------


def iqm(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Interquartile mean: the mean without the lowest and the highest quarter."""
    return trim_mean(values, 0.25, axis=axis)


def interval(strata: list[list[float]], statistic=np.mean, resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """95 % percentile interval of `statistic` over all values; each stratum (a task's seeds) is resampled by itself.

    None when a stratum has fewer than two seeds: one run says nothing about the spread.
    """
    if not strata or min(len(stratum) for stratum in strata) < 2:
        return None
    generator = np.random.default_rng(0)
    drawn = [np.asarray(s)[generator.integers(len(s), size=(resamples, len(s)))] for s in strata]
    low, high = np.percentile(statistic(np.concatenate(drawn, axis=1), axis=1), [2.5, 97.5])
    return float(low), float(high)


def band(curves: np.ndarray, resamples: int = 2_000) -> tuple[np.ndarray, np.ndarray]:
    """The same interval for the mean of curves, [seeds, steps], at every step; whole curves are resampled."""
    drawn = np.random.default_rng(0).integers(len(curves), size=(resamples, len(curves)))
    weights = (drawn[:, :, None] == np.arange(len(curves))).mean(axis=1)  # [resamples, seeds]
    low, high = np.percentile(weights @ curves, [2.5, 97.5], axis=0)
    return low, high


def compare(ours: tuple[float, float] | None, base: tuple[float, float] | None) -> str:
    """`indistinguishable` when the two intervals overlap, else `higher` or `lower`; nothing is said without both."""
    if ours is None or base is None:
        return "too few seeds"
    if ours[0] <= base[1] and base[0] <= ours[1]:
        return "indistinguishable"
    return "higher" if ours[0] > base[1] else "lower"


# ---------------------------------------------------------------------------------------------------------------------
# One run
# ---------------------------------------------------------------------------------------------------------------------


def newest_run(runs: Path) -> Path:
    """The run folder under `runs` whose metrics.csv was written last."""
    files = sorted(runs.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
    if not files:
        refuse(f"no run under {runs}/. Train first, for example `python ppo_continuous.py`, or name a run folder.")
    return files[-1].parent


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the last `window` values up to each one (of fewer at the start)."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_run(run: Path) -> Path:
    """Every training episode (faint), their running mean, and the evaluations, into <run>/learning_curve.png."""
    rows = read_metrics(run, TRAINING_RETURN, EVALUATION_RETURN)
    episodes, evaluations = rows[TRAINING_RETURN], rows[EVALUATION_RETURN]
    if not episodes and not evaluations:
        refuse(f"{run}/metrics.csv has no finished episode and no evaluation yet. Train longer, or choose another run.")
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    if episodes:
        steps, returns = np.array(episodes).T
        window = min(100, max(1, len(returns) // 10))
        axes.plot(steps, returns, ".", color=COLOURS[0], alpha=0.25, markersize=4, label="training episode")
        axes.plot(steps, running_mean(returns, window), color=COLOURS[0], label=f"mean of the last {window}")
    if evaluations:
        axes.plot(*np.array(evaluations).T, "D--", color=COLOURS[1], markersize=5, label="evaluation")
    axes.set(xlabel="step", ylabel="return", title=run.name)
    axes.title.set_fontsize("medium")
    axes.grid(alpha=0.3)
    axes.legend()
    path = run / "learning_curve.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Committed results
# ---------------------------------------------------------------------------------------------------------------------


def folder_names(results: Path) -> set[str]:
    return {path.name for path in results.glob("*/")} - {"speed"}


def experiments(results: Path) -> set[str]:
    """The labelled scripts that have variants of their own: `td3+ablation` where there is a `td3+ablation+X`."""
    names = {name for name in folder_names(results) if not name.startswith("sb3+")}
    return {name for name in names if "+" in name and any(other.startswith(f"{name}+") for other in names)}


def load_results(results: Path, script: str) -> dict[str, dict[str, list[dict]]]:
    """variant -> task -> its results by seed, failed ones among them; the unchanged script comes first.

    `script+label` is a variant, and so is `sb3+script`, the same algorithm by others; what belongs to an experiment of
    its own is none of `script`'s.
    """
    loaded: dict[str, dict[str, list[dict]]] = {}
    names, others = folder_names(results), experiments(results) - {script}
    own = [name for name in names if f"{name}+".startswith(f"{script}+") or name.endswith(f"+{script}")]
    own = [name for name in own if not any(f"{name}+".startswith(f"{other}+") for other in others)]
    for folder in (results / name for name in sorted(own, key=lambda name: (not name.startswith(script), name))):
        contents = sorted((read_json(path) for path in folder.glob("*.json")), key=lambda r: (r["task"], r["seed"]))
        for result in contents:
            loaded.setdefault(folder.name, {}).setdefault(result["task"], []).append(result)
    return loaded


def done(results: list[dict]) -> list[dict]:
    return [result for result in results if not result["failed"]]


def values(results: list[dict], key: str) -> list[float]:
    """The finished runs' numbers under a key, those that have one."""
    return [result[key] for result in done(results) if result[key] is not None]


def headline(results: list[dict]) -> list[float]:
    """What variants are compared by: the training return, or the final evaluation where training plays no episodes."""
    return values(results, "training_return") or values(results, "final")


def mean_and_interval(numbers: list[float], spread: bool = False) -> str:
    """`mean ± std [low, high]`; the interval only from two seeds on."""
    if not numbers:
        return "-"
    std = f" ± {number(np.std(numbers, ddof=1))}" if spread and len(numbers) > 1 else ""
    limits = interval([numbers])
    return number(np.mean(numbers)) + std + (f" [{number(limits[0])}, {number(limits[1])}]" if limits else "")


def number(value: float) -> str:
    """Four figures, or all of them before the point: 0.1234, 12.34, 5678."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:.{digits}f}"


def overestimation_of(result: dict) -> list[list[float]]:
    return result.get("overestimation_curve", [])


def late_overestimation(results: list[dict]) -> list[float]:
    """Of each finished run that logs it, the critics' mean overestimation in the second half of training."""
    curves = [curve for curve in map(overestimation_of, done(results)) if curve]
    return [float(np.mean([value for step, value in curve if step > curve[-1][0] / 2])) for curve in curves]


def table_row(variant: str, task: str, results: list[dict], base: list[dict] | None, critics: bool) -> str:
    """One line of the table; `base` holds the unchanged script's results on the same task."""
    finished, training = done(results), values(results, "training_return")
    best = [result["best"][1] for result in finished if result["best"]]
    steps = sorted({result["steps"] for result in finished})
    minutes = [seconds / 60 for seconds in values(results, "wall_seconds")]
    failures = len(results) - len(finished)
    cells = [
        variant,
        task,
        f"{len(finished)}" + (f" ({failures} failed)" if failures else ""),
        " / ".join(f"{count:,}" for count in steps) or "-",
        mean_and_interval(training, spread=True),
        number(iqm(np.array(training))) if training else "-",
        mean_and_interval(values(results, "final")),
        number(np.mean(best)) if best else "-",
        *([mean_and_interval(late_overestimation(results))] if critics else []),
        number(np.mean(minutes)) if minutes else "-",
        compare(interval([headline(results)]), interval([headline(base)])) if base else "-",
    ]
    return f"| {' | '.join(cells)} |"


def table(script: str, loaded: dict[str, dict[str, list[dict]]]) -> str:
    """The Markdown table of a script and its variants, with the aggregate over tasks and how it was measured."""
    head = ["script", "task", "seeds", "steps", "training return: mean ± std [95 %]", "IQM", "final evaluation [95 %]"]
    critics = any(late_overestimation(results) for tasks in loaded.values() for results in tasks.values())
    head += ["best evaluation", *["overestimation of Q, second half [95 %]"] * critics]
    head += ["wall minutes", f"against {script}"]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    base = loaded.get(script, {})
    for variant, tasks in loaded.items():
        lines += [table_row(variant, t, tasks[t], base.get(t) if variant != script else None, critics) for t in tasks]
    return "\n".join([*lines, "", *aggregate(script, loaded), conditions(loaded)])


def scaled(results: list[dict], base: list[dict]) -> list[float]:
    """Returns on one task, scaled so that 0 is the unchanged script's first point and 1 its mean return.

    Empty where the unchanged script has no curve or did not move.
    """
    first, end = [curve[0][1] for curve in map(curve_of, done(base)) if curve], headline(base)
    if not first or not end or np.mean(first) == np.mean(end):
        return []
    start, end = float(np.mean(first)), float(np.mean(end))
    return [(value - start) / (end - start) for value in headline(results)]


def aggregate(script: str, loaded: dict[str, dict[str, list[dict]]]) -> list[str]:
    """IQM over tasks and seeds of the scaled returns, for what ran on at least two tasks with at least two seeds.

    A variant is compared with the unchanged script on the tasks that both ran.
    """
    base, lines = loaded.get(script, {}), []
    for variant, tasks in loaded.items():
        shared = [task for task in tasks if scaled(tasks[task], base.get(task, []))]
        scores = [scaled(tasks[task], base[task]) for task in shared]
        limits, base_limits = interval(scores, iqm), interval([scaled(base[task], base[task]) for task in shared], iqm)
        if len(shared) > 1 and limits:
            verdict = f", {compare(limits, base_limits)}" if variant != script else ""
            mean, low, high = (number(value) for value in (iqm(np.concatenate(scores)), *limits))
            lines.append(f"- {variant}: IQM over {len(shared)} tasks {mean} [{low}, {high}]{verdict}")
    legend = f"Scaled per task: 0 is where {script} starts, 1 its mean return."
    return [legend, "", *lines, ""] if lines else []


def conditions(loaded: dict[str, dict[str, list[dict]]]) -> str:
    """One line: hardware, how many runs at a time, commits and dates, taken from the results themselves."""
    results = [result for tasks in loaded.values() for entries in tasks.values() for result in entries]

    def distinct(describe) -> str:
        return "; ".join(sorted({describe(result) for result in results}))

    def machine(result: dict) -> str:
        h = result["hardware"]
        return f"{h['cpu']}, {h['logical_cores']} logical cores, {h['ram_gib']} GiB, {h['device'] or 'unknown device'}"

    load = distinct(lambda r: f"{r['workers']} at a time with OMP_NUM_THREADS={r['threads']}")
    commits = distinct(lambda r: (r["commit"] or "none")[:9])
    dates = sorted(result["date"][:10] for result in results)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"Hardware: {distinct(machine)}. Runs: {load}. Commit: {commits}. Date: {span}."


def curve_of(result: dict) -> list[list[float]]:
    """The training curve, or the evaluation curve where nothing is played in training."""
    return result["learning_curve"] or result["evaluation_curve"]


def on_common_steps(curves: list[list[list[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Curves of several seeds on one grid: the steps that all of them span, and [seeds, steps] interpolated returns."""
    grid = np.unique([step for curve in curves for step, _ in curve])
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    grid = grid[(grid >= first) & (grid <= last)]
    return grid, np.array([np.interp(grid, *np.array(curve).T) for curve in curves])


def draw_panel(axes, task: str, loaded: dict[str, dict[str, list[dict]]], of=curve_of, label: str = "return") -> None:
    """Each variant's mean over seeds with its 95 % band; one thin line a seed. `of` takes the curve from a result."""
    for position, (variant, tasks) in enumerate(loaded.items()):
        curves = [curve for curve in map(of, done(tasks.get(task, []))) if curve]
        if not curves:
            continue
        colour = COLOURS[position % len(COLOURS)]
        for curve in curves:
            axes.plot(*np.array(curve).T, color=colour, alpha=0.25, linewidth=0.6)
        steps, returns = on_common_steps(curves)
        legend = f"{variant} ({len(curves)} seed{'s' * (len(curves) > 1)})"
        axes.plot(steps, returns.mean(axis=0), color=colour, label=legend)
        if len(curves) > 1:
            axes.fill_between(steps, *band(returns), color=colour, alpha=0.2, linewidth=0)
    axes.set(title=task, xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw_results(loaded: dict[str, dict[str, list[dict]]], path: Path) -> Path:
    """The grid of panels, one a task and then one a task whose critics' overestimation is known, three in a row."""
    tasks = sorted({task for tasks in loaded.values() for task in tasks})
    panels = [(task, loaded, curve_of, "return") for task in tasks]
    for task in tasks:
        results = [result for tasks in loaded.values() for result in tasks.get(task, [])]
        if any(map(overestimation_of, results)):
            panels.append((task, loaded, overestimation_of, "overestimation of Q"))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, panel in zip(grid.flat, panels, strict=False):
        draw_panel(axes, *panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def report(args: argparse.Namespace) -> None:
    """Picture and table of every script asked for."""
    names = folder_names(args.results_dir)
    found = sorted({name.removeprefix("sb3+").split("+")[0] for name in names} | experiments(args.results_dir))
    for script in args.results or found or refuse(f"no results in {args.results_dir}/. Run benchmark/run.py first."):
        loaded = load_results(args.results_dir, script)
        if not loaded:
            refuse(f"no results of {script} in {args.results_dir}/. There are: {', '.join(found) or 'none'}.")
        text = table(script, loaded)
        print(f"{text}\n\n{draw_results(loaded, args.images_dir / f'{slug(script)}.png')}\n")
        if args.table:
            insert_table(args.table, script, text)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="a run folder (default: the newest under --runs-dir)")
    parser.add_argument("--run", dest="named_run", type=Path, help="the same, as a flag")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--results", nargs="*", metavar="SCRIPT", help="draw committed results (default: every script)")
    parser.add_argument("--results-dir", type=Path, default=Path("benchmark/results"))
    parser.add_argument("--images-dir", type=Path, default=Path("docs/images"))
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="insert the table between the file's markers")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """A picture of one run, or pictures and tables of committed results."""
    args = parse(argv)
    if args.results is not None:
        return report(args)
    if args.table:
        refuse("--table needs --results. Say `--results SCRIPT --table FILE.md`.")
    run = args.named_run or args.run or newest_run(args.runs_dir)
    if not (run / "metrics.csv").is_file():
        refuse(f"{run} holds no metrics.csv. Name a run folder, as in runs/<task>__<name>__<seed>__<time>.")
    return print(draw_run(run))


if __name__ == "__main__":
    main(sys.argv[1:])
