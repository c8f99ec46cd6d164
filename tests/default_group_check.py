"""Find every use of the default process group (WORLD) in the package, without running it.

In: Python files. Out: findings, one per use, each with a key that survives edits elsewhere.

    files -> alias tables (imports, assignments, re-exports) -> dotted name of each call
          -> its signature, asked of torch -> group left out? None? maybe None and unguarded?

What counts: a torch.distributed call that takes a group (or mesh) and gets none, None, or a value
that may be None on some path; WORLD by any name; creation of groups or meshes; torch.distributed
functions passed around as values, where the group cannot be seen.

    python tests/default_group_check.py     list what the allowlist lacks; status 1 if any
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from default_group_names import PREFIXES, Project, calls, group_position
from default_group_none import NoneAnalysis

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gtpgraph", "passes", "kernels", "bench")
ALLOWLIST = Path(__file__).with_name("default_group_allowlist.txt")

DEFAULT_GROUP = ("WORLD", "_get_default_group", "_world")
CREATORS = (
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "init_device_mesh",
    "DeviceMesh",
)


@dataclass(frozen=True)
class Finding:
    """One use. `key` holds no line number, so that an unrelated edit does not change it."""

    path: str
    line: int
    scope: str
    name: str
    why: str

    @property
    def key(self) -> str:
        return f"{self.path} {self.scope} {self.name}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name} in {self.scope}: {self.why}"


class Checker:
    """The findings of one file."""

    def __init__(self, project: Project, path: str) -> None:
        self.project, self.path = project, path
        self.tree = project.trees[path]
        self.parents = {c: p for p in ast.walk(self.tree) for c in ast.iter_child_nodes(p)}
        self.none = NoneAnalysis(project, self.parents)

    def run(self) -> Iterator[Finding]:
        for node in ast.walk(self.tree):
            name = self.project.dotted(self.path, node)
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                if f"{node.module}.".startswith(PREFIXES):
                    yield self._finding(node, f"{node.module}.*", "imports unseen names")
            elif calls(node, "getattr") and name is None:
                if self.project.dotted(self.path, node.args[0]) == "torch.distributed":
                    yield self._finding(node, "getattr", "which function cannot be seen")
            elif name and name.startswith(PREFIXES) and not self._is_part(node):
                if why := self._problem(node, name):
                    yield self._finding(node, name, why)

    def _finding(self, node: ast.AST, name: str, why: str) -> Finding:
        scopes = [
            p.name
            for p in self.none.ancestors(node)
            if isinstance(p, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        line = getattr(node, "lineno", 0)
        return Finding(self.path, line, ".".join(reversed(scopes)) or "<module>", name, why)

    def _is_part(self, node: ast.AST) -> bool:
        """Whether the name is the start of a longer one, or is being bound or annotated."""
        parent = self.parents[node]
        bound = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        return (
            bound or isinstance(node, ast.BoolOp | ast.IfExp) or isinstance(parent, ast.Attribute)
        )

    def _is_alias(self, node: ast.AST) -> bool:
        """Whether the name, or one of several stand-ins, is given another plain name."""
        for parent in self.none.ancestors(node):
            if isinstance(parent, ast.Assign | ast.AnnAssign):
                targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
                plain = all(isinstance(target, ast.Name) for target in targets)
                return plain and not isinstance(self.parents[parent], ast.ClassDef)
            if not isinstance(parent, ast.BoolOp | ast.IfExp):
                break
        return False

    def _problem(self, node: ast.AST, name: str) -> str | None:
        last = name.rpartition(".")[2]
        parent = self.parents[node]
        if last in DEFAULT_GROUP:
            return "names the default group"
        if isinstance(parent, ast.Call) and parent.func is node:
            if last in CREATORS:
                return "creates process groups"
            return self._call_problem(parent, name, shift=0)
        if isinstance(parent, ast.Call) and calls(parent, "partial") and parent.args[0] is node:
            return self._call_problem(parent, name, shift=1)
        if last in ("isend", "irecv") and isinstance(parent, ast.Call) and calls(parent, "P2POp"):
            return None  # P2POp takes the group
        if self._is_alias(node):
            return None  # its calls are checked
        takes_or_makes = last in CREATORS or group_position(name) is not None
        if last[:1].isupper() or not takes_or_makes:
            return None  # a class in an annotation or isinstance; nothing to do with groups
        return "is passed on as a value, so its group cannot be seen"

    def _call_problem(self, call: ast.Call, name: str, shift: int) -> str | None:
        """What is wrong with the group of a call; `shift` arguments come before its own."""
        if (wanted := group_position(name)) is None:
            return None
        parameter, position = wanted
        group = next((k.value for k in call.keywords if k.arg == parameter), None)
        if group is None:
            own = call.args[shift:]
            if any(isinstance(a, ast.Starred) for a in own[: position + 1]):
                return f"{parameter} cannot be seen in *arguments"
            if len(own) <= position:
                return f"leaves out {parameter}"
            group = own[position]
        if isinstance(group, ast.Constant) and group.value is None:
            return f"passes {parameter}=None"
        if self.none.may_be_none(group, call):
            return f"{parameter}={ast.unparse(group)} may be None here, which torch reads as WORLD"
        return None


def check(sources: dict[str, str]) -> list[Finding]:
    """Findings of {path: source}, in order of path and line."""
    project = Project(sources)
    found = [finding for path in sources for finding in Checker(project, path).run()]
    return sorted(found, key=lambda finding: (finding.path, finding.line))


def package_sources(root: Path = ROOT) -> dict[str, str]:
    """The package's files, each once (gtpgraph/passes and gtpgraph/kernels are links)."""
    files = {
        file.resolve()
        for folder in FOLDERS
        for file in (root / folder).rglob("*.py")
        if file.is_file()
    }
    return {str(f.relative_to(root)): f.read_text() for f in sorted(files)}


def read_allowlist(text: str) -> tuple[int, Counter[str]]:
    """(ceiling, entries) of an allowlist; the text after '#' on an entry is its reason."""
    ceiling = re.search(r"^# ceiling: (\d+)$", text, re.MULTILINE)
    if ceiling is None:
        raise ValueError(f"{ALLOWLIST.name}: expected a line '# ceiling: N'")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return int(ceiling[1]), Counter(filter(None, lines))


def complaints(findings: Iterable[Finding], allowlist: str) -> list[str]:
    """Uses that the allowlist lacks, entries that nothing needs, and too many entries."""
    ceiling, allowed = read_allowlist(allowlist)
    left = Counter(allowed)
    new: list[str] = []
    for finding in findings:
        if left[finding.key] > 0:
            left[finding.key] -= 1
        else:
            new.append(str(finding))
    stale = [f"{ALLOWLIST.name}: stale entry, remove it: {key}" for key in left.elements()]
    many = [f"{ALLOWLIST.name}: {allowed.total()} entries, the ceiling is {ceiling}"]
    return [*new, *stale, *(many if allowed.total() > ceiling else [])]


def main() -> int:
    """Print what is wrong in this checkout; 1 if anything is."""
    found = complaints(check(package_sources()), ALLOWLIST.read_text())
    print("\n".join(found) or "no use of the default process group outside the allowlist")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
