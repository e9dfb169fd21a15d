"""README.md and docs/ say what is so: commands, flags, metrics, symbols, links and headings are checked.

Each check takes a page's path (relative to the repository), its text and the repository's folder, and returns a list of
problems. docs/X.md is the page of X.py where there is such a script; other pages speak of all scripts. Every check is
also shown to fail, on a page and a script made for it.
"""

import ast
import functools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import sync

ROOT = sync.ROOT
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
HEADINGS = (
    "What it is",
    "Run",
    "How the file is laid out",
    "Details that matter",
    "Symbols",
    "Metrics",
    "Results",
    "Changing it",
    "Differences",
    "Using a trained policy elsewhere",
)
METRIC = re.compile(r"(?<![\w/.-])(?:charts|losses|eval|time|rewards)/[\w<>*]+")
# Commands that are looked at; what follows other words (cd, export, tensorboard) is the reader's.
LAUNCHERS = {"python", "python3", "uv", "pip", "torchrun", "pytest", "git", "bash", "sh", "curl", "wget"}


# ---------------------------------------------------------------------------------------------------------------------
# Reading a page
# ---------------------------------------------------------------------------------------------------------------------
FENCE = re.compile(r"^( *)(```+|~~~+)[ \t]*(\w*)[^\n]*\n(.*?)^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)


def code_blocks(text: str, *languages: str) -> list[str]:
    """The contents of the fenced blocks in one of these languages."""
    return [match[4] for match in FENCE.finditer(text) if match[3] in languages]


def python_blocks(text: str, heading: str = "") -> list[str]:
    """The Python blocks of a page, or those under the heading that begins with these words."""
    return code_blocks(section(text, heading) if heading else text, "python")


def inline_code(text: str) -> list[str]:
    """The contents of all `inline code`, on one line each."""
    return [" ".join(match[2].split()) for match in SPAN.finditer(FENCE.sub("", text))]


def headings(text: str) -> list[tuple[int, str, int, int]]:
    """(level, title, start of the body, end of the body, subsections included) of each heading outside of code."""
    blank = FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    found = [(len(m[1]), m[2].strip(), m.end()) for m in re.finditer(r"^(#+) +([^\n]*)$", blank, re.MULTILINE)]
    ends = [[after for deeper, _, after in found[i + 1 :] if deeper <= level] for i, (level, _, _) in enumerate(found)]
    return [(*heading, min(end, default=len(text))) for heading, end in zip(found, ends, strict=True)]


def section(text: str, heading: str) -> str:
    """The text below the first heading that begins with these words; empty without one."""
    return next((text[start:end] for _, title, start, end in headings(text) if title.startswith(heading)), "")


def commands(text: str) -> list[list[str]]:
    """The commands of shell blocks and of inline code, as lists of words, without what stands before the program."""
    lines = [line for block in code_blocks(text, "bash", "sh") for line in whole_lines(block)]
    lines += [span for span in inline_code(text) if span.split()[0] in LAUNCHERS and " " in span]
    found = []
    for line in lines:
        command: list[str] = []
        for word in [*words(line), ";"]:
            if not set(word) <= set(";&|()<>"):
                command.append(word)
                continue
            while command and (command[0] in ("do", "then", "time", "nohup", "$") or re.match(r"[A-Z_]+=", command[0])):
                command.pop(0)
            if command and command[0] in LAUNCHERS:
                found.append(command)
            command = []
    return found


def words(line: str) -> list[str]:
    """A line split as a shell does it, `;`, `&` and the like as words of their own; comments are left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    return list(lexer)


def whole_lines(block: str) -> list[str]:
    """The lines of a shell block; those that end in a backslash or within a quotation are joined with the next."""
    found, pending = [], ""
    for line in block.replace("\\\n", " ").splitlines():
        pending += line
        try:
            words(pending)
        except ValueError:
            pending += "\n"
            continue
        found.append(pending)
        pending = ""
    return found + ([pending] if pending else [])


# ---------------------------------------------------------------------------------------------------------------------
# Reading a program
# ---------------------------------------------------------------------------------------------------------------------
@dataclass
class Flag:
    """What may follow a flag: nothing, one value (of a type or among choices) or any number of values."""

    values: str = "one"
    type: str = ""
    choices: tuple = ()


@functools.cache
def program_flags(path: Path) -> dict[str, Flag]:
    """The flags of a program: the fields of its Args, and what it passes to argparse."""
    flags = {"--help": Flag("none")}
    for name, field in sync.Script(path).fields.items():
        flag = f"--{name.replace('_', '-')}"
        if field.annotation == "bool":
            flags |= {flag: Flag("none"), f"--no-{flag[2:]}": Flag("none")}
        elif field.annotation.startswith("Literal"):
            flags[flag] = Flag(choices=ast.literal_eval(f"({field.annotation[8:-1]},)"))
        else:
            many = re.match("tuple|list", field.annotation)
            flags[flag] = Flag("many" if many else "one", field.annotation.split(" ")[0])
    for node in ast.walk(sync.Script(path).tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            given = {keyword.arg for keyword in node.keywords}
            values = "none" if "action" in given else "many" if "nargs" in given else "one"
            flags |= {a.value: Flag(values) for a in node.args if isinstance(a, ast.Constant) and a.value[:2] == "--"}
    return flags


@functools.cache
def logged_metrics(path: Path) -> frozenset[str]:
    """The metrics that a script logs: string literals that look like one; `losses/<>` for f"losses/{name}"."""
    found = set()
    for node in ast.walk(sync.Script(path).tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)
        else:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if METRIC.fullmatch(text) and not text.endswith("*"):
            found.add(text)
    return frozenset(found)


@functools.cache
def symbols(path: Path) -> frozenset[str]:
    """The functions, classes and methods of a script: `name`, `Class` and `Class.method`, each method also alone."""
    found = set()
    for node in sync.Script(path).tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            methods = [method.name for method in getattr(node, "body", []) if isinstance(method, ast.FunctionDef)]
            if isinstance(node, ast.ClassDef):
                found |= {*methods, *(f"{node.name}.{method}" for method in methods)}
    return frozenset(found)


def recipe_flags(path: str, root: Path) -> dict[str, Flag]:
    """The flags that docs/recipes/X.patch adds to a script's Args; its page X.md may name them."""
    patch = (root / path).with_suffix(".patch")
    added = re.findall(r"^\+    (\w+): (\w+)[^=\n]* = ", patch.read_text(), re.MULTILINE) if patch.exists() else []
    return {f"--{name.replace('_', '-')}": Flag("none" if kind == "bool" else "one", kind) for name, kind in added}


def script_of(path: str, root: Path) -> Path | None:
    """X.py for docs/X.md, if there is such a script."""
    script = root / f"{Path(path).stem}.py"
    return script if Path(path).parent == Path("docs") and script.exists() else None


def programs_of(path: str, root: Path) -> list[Path]:
    """The programs that a page's flags and metrics may belong to: its script, or all scripts and tools."""
    script = script_of(path, root)
    return [script] if script else [*root.glob("*.py"), *root.glob("benchmark/*.py"), root / "tests" / "sync.py"]


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------
def command_problems(path: str, text: str, root: Path) -> list[str]:
    """Commands name files that exist, and flags and values that the program knows."""
    problems = []
    for command in commands(text):
        for file in files_of(command):
            if not (root / file).exists():
                problems.append(f"`{shlex.join(command)}` names {file}, which does not exist")
        runs = command[0] in ("python", "python3", "torchrun") or command[:2] == ["uv", "run"]
        at = next((i for i, word in enumerate(command) if word.endswith(".py")), None)
        if runs and at and "-m" not in command[:at] and (root / command[at]).exists():
            found = argument_problems(root / command[at], command[at + 1 :], root, recipe_flags(path, root))
            problems += [f"`{shlex.join(command)}`: {problem}" for problem in found]
    return problems


def files_of(command: list[str]) -> list[str]:
    """The words of a command that name a file of the repository. Of an address the last part is one."""
    found = []
    for word in command[1:]:
        name = word.split("::")[0].split("=")[-1]
        if re.search(r"\.(py|patch|txt|md|sh)$", name) and not re.match(r"runs/|[~$/<]", name):
            found.append(name.rsplit("/", 1)[-1] if "://" in name else name)
    return found


def argument_problems(program: Path, arguments: list[str], root: Path, more: dict | None = None) -> list[str]:
    """What is wrong with a program's arguments: a flag that it does not know, or a value that does not fit.

    `more` are flags that it has on this page alone.
    """
    flags, problems = program_flags(program) | (more or {}), []
    groups: list[list[str]] = [[]]
    for word in arguments:
        if word.startswith("--") and " " not in word:
            name, equals, value = word.partition("=")
            groups.append([name, value] if equals else [name])
        else:
            groups[-1].append(word)
    takes_only_flags = "Args" in sync.Script(program).definitions
    for words_without_flag in groups[:1]:
        if words_without_flag and takes_only_flags and words_without_flag != ["..."]:
            problems.append(f"{program.name} takes no {' '.join(words_without_flag)}")
    for name, *values in groups[1:]:
        flag, values = flags.get(name), [value for value in values if value != "..."]
        if flag is None:
            problems.append(f"{program.name} has no flag {name}")
        elif flag.values == "none" and values and takes_only_flags:
            problems.append(f"{name} takes no value, but has {' '.join(values)}")
        elif flag.values == "one" and (not values or (len(values) > 1 and takes_only_flags)):
            problems.append(f"{name} takes one value, but has {' '.join(values) or 'none'}")
        else:
            problems += [f"{name} cannot be {value}" for value in values if not fits(value, flag)]
        if name == "--flags" and values and flag:  # of benchmark/run.py: flags for the scripts it starts
            scripts = [value for other, *names in groups[1:] if other == "--scripts" for value in names]
            for script in (root / f"{Path(script).stem}.py" for script in scripts):
                problems += argument_problems(script, shlex.split(values[0]), root) if script.exists() else []
        if name == "--scripts" and flag:
            missing = [value for value in values if not (root / f"{value}.py").exists() and not value.endswith(".py")]
            problems += [f"there is no script {value}" for value in missing if not is_placeholder(value)]
    return problems


def fits(value: str, flag: Flag) -> bool:
    """Whether a value can be read as the flag's type or is among its choices."""
    if is_placeholder(value):
        return True
    if flag.choices:
        return value in map(str, flag.choices)
    kind = {"int": int, "float": float}.get(flag.type, str)
    try:
        kind(value)
    except ValueError:
        return value == "None"
    return True


def is_placeholder(value: str) -> bool:
    """N, RUN_DIR, <name>, $seed: for the reader to fill in."""
    return bool(re.fullmatch(r"[A-Z_]+|<.*>|\$.*", value))


def flag_problems(path: str, text: str, root: Path) -> list[str]:
    """Every `--flag` in inline code exists, on docs/X.md in X.py. (Whole commands: command_problems.)"""
    programs = programs_of(path, root)
    known = {flag for program in programs if program.exists() for flag in program_flags(program)}
    known |= recipe_flags(path, root).keys()
    spans = [span for span in inline_code(text) if span.split()[0] not in LAUNCHERS]
    given = {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z0-9]+(?:-[a-z0-9]+)*(?![\w*-])", span)}
    given |= {flag for span in spans for flag in re.findall(r"(?<![\w-])--\w*_\w*", span)}
    where = programs[0].name if script_of(path, root) else "any script or tool"
    return [f"`{flag}` is no flag of {where}" for flag in sorted(given - known)]


def metrics_in(text: str) -> set[str]:
    """The metrics in inline code, `losses/<anything>` as `losses/<>`."""
    return {re.sub("<.*>", "<>", name) for span in inline_code(text) for name in METRIC.findall(span)}


def metric_problems(path: str, text: str, root: Path) -> list[str]:
    """Metrics in inline code are logged; the section Metrics of docs/X.md names exactly those that X.py logs."""
    logged = {name for program in programs_of(path, root) if program.exists() for name in logged_metrics(program)}
    problems = []
    for name in sorted(metrics_in(text) - logged):
        template = name.split("/")[0] + "/<>"
        if not (name.endswith("*") and any(other.startswith(name.rstrip("*")) for other in logged)) and (
            template not in logged or name.endswith("*")
        ):
            problems.append(
                f"`{name}` is logged by {'no script' if script_of(path, root) is None else 'no line of it'}"
            )
    if script_of(path, root):
        listed = {name for name in metrics_in(section(text, "Metrics")) if not name.endswith("*")}
        for name in sorted(logged - listed):  # of `time/<>` the page may list the members instead
            if not (name.endswith("<>") and any(other.startswith(name[:-2]) for other in listed)):
                problems.append(f"section Metrics lacks `{name}`")
    return problems


def symbol_problems(path: str, text: str, root: Path) -> list[str]:
    """`name()` in inline code on docs/X.md is a function, class or method of X.py, or of a module that X.py imports."""
    script = script_of(path, root)
    if script is None:
        return []
    named = {match[1] for span in inline_code(text) if (match := re.fullmatch(r"([A-Za-z_][\w.]*)\(\)", span))}
    imported = set()
    for node in ast.walk(sync.Script(script).tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    unknown = sorted(name for name in named - symbols(script) if "." not in name or name.split(".")[0] not in imported)
    return [f"`{name}()` is no function, class or method of {script.name}" for name in unknown]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    titles = [re.sub(r"[`*]", "", title).lower() for _, title, _, _ in headings(text)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def link_problems(path: str, text: str, root: Path) -> list[str]:
    """Relative links and images resolve, anchors included."""
    problems, prose = [], SPAN.sub("", FENCE.sub("", text))
    targets = re.findall(r"\]\(<?([^)>\s]+)", prose) + re.findall(r"(?:src|href)=\"([^\"]+)\"", prose)
    targets += re.findall(r"^\[[^\]]+\]: +(\S+)", prose, re.MULTILINE)
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (root / path).parent / file if file else root / path
        if file.startswith("/") or (file and not found.exists()):
            problems.append(f"the link to {target} leads nowhere")
        elif anchor and anchor not in anchors(found.read_text() if file else text):
            problems.append(f"the link to {target} leads to no heading")
    return problems


def machine_path_problems(path: str, text: str, root: Path) -> list[str]:
    """No path of the machine that a page was written on."""
    return [f"machine path {found}" for found in re.findall(r"(?<![\w.~-])/(?:work|root|home)\b\S*", text)]


def heading_problems(path: str, text: str, root: Path) -> list[str]:
    """docs/X.md has the headings that all scripts' pages have, in their order."""
    if script_of(path, root) is None:
        return []
    titles = [title for _, title, _, _ in headings(text)]
    places = {heading: [i for i, title in enumerate(titles) if title.startswith(heading)][:1] for heading in HEADINGS}
    problems = [f"no heading {heading}" for heading, place in places.items() if not place]
    order = [place[0] for place in places.values() if place]
    return problems or ([] if order == sorted(order) else [f"the headings are not in the order {', '.join(HEADINGS)}"])


def python_problems(path: str, text: str, root: Path) -> list[str]:
    """Python blocks are Python, and a script's page shows how its policy is used elsewhere."""
    problems = []
    for block in python_blocks(text):
        try:
            ast.parse(block)
        except SyntaxError as error:
            problems.append(f"a Python block does not compile: {error}")
    if script_of(path, root) and not python_blocks(text, HEADINGS[-1]):
        problems.append(f"no Python block under {HEADINGS[-1]}")
    return problems


CHECKS = (
    command_problems,
    flag_problems,
    metric_problems,
    symbol_problems,
    link_problems,
    machine_path_problems,
    heading_problems,
    python_problems,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_pages(check, page):
    problems = check(str(page.relative_to(ROOT)), page.read_text(), ROOT)
    assert problems == [], "\n".join([f"{page.relative_to(ROOT)}:", *problems])


@pytest.mark.parametrize("script", sync.find_scripts(), ids=lambda script: script.name)
def test_commands_in_docstrings(script):
    lines = [line.strip() for line in ast.get_docstring(script.tree).splitlines()]
    block = "\n".join(line for line in lines if line.split(" ")[0] in LAUNCHERS)
    assert block
    assert command_problems(script.name, f"```bash\n{block}\n```", ROOT) == []


@pytest.mark.parametrize("script", sync.find_scripts(), ids=lambda script: script.name)
def test_every_script_has_a_page(script):
    assert (ROOT / "docs" / f"{script.path.stem}.md").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Proofs: each check finds what it is for
# ---------------------------------------------------------------------------------------------------------------------
SCRIPT = '''"""Docstring with losses/none in it."""

import numpy as np


class Args:
    seed: int = 1
    """seed"""
    num_envs: int = 1
    """environments"""
    ent_coef_end: float | None = None
    """entropy"""
    clip_vloss: bool = True
    """clip"""
    device: Literal["auto", "cpu"] = "auto"
    """device"""
    env_id: str = "A"
    """environment"""


class Store:
    def add(self):
        pass


def compute_gae():
    return {"losses/value_loss": 1, "eval/mean": 2, f"rewards/{np.pi}": 3}
'''
TOOL = '''class Args:
    scripts: tuple[str, ...]
    """scripts"""
    flags: str = ""
    """flags"""
    patch: Path | None = None
    """patch"""
'''
PLOT = 'parser.add_argument("run")\nparser.add_argument("--results", nargs="*")\nparser.add_argument("--table")\n'
PAGE = """# toy

[What](#what-it-is) and [the readme](../README.md#a-toy), ![curve](images/toy.png) <img src="images/toy.png">

## What it is
## Run

```bash
# a comment with python none.py
OMP_NUM_THREADS=1 python toy.py --seed 3 --no-clip-vloss --device cpu  # --comment
python toy.py --seed=3 --clip-vloss \\
    --env-id module:Env-v0 && uv run --with x toy.py ...
for seed in 1 2 3; do python toy.py --seed $seed --num-envs N; done
curl -LO https://example.com/main/toy.py && torchrun --nproc-per-node 2 toy.py --ent-coef-end 1e-3
python benchmark/run.py --scripts toy --patch docs/toy.patch --flags "--num-envs 8 --no-clip-vloss"
python benchmark/plot.py runs/x --results toy other --table docs/toy.md
pip install -r requirements.txt --requirements-from-script toy.py
git apply docs/toy.patch
python -m pytest tests/test_toy.py::test_x -k "a b"
tensorboard --logdir runs
```

## How the file is laid out

`compute_gae()`, `Store()`, `Store.add()`, `add()`, `np.zeros()`, `exp(x)`.

## Details that matter

`--num-envs 8`, `--no-clip-vloss`, `--clip-*`, `uv pip install --torch-backend=cpu torch`, `losses/value_loss`.

## Symbols
## Metrics

`losses/value_loss`, `eval/mean`, `rewards/<term>`, all of `losses/*`.

```text
python none.py, `--none`, losses/none
```

## Results
## Changing it
## Differences from the paper and from others
## Using a trained policy elsewhere

```python
x = 1
```
"""


@pytest.fixture
def repository(tmp_path):
    files = {
        "toy.py": SCRIPT,
        "README.md": "# A toy\n",
        "requirements.txt": "",
        "benchmark/run.py": TOOL,
        "benchmark/plot.py": PLOT,
        "tests/test_toy.py": "",
        "docs/toy.md": PAGE,
        "docs/toy.patch": "",
        "docs/images/toy.png": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def all_problems(text: str, root: Path, path: str = "docs/toy.md") -> list[str]:
    return [problem for check in CHECKS for problem in check(path, text, root)]


def test_a_right_page_has_no_problem(repository):
    assert all_problems(PAGE, repository) == []
    assert len(commands(PAGE)) == 12


# What is added to the page, and the one problem that this makes.
WRONG_COMMANDS = {
    "python none.py": "names none.py, which does not exist",
    "cd x; uv run none.py": "names none.py, which does not exist",
    "curl -LO https://example.com/main/none.py": "names none.py, which does not exist",
    "pip install -r none.txt": "names none.txt, which does not exist",
    "pip install --requirement=none.txt": "names none.txt, which does not exist",
    "git apply docs/none.patch": "names docs/none.patch, which does not exist",
    "python benchmark/run.py --scripts toy --patch docs/none.patch": "names docs/none.patch, which does not exist",
    "python tests/none.py": "names tests/none.py, which does not exist",
    "pytest tests/none.py": "names tests/none.py, which does not exist",
    "python toy.py --none 1": "toy.py has no flag --none",
    "uv run toy.py --none": "toy.py has no flag --none",
    "SEED=3 python toy.py \\\n  --none": "toy.py has no flag --none",
    "for x in 1 2; do python toy.py --none; done": "toy.py has no flag --none",
    "python toy.py --num_envs 8": "toy.py has no flag --num_envs",
    "python toy.py --no-seed": "toy.py has no flag --no-seed",
    "python toy.py --clip-vloss False": "--clip-vloss takes no value, but has False",
    "python toy.py --clip-vloss=False": "--clip-vloss takes no value, but has False",
    "python toy.py --seed --clip-vloss": "--seed takes one value, but has none",
    "python toy.py --seed 1 2": "--seed takes one value, but has 1 2",
    "python toy.py 3": "toy.py takes no 3",
    "python toy.py --seed 1e6": "--seed cannot be 1e6",
    "python toy.py --ent-coef-end low": "--ent-coef-end cannot be low",
    "python toy.py --device gpu": "--device cannot be gpu",
    "python benchmark/plot.py --none": "plot.py has no flag --none",
    "python benchmark/plot.py --table": "--table takes one value, but has none",
    "python benchmark/run.py --scripts none": "there is no script none",
    "python benchmark/run.py --scripts toy --flags '--none 1'": "toy.py has no flag --none",
}
WRONG_TEXT = {
    "`python toy.py --none`": "toy.py has no flag --none",
    "`--none`": "`--none` is no flag of toy.py",
    "`--seed 3 --none`": "`--none` is no flag of toy.py",
    "`--num_envs`": "`--num_envs` is no flag of toy.py",
    "`--patch`": "`--patch` is no flag of toy.py",
    "`losses/none`": "`losses/none` is logged by no line of it",
    "`time/*`": "`time/*` is logged by no line of it",
    "`compute_none()`": "`compute_none()` is no function, class or method of toy.py",
    "`Store.none()`": "`Store.none()` is no function, class or method of toy.py",
    "[x](none.md)": "the link to none.md leads nowhere",
    "[x](../none.py#y)": "the link to ../none.py#y leads nowhere",
    "![x](images/none.png)": "the link to images/none.png leads nowhere",
    "[![x](images/none.png)](toy.md)": "the link to images/none.png leads nowhere",
    '<img width="3" src="none.png">': "the link to none.png leads nowhere",
    "\n[x]: none.md": "the link to none.md leads nowhere",
    "[x](/docs/toy.md)": "the link to /docs/toy.md leads nowhere",
    "[x](#none)": "the link to #none leads to no heading",
    "[x](../README.md#none)": "the link to ../README.md#none leads to no heading",
    "saved in /home/me/runs": "machine path /home/me/runs",
    f"```text\n/{'work'}/main\n```": f"machine path /{'work'}/main",
    "see (/root)": "machine path /root)",
    "```python\nx = = 1\n```": "a Python block does not compile",
}


@pytest.mark.parametrize(
    ("addition", "problem"),
    [(f"```bash\n{command}\n```", problem) for command, problem in WRONG_COMMANDS.items()] + [*WRONG_TEXT.items()],
)
def test_what_is_wrong_on_a_page_is_found(repository, addition, problem):
    found = all_problems(f"{PAGE}\n{addition}\n", repository)
    assert len(found) == 1, found
    assert problem in found[0]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        *((f"## {heading}", f"## x{heading}", f"no heading {heading}") for heading in HEADINGS),
        ("## Symbols\n", "", "no heading Symbols"),
        ("## Symbols\n## Metrics", "## Metrics\n## Symbols", "the headings are not in the order"),
        ("`eval/mean`", "", "section Metrics lacks `eval/mean`"),
        ("`rewards/<term>`", "", "section Metrics lacks `rewards/<>`"),
        ("```python\nx = 1\n```", "", "no Python block under Using a trained policy elsewhere"),
    ],
)
def test_what_a_page_lacks_is_found(repository, old, new, problem):
    assert old in PAGE
    assert problem in "\n".join(all_problems(PAGE.replace(old, new, 1), repository))


def test_members_of_a_template_may_be_listed(repository):
    """`rewards/forward` for f"rewards/{name}": the page may know better than the source what there is."""
    assert all_problems(PAGE.replace("rewards/<term>", "rewards/forward"), repository) == []


def test_other_pages_speak_of_all_programs(repository):
    text = "`--patch`, `--seed`, `--table x`, `losses/value_loss`, `anything()`, `rewards/forward`"
    for path in ("README.md", "docs/other.md"):
        assert all_problems(text, repository, path) == []
        found = all_problems("`--none` `losses/none`", repository, path)
        assert found == ["`--none` is no flag of any script or tool", "`losses/none` is logged by no script"]


def test_a_recipes_page_may_name_the_flags_that_its_patch_adds(repository):
    folder = repository / "docs" / "recipes"
    folder.mkdir()
    (folder / "x.patch").write_text("+    share: float = 0.5\n+    path: str | None = None\n     old: int = 3\n")
    page = "`--share`, `--path`, `--old`\n```bash\npython toy.py --share 0.3 --path a\npython toy.py --share x\n```\n"
    assert flag_problems("docs/recipes/x.md", page, repository) == ["`--old` is no flag of any script or tool"]
    assert command_problems("docs/recipes/x.md", page, repository) == ["`python toy.py --share x`: --share cannot be x"]
    assert len(command_problems("docs/recipes/y.md", page, repository)) == 3


def test_python_blocks_of_one_section():
    text = (
        "# A\n```python\n# no heading\na\n```\n## B\n```python\nb\n```\n```sh\nc\n```\n### C\n```python\nd\n```\n# D\n"
    )
    assert python_blocks(text) == ["# no heading\na\n", "b\n", "d\n"]
    assert python_blocks(text, "B") == ["b\n", "d\n"]
