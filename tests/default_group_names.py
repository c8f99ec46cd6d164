"""Which torch name does an expression in the package stand for? Read from the source alone.

In: {path: source}. Out: a `Project` with one alias table a file (imports under any name,
assignments, re-exports between our own modules) and the names whose annotations admit a group that
is None.
"""

import ast
import importlib
import inspect
from functools import cache
from typing import TypeGuard

# The parameters by which torch takes its ranks, and the modules in which None means all of them.
GROUP_PARAMETERS = ("group", "process_group", "pg", "device_mesh", "mesh", "num_replicas")
PREFIXES = (
    "torch.distributed.",
    "torch.nn.parallel.",
    "torch.nn.SyncBatchNorm",
    "torch.utils.data.",
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def group_position(dotted: str) -> tuple[str, int] | None:
    """(name, position) of the parameter that a torch callable takes its group in, else None."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
            for part in parts[cut:]:
                found = getattr(found, part)
            names = list(inspect.signature(found).parameters)  # type: ignore[arg-type]
        except (ImportError, AttributeError, TypeError, ValueError):
            continue
        return next(((n, names.index(n)) for n in GROUP_PARAMETERS if n in names), None)
    return None


class Project:
    """What the files say about names: aliases per module, and annotations that admit None."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.trees = {path: ast.parse(source, path) for path, source in sources.items()}
        self.modules = {_module_name(path): path for path in sources}
        self.aliases: dict[str, dict[str, str]] = {path: {} for path in sources}
        self.types: set[str] = set()  # names of types that admit None: Group = ProcessGroup | None
        self.fields: set[str] = set()  # attributes annotated so
        self.returns: set[str] = set()  # functions annotated so
        for path, tree in self.trees.items():
            self._imports(path, tree)
        for _ in range(3):  # an alias of an alias, or of another module's
            for path, tree in self.trees.items():
                self._assignments(path, tree)
        for tree in self.trees.values():
            self._annotations(tree)

    def _imports(self, path: str, tree: ast.AST) -> None:
        table = self.aliases[path]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for a in node.names:
                    table[a.asname or a.name.split(".")[0]] = (
                        a.name if a.asname else a.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    package = _module_name(path.replace("__init__.py", "any.py")).split(".")
                    base = ".".join([*package[: len(package) - node.level], *filter(None, [base])])
                for a in node.names:
                    table[a.asname or a.name] = f"{base}.{a.name}"

    def _assignments(self, path: str, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            dotted = self.dotted(path, node.value)
            for target in targets:
                if isinstance(target, ast.Name):
                    if dotted and dotted.split(".")[0] == "torch":
                        self.aliases[path][target.id] = dotted
                    if "ProcessGroup" in (text := ast.unparse(node.value)) and _admits(text):
                        self.types.add(target.id)

    def _annotations(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        if self.may_be_none(item.annotation):
                            self.fields.add(item.target.id)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
                if self.may_be_none(node.annotation):
                    self.fields.add(node.target.attr)
            elif isinstance(node, FUNCTIONS) and self.may_be_none(node.returns):
                self.returns.add(node.name)

    def may_be_none(self, annotation: ast.AST | None) -> bool:
        """Whether an annotation speaks of a process group that may be None."""
        if annotation is None:
            return False
        text = ast.unparse(annotation).strip("'\"")
        names = {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}
        return bool(names & self.types) or ("ProcessGroup" in text and _admits(text))

    def dotted(self, path: str, node: ast.AST) -> str | None:
        """The full name that an expression stands for, through every alias."""
        if isinstance(node, ast.Name):
            found = self.aliases[path].get(node.id)
        elif isinstance(node, ast.Attribute):
            base = self.dotted(path, node.value)
            found = base and f"{base}.{node.attr}"
        elif isinstance(node, ast.BoolOp | ast.IfExp):  # an older name as a stand-in
            last = node.values[-1] if isinstance(node, ast.BoolOp) else node.orelse
            found = self.dotted(path, last)
        elif calls(node, "getattr") and isinstance(name := node.args[1], ast.Constant):
            base = self.dotted(path, node.args[0])
            found = base and f"{base}.{name.value!s}"
        else:
            return None
        module, _, name_there = (found or "").rpartition(".")
        if (origin := self.modules.get(module)) and origin != path:  # re-exported by one of ours
            found = self.aliases[origin].get(name_there, found)
        return found and found.replace("torch.distributed.distributed_c10d.", "torch.distributed.")


def _module_name(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith(("gtpgraph", "bench")) else f"gtpgraph.{name}"


def _admits(text: str) -> bool:
    return "None" in text or "Optional" in text


def calls(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    """Whether `node` calls a function or method of that last name."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
