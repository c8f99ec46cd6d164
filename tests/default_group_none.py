"""May a value that is passed as a process group be None at that place?

In: an expression, the call it is passed to, and the parents of each node of its file. Out: yes
when its source admits None (a default, an annotation or none, getattr, .get, a literal) and no
check of it stands on every way to the call:

    if group is not None: ... | if group is None: return | assert group is not None
    isinstance(group, ProcessGroup), `and`, conditional expressions and comprehensions alike
"""

import ast
from collections.abc import Iterator

from default_group_names import Project

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class NoneAnalysis:
    """The question of this module, for one file."""

    def __init__(self, project: Project, parents: dict[ast.AST, ast.AST]) -> None:
        self.project, self.parents = project, parents

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Parents from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def may_be_none(self, group: ast.expr, at: ast.AST) -> bool:
        """Whether `group`, as evaluated at node `at`, may be None."""
        return self._admits_none(group, at, frozenset()) and not self._guarded(group, at)

    def _admits_none(self, group: ast.AST, at: ast.AST, seen: frozenset[str]) -> bool:
        match group:
            case ast.Constant():
                return group.value is None
            case ast.IfExp():
                return any(self._admits_none(g, at, seen) for g in (group.body, group.orelse))
            case ast.BoolOp():
                return self._admits_none(group.values[-1], at, seen)
            case ast.NamedExpr() | ast.Subscript():
                return self._admits_none(group.value, at, seen)
            case ast.Attribute():
                return group.attr in self.project.fields
            case ast.Call():
                called = ast.unparse(group.func).rpartition(".")[2]
                return called in ("getattr", "get", *self.project.returns)
            case ast.Name():
                return group.id not in seen and self._name_admits_none(group.id, at, seen)
        return False

    def _name_admits_none(self, name: str, at: ast.AST, seen: frozenset[str]) -> bool:
        """Look the name up from the inside out; in a scope that binds it, every binding counts."""
        for scope in self.ancestors(at):
            if not isinstance(scope, (*FUNCTIONS, ast.Module)):
                continue
            found = [self._admits_none(v, at, seen | {name}) for v in _bindings(scope, name)]
            if not isinstance(scope, ast.Module):
                found += self._parameter(scope.args, name)
            if found:
                return any(found)
        return False

    def _parameter(self, args: ast.arguments, name: str) -> list[bool]:
        positional = [*args.posonlyargs, *args.args]
        defaults: dict[ast.arg, ast.expr | None] = {}
        defaults |= zip(reversed(positional), reversed(args.defaults), strict=False)
        defaults |= zip(args.kwonlyargs, args.kw_defaults, strict=True)
        found = [arg for arg in (*positional, *args.kwonlyargs) if arg.arg == name]
        return [
            _is_none(defaults.get(arg))
            or arg.annotation is None  # nothing keeps a caller from passing None
            or ast.unparse(arg.annotation) in ("Any", "object")
            or self.project.may_be_none(arg.annotation)
            for arg in found
        ]

    def _guarded(self, group: ast.expr, at: ast.AST) -> bool:
        """Whether a check that `group` is not None stands on every way to `at`."""
        text = ast.unparse(group)
        inner = at
        for outer in self.ancestors(at):
            match outer:
                case ast.If() | ast.While() | ast.IfExp():
                    if _within(inner, outer.body) and _says(outer.test, text, when=True):
                        return True
                    if _within(inner, outer.orelse) and _says(outer.test, text, when=False):
                        return True
                case ast.BoolOp(op=ast.And(), values=values):
                    before = values[: values.index(inner)] if isinstance(inner, ast.expr) else []
                    if any(_says(value, text, when=True) for value in before):
                        return True
                case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                    tests = [test for part in outer.generators for test in part.ifs]
                    if any(_says(test, text, when=True) for test in tests):
                        return True
            if any(_leaves_no_none(s, text) for s in _earlier(inner, outer)):
                return True
            inner = outer
        return False


def _is_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _bindings(scope: ast.AST, name: str) -> Iterator[ast.expr]:
    """The values that assignments and loops of a scope (not of functions inside) give a name."""
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, FUNCTIONS):
            continue
        todo += ast.iter_child_nodes(node)
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, value) for target in targets]
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                pairs = [(target, value)]
            case ast.NamedExpr(target=target, value=value):
                pairs = [(target, value)]
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                pairs = [(target, value)]
            case _:
                continue
        for target, value in pairs:
            yield from _pair(target, value, name)


def _pair(target: ast.expr, value: ast.expr, name: str) -> Iterator[ast.expr]:
    """The part of `value` that goes to `name`: by position where both sides are spelled out."""
    if isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else None
        same = parts is not None and len(parts) == len(target.elts)
        for i, each in enumerate(target.elts):
            yield from _pair(each, parts[i] if same and parts is not None else value, name)
    elif isinstance(target, ast.Name) and target.id == name:
        yield value


def _says(test: ast.AST, text: str, *, when: bool) -> bool:
    """Whether `test` having the truth value `when` says that the expression `text` is not None."""
    match test:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if _is_none(right):
            return isinstance(op, ast.IsNot if when else ast.Is) and _spelled(left, text)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _says(operand, text, when=not when)
        case ast.BoolOp(op=op, values=values):
            # One part is enough where all are known: a true `and`, a false `or`.
            parts = [_says(value, text, when=when) for value in values]
            return any(parts) if isinstance(op, ast.And) == when else all(parts)
        case ast.Call(func=ast.Name(id="isinstance"), args=[subject, kind]):
            return when and _spelled(subject, text) and "ProcessGroup" in ast.unparse(kind)
        case ast.Name() | ast.Attribute() | ast.NamedExpr():
            return when and _spelled(test, text)
    return False


def _spelled(node: ast.AST, text: str) -> bool:
    if isinstance(node, ast.NamedExpr):
        return text in (ast.unparse(node.target), ast.unparse(node.value))
    return ast.unparse(node) == text


def _within(node: ast.AST, block: ast.expr | list[ast.stmt]) -> bool:
    return node in block if isinstance(block, list) else node is block


def _earlier(node: ast.AST, outer: ast.AST) -> Iterator[ast.stmt]:
    """Statements of `outer` that stand before `node` in the same block."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(outer, field, None)
        if isinstance(block, list) and node in block:
            yield from block[: block.index(node)]


def _leaves_no_none(statement: ast.stmt, text: str) -> bool:
    """Whether the code after `statement` can rely on `text` not being None."""
    if isinstance(statement, ast.Assert):
        return _says(statement.test, text, when=True)
    if isinstance(statement, ast.If) and isinstance(statement.body[-1], LEAVES):
        return _says(statement.test, text, when=False)
    return False
