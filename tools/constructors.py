"""Constructors of dataclasses, written out before they are compiled.

The one that `dataclass` makes is interpreted even in a compiled module, and setting the fields of a frozen object goes through
a call each: most of what a small event or candidate costs. The source that is compiled says the same in one line, which takes
the place of an empty line of the class, so the lines of tracebacks are those of the file.
"""

from __future__ import annotations

import ast


def write_out(source: str) -> str:
    """The source, with a constructor in every plain dataclass that has an empty line for it."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            _write_out(node, lines)
    return "\n".join(lines)


def _write_out(node: ast.ClassDef, lines: list[str]) -> None:
    decorator = next((d for d in node.decorator_list if ast.unparse(d).startswith("dataclass(")), None)
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    if (
        decorator is None
        or node.bases
        or not fields
        or "__init__" in names
        or "kw_only" in ast.unparse(decorator)
        or decorator.lineno != decorator.end_lineno
    ):
        return
    arguments, statements = [], []
    for item in fields:
        name, kind = ast.unparse(item.target), ast.unparse(item.annotation)
        if item.value is not None and ast.unparse(item.value) == "field(init=False)":
            continue  # `__post_init__` sets it
        default = None if item.value is None else _default(item.value)
        if (
            any(word in kind for word in ("ClassVar", "InitVar", "KW_ONLY"))
            or _is_special(item.value)
            or (default is not None and default[1] and "None" in kind)
        ):
            return
        if default is None:
            arguments.append(f"{name}: {kind}")
        elif default[1]:
            arguments.append(f"{name}: {kind} | None = None")
            statements.append(f"self.{name} = {default[0]} if {name} is None else {name}")
            continue
        else:
            arguments.append(f"{name}: {kind} = {default[0]}")
        statements.append(f"self.{name} = {name}")
    if "__post_init__" in names:
        statements.append("self.__post_init__()")
    after = _empty_line(fields[-1], lines)
    if after is None:
        return
    row = decorator.lineno - 1
    lines[row] = lines[row].replace("dataclass(", "dataclass(init=False, ", 1)
    indent = " " * fields[-1].col_offset
    head = f"{indent}def __init__(self, {', '.join(arguments)}) -> None: "
    lines[after] = head + "; ".join(statements) + "  # type: ignore"


def _is_special(value: ast.expr | None) -> bool:
    """Whether it says of a field more than its default and what it is compared and shown by."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return False
    return not {word.arg for word in value.keywords} <= {"default", "default_factory", "compare", "repr", "hash"}


def _default(value: ast.expr) -> tuple[str, bool] | None:
    """An expression, and whether it is evaluated with each call; None where the field has no default."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return ast.unparse(value), False
    for keyword in value.keywords:
        if keyword.arg == "default":
            return ast.unparse(keyword.value), False
        if keyword.arg == "default_factory":
            return f"({ast.unparse(keyword.value)})()", True
    return None


def _empty_line(last: ast.AnnAssign, lines: list[str]) -> int | None:
    """The first after the fields, if nothing but what documents the last one lies between."""
    assert last.end_lineno is not None
    row = last.end_lineno
    return row if row < len(lines) and not lines[row].strip() else None
