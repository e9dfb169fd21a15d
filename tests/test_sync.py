"""The scripts are in step with each other (tests/sync.py) and laid out as section 1 of the contract says.

Every rule is also shown to fail: on miniature scripts with one thing wrong, and on copies of the real ones.
"""

import ast
import io
import re
import symtable
import tokenize
from pathlib import Path

import pytest
import sync
from sync import Script

SCRIPTS = sync.find_scripts()
MOST_CODE_LINES = {"rainbow.py": 550, "dpo.py": 550, "grpo.py": 650}  # all others: 450
MOST_PLUMBING_LINES = 120
SECTIONS = ("Environment|Task", "Networks", "Memory|Data", "The math", "Update", "Evaluate", "Plumbing", "Main")
BANNER = re.compile(r"^# -{20,}\n# ([^\n]+)\n# -{20,}$", re.MULTILINE)


# ---------------------------------------------------------------------------------------------------------------------
# What a script must look like: each function returns a list of problems
# ---------------------------------------------------------------------------------------------------------------------
def sections(script: Script) -> dict[str, range]:
    """Line numbers (from 1) of each section, by the words of its banner before a colon."""
    starts = [(script.text[: match.start()].count("\n") + 1, match[1]) for match in BANNER.finditer(script.text)]
    ends = [start for start, _ in starts[1:]] + [len(script.lines) + 1]
    return {title.split(":")[0]: range(start, end) for (start, title), end in zip(starts, ends, strict=True)}


def section_problems(script: Script) -> list[str]:
    """Block, docstring, imports, Args, then the banner sections in their order; update, evaluate and main in theirs."""
    problems, found = [], sections(script)
    titles = list(found)
    if len(titles) != len(SECTIONS) or not all(re.fullmatch(*pair) for pair in zip(SECTIONS, titles, strict=True)):
        return [f"the sections are {', '.join(titles)}; wanted: {', '.join(SECTIONS)}"]
    block, args = sync.BLOCK.search(script.text), script.definitions.get("Args")
    imports = [node.lineno for node in script.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if not block or block.start() != 0:
        problems.append("the file does not begin with its PEP 723 block")
    if args is None or not max(imports, default=0) <= args.start < found[titles[0]].start:
        problems.append("Args is not between the imports and the first section")
    for name, title in (("update", "Update"), ("evaluate", "Evaluate"), ("main", "Main")):
        if name not in script.definitions or script.definitions[name].end not in found[title]:
            problems.append(f"{name} is not in section {title}")
    return problems


def ending_problems(script: Script) -> list[str]:
    """The file ends with the two lines that call main."""
    end = script.text.rstrip("\n").split("\n")[-2:]
    if end[0] != 'if __name__ == "__main__":' or not re.match(r"    \S*main\(", end[1]):
        return ["the file does not end with the two lines of `__main__`"]
    return []


def docstring_problems(script: Script) -> list[str]:
    """What the module docstring must hold. (--help shows it: tests/test_packaging.py.)"""
    text = ast.get_docstring(script.tree) or ""
    wanted = {"Run:": r"^Run:", "Expect:": r"^Expect:", "a paper's arXiv id": r"arXiv:\d{4}\.\d{4,5}"}
    wanted["Differs, with a numbered list"] = r"^Differs[^\n]*:\n(?s:.*)^ +1\. "
    return [f"the docstring lacks {what}" for what, pattern in wanted.items() if not re.search(pattern, text, re.M)]


def code_lines(script: Script) -> set[int]:
    """Numbers of the lines that hold code: not blank, not only a comment, no docstring and no help text."""
    lines = set()
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(script.text).readline):
        if token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(script.tree):
        if sync.is_string(node):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def length_problems(script: Script) -> list[str]:
    lines, most = code_lines(script), MOST_CODE_LINES.get(script.name, 450)
    plumbing = len(lines & set(sections(script).get("Plumbing", ())))
    problems = [f"{len(lines)} code lines, at most {most} are allowed"] if len(lines) > most else []
    if plumbing > MOST_PLUMBING_LINES:
        problems.append(f"{plumbing} code lines in Plumbing, at most {MOST_PLUMBING_LINES} are allowed")
    return problems


def field_problems(script: Script) -> list[str]:
    """Every field of Args has help text and is read: `args.name` anywhere, or `self.name` in Args."""
    read = set()
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value)
            if owner.split(".")[-1] == "args" or (owner == "self" and inside_args(script, node)):
                read.add(node.attr)
    unread = [f"Args.{name} is read nowhere" for name in script.fields if name not in read]
    return unread + [f"Args.{name} has no help text" for name, field in script.fields.items() if not field.help]


def inside_args(script: Script, node: ast.AST) -> bool:
    args = script.definitions["Args"]
    return args.start < node.lineno <= args.end


def global_problems(script: Script) -> list[str]:
    """Functions read no module-level names but constants in capitals, imports, functions and classes."""
    module = symtable.symtable(script.text, script.name, "exec")
    variables = {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() and not symbol.is_imported() and not symbol.is_namespace()
    }
    problems, tables = [], list(module.get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            name, where = symbol.get_name(), f"{table.get_name()} (line {table.get_lineno()})"
            if symbol.is_declared_global():
                problems.append(f"{where} declares global {name}")
            elif symbol.is_global() and name in variables and not name.isupper():
                problems.append(f"{where} reads the global {name}")
    return problems


def purity_problems(script: Script) -> list[str]:
    """The math knows no flags, optimiser, logger, device or hidden randomness; update never waits for the GPU."""
    problems, found = [], sections(script)
    waits = {".item", ".cpu", ".numpy", ".tolist", ".synchronize", "print"}
    impure = waits | {"args", "optimizer", "logger", "device", ".backward", ".step", ".cuda"}
    for name, definition in script.definitions.items():
        if definition.start in found.get("The math", ()):
            forbidden = impure
        elif name == "update":
            forbidden = waits
        else:
            continue
        for node in ast.walk(ast.parse(definition.text)):
            word = f".{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", None)
            word = node.arg if isinstance(node, ast.arg) else word
            if word in forbidden:
                problems.append(f"{name} holds `{word}`")
            draws = isinstance(node, ast.Call) and re.match(
                r"(torch|np)\.(rand|normal|bernoulli|multi)", ast.unparse(node)
            )
            if draws and forbidden is impure and "generator" not in [keyword.arg for keyword in node.keywords]:
                problems.append(f"{name} draws random numbers: {ast.unparse(node)}")
    return problems


STRUCTURE = (
    section_problems,
    ending_problems,
    docstring_problems,
    length_problems,
    field_problems,
    global_problems,
    purity_problems,
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
@pytest.mark.parametrize("problems", STRUCTURE, ids=lambda function: function.__name__)
def test_layout_of_every_script(problems, script):
    assert problems(script) == []


def test_the_repository_is_in_step():
    assert SCRIPTS
    assert sync.problems() == [], "\n".join(sync.problems())


# ---------------------------------------------------------------------------------------------------------------------
# Proofs: each rule finds what it is for
# ---------------------------------------------------------------------------------------------------------------------
RULE = "# " + "-" * 40
MINIATURE = f'''# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "moviepy>=2.1",
#     "numpy>=2.0",
#     "torch>=2.11,<3",
# ]
# ///
"""A script in miniature.

    Somebody, "A paper", 2017, arXiv:1707.06347

Run:
    python one.py

Expect: nothing.

Differs from the paper:
    1. It does nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch

LIMIT = 3


@dataclass
class Args:
    seed: int = 1
    """seed of everything"""
    steps: int = 10
    """budget: steps"""

    @property
    def half(self) -> int:
        return self.steps // 2


{RULE}
# Environment
{RULE}
def make_envs(args):
    return RecordVideo(args.seed)


{RULE}
# Networks
{RULE}
@torch.no_grad()
def helper(x):
    """Adds."""
    # a comment
    return x + LIMIT


{RULE}
# Memory: none
{RULE}
class Store:
    def __init__(self):
        self.rows = np.zeros(3)


{RULE}
# The math
{RULE}
def value_loss(values, returns):
    return (values - returns).square().mean()


{RULE}
# Update
{RULE}
def update(args, x):
    return value_loss(x, torch.zeros_like(x))


{RULE}
# Evaluate
{RULE}
def evaluate(args):
    return [1.0]


{RULE}
# Plumbing
{RULE}
def stop(code):
    raise SystemExit(code)


{RULE}
# Main
{RULE}
def main(args):
    return evaluate(args)


if __name__ == "__main__":
    main(Args())
'''
PINS = "moviepy==2.2.1\nnumpy==2.4.6\ntorch==2.13.0\n"


def edited(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def write_folder(folder: Path, requirements: str = PINS, **texts: str) -> Path:
    """A repository of scripts NAME.py."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "requirements.txt").write_text(requirements)
    return folder


def test_the_miniature_has_no_problem(tmp_path):
    folder = write_folder(tmp_path, one=MINIATURE, two=MINIATURE)
    assert sync.problems(folder) == []
    assert [problem for check in STRUCTURE for problem in check(sync.find_scripts(folder)[0])] == []


HELPER = '@torch.no_grad()\ndef helper(x):\n    """Adds."""\n    # a comment\n    return x + LIMIT\n'
# (what is replaced in two.py, by what, what the message says)
OUT_OF_STEP = {
    "code": ("return x + LIMIT", "return x - LIMIT", "helper of two.py has drifted from one.py's"),
    "comment": ("    # a comment\n", "    # another comment\n", "+    # another comment"),
    "docstring": ('"""Adds."""', '"""Adds some."""', '+    """Adds some."""'),
    "decorator": ("@torch.no_grad()\n", "", "-@torch.no_grad()"),
    "comment at the end": ("+ LIMIT\n", "+ LIMIT\n    # the end\n", "+    # the end"),
    "class": ("np.zeros(3)", "np.zeros(4)", "python tests/sync.py --from one.py --name Store"),
    "needless note": (HELPER, f"# differs from one.py: no reason\n{HELPER}", "but it does not: remove the note"),
    "unreadable note": (HELPER, f"# differs: somehow\n{HELPER}", "must read `# differs from OTHER.py: why`"),
    "note without a reason": (HELPER, f"# differs from one.py:\n{HELPER}", "must read `# differs from OTHER.py: why`"),
    "note on nothing": (HELPER, f"# differs from three.py: why\n{HELPER}", "names three.py, which is no other script"),
    "note on itself": (HELPER, f"# differs from two.py: why\n{HELPER}", "names two.py, which is no other script"),
    "help text": ("seed of everything", "the seed", "help of Args.seed is 'the seed' in two.py"),
    "annotation": ("seed: int", "seed: float", "annotation of Args.seed is 'float' in two.py"),
    "range": ("torch>=2.11,<3", "torch>=2.10,<3", "range of torch is not the same everywhere"),
    "python": ('">=3.11"', '">=3.12"', "requires-python is not the same everywhere"),
    "extra": ("numpy>=2.0", "numpy[fast]>=2.0", "requirements.txt has numpy==2.4.6, the scripts want numpy[fast]"),
    "missing pin": ('#     "torch', '#     "tqdm>=4",\n#     "torch', "requirements.txt lacks tqdm"),
    "unused package": (
        '#     "torch',
        '#     "tqdm>=4",\n#     "torch',
        "names tqdm, which the script does not import",
    ),
    "run-time package without its use": ("RecordVideo", "list", "names moviepy, which the script does not import"),
    "undeclared import": (
        "import torch\n",
        "import torch\nimport tqdm\n",
        "imports tqdm, which its PEP 723 block does",
    ),
    "lazy import": ("    raise", "    import tqdm.auto\n    raise", "imports tqdm, which its PEP 723 block does"),
    "sibling": ("import torch\n", "import torch\nfrom one import helper\n", "imports one, a file of this repository"),
    "package": ("import torch\n", "import torch\nimport benchmark.x\n", "imports benchmark, a file of this repository"),
    "relative": ("import torch\n", "import torch\nfrom .one import helper\n", "imports ., a file of this repository"),
    "by name": ("    raise", '    importlib.import_module("one")\n    raise', "imports one, a file of this repository"),
}


@pytest.mark.parametrize("case", OUT_OF_STEP)
def test_what_is_out_of_step_is_found(tmp_path, case):
    old, new, message = OUT_OF_STEP[case]
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "benchmark" / "x.py").touch()
    folder = write_folder(tmp_path, one=MINIATURE, two=edited(MINIATURE, old, new))
    assert message in "\n".join(sync.problems(folder))
    assert sync.main([], folder) == 1


@pytest.mark.parametrize(
    ("requirements", "message"),
    [
        (edited(PINS, "torch==2.13.0", "torch==2.10.0"), "torch==2.10.0 is outside <3,>=2.11 of one.py"),
        (edited(PINS, "torch==2.13.0", "torch==3.0.0"), "torch==3.0.0 is outside"),
        (edited(PINS, "torch==2.13.0\n", ""), "requirements.txt lacks torch, which one.py names"),
        (edited(PINS, "torch==2.13.0", "torch>=2.13"), "torch>=2.13 is no pin of one version"),
        (edited(PINS, "torch==2.13.0", "torch==2.*"), "torch==2.* is no pin of one version"),
        (PINS + "scipy==1.17.1\n", "requirements.txt names scipy, which no script does"),
        (PINS + "Torch==2.13.0\n", "requirements.txt names Torch twice"),
        (PINS + "-r other.txt\n", "-r other.txt is no pin of a package"),
        (edited(PINS, "numpy", "numpy[fast]"), "requirements.txt has numpy[fast]==2.4.6, the scripts want numpy"),
    ],
)
def test_wrong_requirements_are_found(tmp_path, requirements, message):
    assert message in "\n".join(sync.problems(write_folder(tmp_path, requirements, one=MINIATURE)))


def test_extras_are_merged(tmp_path):
    """gymnasium[mujoco] here and gymnasium[atari] there make one line with both, in any order and spelling."""
    texts = {name: edited(MINIATURE, "numpy>=2.0", f"numpy[{extra}]>=2.0") for name, extra in (("a", "x"), ("b", "y"))}
    requirements = edited(PINS, "numpy", "NumPy[y,x]")
    assert sync.problems(write_folder(tmp_path, requirements, **texts)) == []


def test_own_definitions_may_differ(tmp_path):
    other = MINIATURE
    for old, new in (
        ("return [1.0]", "return [2.0]"),
        ("steps: int = 10", "steps: int = 20"),
        ("x, torch", "x + 1, torch"),
    ):
        other = edited(other, old, new)
    assert sync.problems(write_folder(tmp_path, one=MINIATURE, two=other)) == []


DECLARED = HELPER.replace("x + LIMIT", "x * LIMIT")


def test_a_declared_difference_is_honoured(tmp_path):
    """A note speaks for its script against all that are like OTHER.py, and only against these."""
    other = edited(MINIATURE, HELPER, f"# differs from one.py: multiplies\n{DECLARED}")
    folder = write_folder(tmp_path, one=MINIATURE, two=MINIATURE, three=other, four=other)
    assert sync.problems(folder) == []
    write_folder(tmp_path, four=edited(MINIATURE, HELPER, DECLARED))
    assert "helper of four.py has drifted" in "\n".join(sync.problems(folder))  # the same code, but without the note
    third = HELPER.replace("x + LIMIT", "x / LIMIT")
    write_folder(tmp_path, four=edited(MINIATURE, HELPER, f"# differs from one.py: divides\n{third}"))
    assert "helper of three.py has drifted from four.py's" in "\n".join(sync.problems(folder))
    write_folder(tmp_path, four=edited(MINIATURE, HELPER, f"# differs from one.py, three.py: divides\n{third}"))
    assert sync.problems(folder) == []


def test_copying_repairs_a_drift_and_spares_declared_differences(tmp_path, capsys):
    declared = edited(MINIATURE, HELPER, f"# differs from one.py: multiplies\n{DECLARED}")
    drifted = edited(edited(MINIATURE, "return x + LIMIT\n", "return x - LIMIT\n    # why not\n"), "Adds.", "Does.")
    without = edited(MINIATURE, HELPER, "")
    folder = write_folder(tmp_path, one=MINIATURE, two=drifted, three=declared, four=without)
    assert sync.main(["--from", "one.py", "--name", "helper"], folder) == 0
    assert (
        "copied to: two.py\nleft as they are, since their notes say that they differ: three.py"
        in capsys.readouterr().out
    )
    texts = {path.stem: path.read_text() for path in folder.glob("*.py")}
    assert texts == {"one": MINIATURE, "two": MINIATURE, "three": declared, "four": without}
    # From a declared variant the copy goes to the scripts that declare the same, note included.
    write_folder(tmp_path, five=edited(declared, "multiplies", "times").replace("# a comment", "# drifted"))
    assert sync.main(["--from", "three.py", "--name", "helper"], folder) == 0
    assert (folder / "five.py").read_text() == declared
    assert (folder / "one.py").read_text() == MINIATURE
    assert sync.problems(folder) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "one.py"], "--from and --name belong together"),
        (["--from", "three.py", "--name", "helper"], "no script three.py"),
        (["--from", "one.py", "--name", "nothing"], "no top-level nothing"),
        (["--from", "one.py", "--name", "main"], "every script has its own main"),
    ],
)
def test_what_cannot_be_copied_is_refused(tmp_path, capsys, arguments, message):
    folder = write_folder(tmp_path, one=MINIATURE, two=MINIATURE)
    with pytest.raises(SystemExit) as refusal:
        sync.main(arguments, folder)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def planted(script: Script, names: list[str]) -> str:
    """The script's text with a comment planted at the end of some definitions."""
    lines = [*script.lines]
    for name in names:
        lines[script.definitions[name].end - 1] += "  # planted"
    return "\n".join(lines)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_drift_of_a_real_script_is_found_and_repaired(tmp_path, script):
    """In a twin of the script: a drift of any definition is found, and some are repaired, to the byte."""
    bare = tmp_path / "bare" / script.name  # without the notes on how it differs from scripts that are not there
    bare.parent.mkdir()
    bare.write_text(re.sub(r"^# differs from .*\n", "", script.text, flags=re.MULTILINE))
    script = Script(bare)
    names = [name for name in script.definitions if name not in sync.EXEMPT]
    requirements = (sync.ROOT / "requirements.txt").read_text()
    texts = {script.path.stem: script.text, "twin": planted(script, names)}
    found = sync.definition_problems(sync.find_scripts(write_folder(tmp_path, requirements, **texts)))
    assert len(found) == len(names)
    for name, problem in zip(names, found, strict=True):
        assert problem.startswith(f"{name} of twin.py has drifted from {script.name}'s")
    some = [names[0], names[len(names) // 2], names[-1]]
    (tmp_path / "twin.py").write_text(planted(script, some))
    for name in some:
        assert sync.copy_definition(tmp_path, script.name, name) == (["twin.py"], [])
    assert (tmp_path / "twin.py").read_text() == script.text == (tmp_path / script.name).read_text()


LONG = "".join(f"    x = {number}\n" for number in range(500))
# (the check, what is replaced in the miniature, by what, what the message says)
BADLY_LAID_OUT = {
    "order": (section_problems, "# Networks\n", "# Update\n", "the sections are Environment, Update, Memory"),
    "no section": (section_problems, f"{RULE}\n# Evaluate\n{RULE}\n", "", "the sections are Environment, Networks"),
    "more sections": (section_problems, f"{RULE}\n# Main\n", f"{RULE}\n# More\n{RULE}\n{RULE}\n# Main\n", "More"),
    "place of main": (section_problems, "def main", "def amain", "main is not in section Main"),
    "place of update": (section_problems, "def update", "def aupdate", "update is not in section Update"),
    "place of Args": (section_problems, "@dataclass", f"{RULE}\n# x\n{RULE}\n@dataclass", "the sections are x"),
    "late import": (section_problems, "class Store:", "import os\nclass Store:", "Args is not between the imports"),
    "block not first": (section_problems, "# /// script", "\n# /// script", "does not begin with its PEP 723 block"),
    "long ending": (ending_problems, "    main(Args())", "    args = Args()\n    main(args)", "the two lines"),
    "no ending": (ending_problems, 'if __name__ == "__main__":\n    main(Args())', "", "the two lines of `__main__`"),
    "no Run": (docstring_problems, "Run:", "Go:", "lacks Run:"),
    "no Expect": (docstring_problems, "Expect:", "Get:", "lacks Expect:"),
    "no paper": (docstring_problems, "arXiv:1707.06347", "", "lacks a paper's arXiv id"),
    "no departures": (docstring_problems, "    1. It", "    It", "lacks Differs, with a numbered list"),
    "length": (length_problems, "    return [1.0]", f"{LONG}    return [1.0]", "code lines, at most 450 are allowed"),
    "plumbing": (length_problems, "    raise", f"{LONG}    raise", "code lines in Plumbing, at most 120"),
    "no help": (field_problems, '    """budget: steps"""\n', "", "Args.steps has no help text"),
    "unread": (field_problems, "self.steps // 2", "2", "Args.steps is read nowhere"),
    "only written": (field_problems, "return RecordVideo(args.seed)", "args.seed = 1", "Args.seed is read nowhere"),
    "other self": (field_problems, "args.seed", "self.seed", "Args.seed is read nowhere"),
    "global": (global_problems, "LIMIT", "limit", "helper (line 53) reads the global limit"),
    "nested global": (global_problems, "x + LIMIT", "(lambda: limit)()\n\n\nlimit = 3", "reads the global limit"),
    "global statement": (
        global_problems,
        "    raise",
        "    global LIMIT\n    raise",
        "stop (line 91) declares global LIMIT",
    ),
    "math with flags": (purity_problems, "values, returns)", "values, returns, args)", "value_loss holds `args`"),
    "math that waits": (purity_problems, ".mean()", ".mean().item()", "value_loss holds `.item`"),
    "math that draws": (purity_problems, "- returns", "- torch.randn(3)", "value_loss draws random numbers"),
    "update that waits": (purity_problems, "zeros_like(x))", "zeros_like(x)).cpu()", "update holds `.cpu`"),
    "update that prints": (purity_problems, "    return value_loss", "    print(x)\n    return value_loss", "`print`"),
}


@pytest.mark.parametrize("case", BADLY_LAID_OUT)
def test_a_bad_layout_is_found(tmp_path, case):
    check, old, new, message = BADLY_LAID_OUT[case]
    folder = write_folder(tmp_path, one=edited(MINIATURE, old, new))
    assert message in "\n".join(check(sync.find_scripts(folder)[0]))


def test_code_lines_are_neither_blank_nor_comment_nor_docstring(tmp_path):
    text = (
        '# /// script\n# x = 1\n# ///\n"""Doc\nstring."""\n\nx = """a\nb"""  # two lines\ny = [\n    # no\n    1,\n]\n'
    )
    write_folder(tmp_path, one=text)
    assert code_lines(sync.find_scripts(tmp_path)[0]) == {7, 8, 9, 11, 12}
