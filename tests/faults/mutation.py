"""A change of one place in a function, found by what the code says and not by how it is written.

A pattern is an expression. A name in it is that name or an attribute of that name, a capital letter
is any expression, which `by` may repeat, and all else is what it is. So layout, lines
around it and names that a pattern leaves out may change. The operators:

drop      a call, by its pattern or by the name of what is called; None comes in its place
never     the test that has the pattern (of an if, a while, a comprehension) is False
always    it is True
replace   an expression; `by` comes in its place
argument  what is passed by this keyword; `by` comes in its place
returns   the function returns this at once
"""

import ast
from collections.abc import Iterator
from typing import Any

Bound = dict[str, ast.expr]


class CanNotPlant(Exception): ...


def mutated(source: str, function: str, operator: str, given: str, by: str = "") -> str:
    """The source with this place changed, and not a letter elsewhere."""
    defined = [node for name, node in _functions(ast.parse(source)) if name == function]
    if len(defined) != 1:
        raise CanNotPlant(f"defines it {len(defined)} times")
    body = defined[0].body
    if operator == "returns":
        has_doc = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        return _with(source, body[has_doc], f"return {given}")
    found = [*_found(operator, given, [node for part in body for node in ast.walk(part)])]
    if len(found) != 1:
        raise CanNotPlant(f"has {len(found)} places to {operator} `{given}`, not one")
    place, bound = found[0]
    fixed = {"drop": "None", "never": "False", "always": "True"}
    instead = _Filled(bound).visit(_expression(fixed.get(operator, by)))
    return _with(source, place, f"({ast.unparse(instead)})")


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _functions(node: ast.AST, above: str = "") -> Iterator[tuple[str, Any]]:
    for child in ast.iter_child_nodes(node):
        name = above
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{above}.{child.name}".lstrip(".")
            yield name, child
        yield from _functions(child, name)


def _found(operator: str, given: str, nodes: list[ast.AST]) -> Iterator[tuple[ast.expr, Bound]]:
    pattern = _expression(given)
    match operator:
        case "drop":
            for call in nodes:
                if isinstance(call, ast.Call):
                    is_whole = isinstance(pattern, ast.Call)
                    if _matches(pattern, call if is_whole else call.func, bound := {}):
                        yield call, bound
        case "never" | "always":
            for test in (test for node in nodes for test in _tests(node)):
                if any(_matches(pattern, part, {}) for part in ast.walk(test)):
                    yield test, {}
        case "replace":
            for node in nodes:
                is_read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
                if isinstance(node, ast.expr) and is_read and _matches(pattern, node, bound := {}):
                    yield node, bound
        case "argument":
            for node in nodes:
                if isinstance(node, ast.keyword) and node.arg == given:
                    yield node.value, {}


def _tests(node: ast.AST) -> list[ast.expr]:
    tests = [getattr(node, "test", None), getattr(node, "guard", None), *getattr(node, "ifs", ())]
    return [test for test in tests if test is not None]


def _matches(pattern: Any, node: Any, bound: Bound) -> bool:
    if isinstance(pattern, ast.Name):
        if _is_any(pattern):
            same = bound.setdefault(pattern.id, node)
            return isinstance(node, ast.expr) and ast.unparse(same) == ast.unparse(node)
        return pattern.id == getattr(node, "id", getattr(node, "attr", None))
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.AST):
        fields = pattern._fields
        return all(_matches(getattr(pattern, f), getattr(node, f), bound) for f in fields)
    if isinstance(pattern, list):
        pairs = zip(pattern, node, strict=False)
        return len(pattern) == len(node) and all(_matches(*pair, bound) for pair in pairs)
    return pattern == node


def _is_any(name: ast.Name) -> bool:
    return len(name.id) == 1 and name.id.isupper()


class _Filled(ast.NodeTransformer):
    def __init__(self, bound: Bound) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.bound[node.id] if _is_any(node) else node


def _with(source: str, place: Any, instead: str) -> str:
    """A column of `ast` counts bytes."""
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:row])) for row in (place.lineno - 1, place.end_lineno - 1)]
    begin, end = starts[0] + place.col_offset, starts[1] + place.end_col_offset
    whole = b"".join(lines)
    return (whole[:begin] + instead.encode() + whole[end:]).decode()
