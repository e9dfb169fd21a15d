"""Keep what the scripts repeat in step: the same helpers, flags and dependencies everywhere.

    python tests/sync.py                                        print what has drifted (exit code 1)
    python tests/sync.py --from sac.py --name ReplayBuffer      copy sac.py's ReplayBuffer over the other copies

A script is a .py file at the top of the repository with a PEP 723 block. The rules:

1. Top-level functions and classes of one name have one source text, comments and docstring included. A real difference
   is declared on the line above the definition (and above its decorators): `# differs from OTHER.py: why`. It holds
   for every script whose text is OTHER.py's. A note on code that does not differ is an error.
   Each script has its own Args, check, main, update, evaluate, make_envs and make_eval_env.
2. `Args` fields of one name have one annotation and one help text; only defaults differ.
3. requirements.txt is the pinned union of the PEP 723 blocks: the same names and extras, each pin inside its range.
   A package has the same range in every script, and all scripts need the same Python.
4. What a script imports is in its block, and the block holds nothing else, but for what is only needed at run time.
5. A script imports no other file of this repository.
"""

import argparse
import ast
import difflib
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXEMPT = {"Args", "check", "main", "update", "evaluate", "make_envs", "make_eval_env"}
BLOCK = re.compile(r"^# /// script$\n((?:^#(?: .*)?$\n)+)^# ///$", re.MULTILINE)
NOTE = re.compile(r"# differs from (\w+\.py(?:, \w+\.py)*): \S")
# Packages that a block names though the script never imports them: (what the script's text must hold, why).
RUN_TIME_ONLY = {
    "moviepy": ("RecordVideo", "gymnasium's RecordVideo writes its files with it"),
    "mujoco-core": ("mujoco", "the compiled half of mujoco, released and pinned beside it"),
    "opencv-python-headless": ("AtariWrapper", "Stable-Baselines3's AtariWrapper shrinks the screen with it"),
    "tensorboard": ("torch.utils.tensorboard", "torch.utils.tensorboard is a layer over it"),
}


@dataclass
class Definition:
    """A top-level function or class with its decorators: lines start..end (from 0, end excluded) and the note above."""

    script: str
    start: int
    end: int
    text: str
    note: str | None

    @property
    def differs_from(self) -> frozenset[str]:
        """The scripts that the note names; none without a note that can be read."""
        match = NOTE.match(self.note or "")
        return frozenset(match[1].split(", ")) if match else frozenset()


@dataclass
class Field:
    """A field of Args, with its annotation and help text as they are written, white space aside."""

    annotation: str
    help: str | None


class Script:
    """A script's text and what the checks need to know of it."""

    def __init__(self, path: Path):
        self.path, self.name, self.text = path, path.name, path.read_text()
        self.tree = ast.parse(self.text, self.name)
        self.lines = self.text.split("\n")

    @functools.cached_property
    def block(self) -> dict:
        """The PEP 723 block; empty when there is none."""
        match = BLOCK.search(self.text)
        return tomllib.loads("".join(line[2:] + "\n" for line in match[1].splitlines())) if match else {}

    @property
    def requirements(self) -> list[Requirement]:
        return [Requirement(line) for line in self.block.get("dependencies", [])]

    @functools.cached_property
    def definitions(self) -> dict[str, Definition]:
        """The top-level functions and classes."""
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                start, end = min(n.lineno for n in (node, *node.decorator_list)) - 1, node.end_lineno
                while end < len(self.lines) and re.match(r"\s+#", self.lines[end]):
                    end += 1  # a comment at the end of the body is no part of the syntax tree
                above = self.lines[start - 1] if start else ""
                note = above if above.startswith("# differs") else None
                found[node.name] = Definition(self.name, start, end, "\n".join(self.lines[start:end]), note)
        return found

    @functools.cached_property
    def fields(self) -> dict[str, Field]:
        """The fields of Args; a field's help text is the string on the line below it."""
        classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
        body = classes[0].body if classes else []
        found = {}
        for node, below in zip(body, [*body[1:], None], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = below.value.value if is_string(below) else None
                found[node.target.id] = Field(ast.unparse(node.annotation), text and " ".join(text.split()))
        return found

    @functools.cached_property
    def imports(self) -> set[str]:
        """The top-level names of all modules imported anywhere in the script; `.` for a relative import."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add("." if node.level else node.module.split(".")[0])
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
                named = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
                found |= {str(module).split(".")[0] or "." for module in named}
        return found


def is_string(node: ast.AST | None) -> bool:
    """Whether a statement is nothing but a string: a docstring, or the help text of a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def find_scripts(folder: Path = ROOT) -> list[Script]:
    return [Script(path) for path in sorted(folder.glob("*.py")) if BLOCK.search(path.read_text())]


# ---------------------------------------------------------------------------------------------------------------------
# Checks: each returns a list of problems
# ---------------------------------------------------------------------------------------------------------------------
def definition_problems(scripts: list[Script]) -> list[str]:
    """Rule 1."""
    problems = []
    by_name: dict[str, dict[str, Definition]] = {}
    for script in scripts:
        for name, definition in script.definitions.items():
            by_name.setdefault(name, {})[script.name] = definition
    for name, copies in by_name.items():
        for definition in copies.values():
            problems += note_problems(name, definition, copies)
        if name in EXEMPT:
            continue
        variants: dict[str, list[Definition]] = {}
        for definition in copies.values():
            variants.setdefault(definition.text, []).append(definition)
        # The variant of most scripts, and of two as large the one with fewer notes, is what the others drifted from.
        largest_first = sorted(variants.values(), key=lambda v: (-len(v), sum(d.note is not None for d in v)))
        for index, reference in enumerate(largest_first):
            for variant in largest_first[index + 1 :]:
                for definition in variant:
                    undeclared = [d for d in reference if not (declared(definition, reference) or declared(d, variant))]
                    if undeclared:
                        problems.append(drift(name, undeclared[0], definition))
    return problems


def declared(definition: Definition, variant: list[Definition]) -> bool:
    """Whether the definition's note names a script that has this variant."""
    return any(other.script in definition.differs_from for other in variant)


def note_problems(name: str, definition: Definition, copies: dict[str, Definition]) -> list[str]:
    """A `differs` note must be readable, name scripts that have the definition, and be needed."""
    if definition.note is None:
        return []
    where = f"{definition.script}: the note above {name}"
    if not definition.differs_from:
        return [f"{where} must read `# differs from OTHER.py: why`, not `{definition.note}`"]
    problems = []
    for other in sorted(definition.differs_from):
        if other == definition.script or other not in copies:
            problems.append(f"{where} names {other}, which is no other script that has {name}")
        elif copies[other].text == definition.text:
            problems.append(f"{where} says that it differs from {other}, but it does not: remove the note")
    return problems


def drift(name: str, reference: Definition, definition: Definition) -> str:
    ours, theirs = f"{reference.script}: {name}", f"{definition.script}: {name}"
    diff = difflib.unified_diff(reference.text.split("\n"), definition.text.split("\n"), ours, theirs, n=1, lineterm="")
    return (
        f"{name} of {definition.script} has drifted from {reference.script}'s:\n"
        + "\n".join(f"    {line}" for line in diff)
        + f"\n  repair: python tests/sync.py --from {reference.script} --name {name}"
        + f"   (or --from {definition.script}, or a note above: # differs from {reference.script}: why)"
    )


def field_problems(scripts: list[Script]) -> list[str]:
    """Rule 2: every field is compared with the first script's that has it."""
    problems, first = [], {}
    for script in scripts:
        for name, field in script.fields.items():
            owner, reference = first.setdefault(name, (script.name, field))
            for what in ("annotation", "help"):
                mine, theirs = getattr(field, what), getattr(reference, what)
                if mine != theirs:
                    problems.append(f"{what} of Args.{name} is {mine!r} in {script.name}, {theirs!r} in {owner}")
    return problems


def requirement_problems(scripts: list[Script], requirements: str) -> list[str]:
    """Rule 3. `requirements` is the text of requirements.txt."""
    problems, pins = [], {}
    for line in requirements.splitlines():
        if line.strip() and not line.startswith("#"):
            if line.startswith("-"):
                problems.append(f"requirements.txt: {line} is no pin of a package")
                continue
            pin = Requirement(line.split(" #")[0])
            if canonicalize_name(pin.name) in pins:
                problems.append(f"requirements.txt names {pin.name} twice")
            pins[canonicalize_name(pin.name)] = pin

    ranges: dict[str, dict[str, Requirement]] = {}
    for script in scripts:
        for requirement in script.requirements:
            ranges.setdefault(canonicalize_name(requirement.name), {})[script.name] = requirement
    for name, wanted in sorted(ranges.items()):
        extras = ",".join(sorted({extra for requirement in wanted.values() for extra in requirement.extras}))
        full_name = f"{name}[{extras}]" if extras else name
        problems += unequal(f"range of {name}", {script: str(r.specifier) for script, r in wanted.items()})
        pin = pins.pop(name, None)
        if pin is None:
            problems.append(f"requirements.txt lacks {full_name}, which {', '.join(wanted)} names")
            continue
        if ",".join(sorted(pin.extras)) != extras:
            problems.append(f"requirements.txt has {pin}, the scripts want {full_name}")
        versions = [s.version for s in pin.specifier if s.operator == "=="]
        if len(pin.specifier) != 1 or not versions or "*" in versions[0]:
            problems.append(f"requirements.txt: {pin} is no pin of one version")
            continue
        for script, requirement in wanted.items():
            if not requirement.specifier.contains(versions[0], prereleases=True):
                problems.append(f"requirements.txt: {pin} is outside {requirement.specifier} of {script}")
    problems += [f"requirements.txt names {name}, which no script does" for name in pins]
    return problems + unequal("requires-python", {s.name: s.block.get("requires-python", "none") for s in scripts})


def unequal(what: str, values: dict[str, str]) -> list[str]:
    """A problem unless all scripts have the same value."""
    listed = ", ".join(f"{value} in {script}" for script, value in values.items())
    return [f"{what} is not the same everywhere: {listed}"] if len(set(values.values())) > 1 else []


def import_problems(scripts: list[Script], local: Iterable[str]) -> list[str]:
    """Rules 4 and 5. `local` holds the names under which this repository's own files could be imported."""
    problems = []
    for script in scripts:
        names = {canonicalize_name(requirement.name) for requirement in script.requirements}
        used = {name for name, (text, _) in RUN_TIME_ONLY.items() if text in script.text}
        for module in sorted(script.imports - set(sys.stdlib_module_names)):
            if module == "." or module in local:
                problems.append(f"{script.name} imports {module}, a file of this repository: it must run alone")
                continue
            used |= providers(module)
            if not providers(module) & names:
                problems.append(f"{script.name} imports {module}, which its PEP 723 block does not name")
        for name in sorted(names - used):
            problems.append(f"{script.name}: the PEP 723 block names {name}, which the script does not import")
    return problems


def providers(module: str) -> set[str]:
    """The packages that bring a module: the one of its name if that is among them; its name when not installed."""
    found = {canonicalize_name(name) for name in installed_modules().get(module, [module])}
    return {canonicalize_name(module)} if canonicalize_name(module) in found else found


@functools.cache
def installed_modules() -> dict[str, list[str]]:
    return importlib.metadata.packages_distributions()


def problems(folder: Path = ROOT) -> list[str]:
    """Everything that is out of step in the scripts of a folder."""
    scripts = find_scripts(folder)
    packages = [path.name for path in folder.iterdir() if path.is_dir() and list(path.glob("*.py"))]
    return [
        *definition_problems(scripts),
        *field_problems(scripts),
        *requirement_problems(scripts, (folder / "requirements.txt").read_text()),
        *import_problems(scripts, [*packages, *(path.stem for path in folder.glob("*.py"))]),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Repair
# ---------------------------------------------------------------------------------------------------------------------
def copy_definition(folder: Path, source: str, name: str) -> tuple[list[str], list[str]]:
    """Put `name` of the source in the place of its copies. Returns (scripts changed, scripts left as they are).

    A `differs` note travels with its definition. Copies whose note names other scripts than the source's note does are
    another variant, declared as such, and stay.
    """
    scripts = {script.name: script for script in find_scripts(folder)}
    if source not in scripts:
        raise ValueError(f"there is no script {source}. Choose one of {', '.join(scripts)}.")
    if name not in scripts[source].definitions:
        raise ValueError(f"{source} has no top-level {name}. Name a function or class of it.")
    if name in EXEMPT:
        raise ValueError(f"every script has its own {name}. Edit it by hand.")
    original = scripts[source].definitions[name]
    changed, kept = [], []
    for script in scripts.values():
        copy = script.definitions.get(name)
        if copy is None or script.name == source or (copy.text, copy.note) == (original.text, original.note):
            continue
        if copy.differs_from != original.differs_from:
            kept.append(script.name)
            continue
        start = copy.start - 1 if copy.note else copy.start
        new = [*([original.note] if original.note else []), original.text]
        script.path.write_text("\n".join([*script.lines[:start], *new, *script.lines[copy.end :]]))
        changed.append(script.name)
    return changed, kept


def main(argv: list[str] | None = None, folder: Path = ROOT) -> int:
    """Check or repair; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", metavar="SCRIPT.py", help="the script that has the right copy")
    parser.add_argument("--name", metavar="NAME", help="the top-level function or class to copy")
    args = parser.parse_args(argv)
    if (args.source is None) != (args.name is None):
        parser.error("--from and --name belong together. Give both.")
    if args.source:
        try:
            changed, kept = copy_definition(folder, Path(args.source).name, args.name)
        except ValueError as error:
            parser.error(str(error))
        print(f"{args.name} of {args.source} copied to: {', '.join(changed) or 'none'}")
        if kept:
            print(f"left as they are, since their notes say that they differ: {', '.join(kept)}")
        return 0
    found = problems(folder)
    print("\n".join(found) or f"{len(find_scripts(folder))} scripts are in step")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
