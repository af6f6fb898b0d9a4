"""What functions of an engine take, read from the sources in its wheel: nothing is installed or imported."""

from __future__ import annotations

import ast
import functools
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moeserve.proto.integrations.contracts import Contract

Function = ast.FunctionDef | ast.AsyncFunctionDef
FOLLOWED = 4
"""Modules from which a name may be imported in turn."""


@dataclass(frozen=True)
class Found:
    """A definition: parameters without the bound one, and whether it is a property."""

    parameters: tuple[str, ...]
    is_property: bool


class Sources:
    """The modules of a wheel."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = zipfile.ZipFile(wheel)
        self._names = frozenset(self._wheel.namelist())
        self._tree = functools.cache(self._parsed)

    def paths(self) -> Iterator[tuple[str, str]]:
        """Paths of its Python files, each with its text."""
        for name in sorted(self._names):
            if name.endswith(".py"):
                yield name, self._wheel.read(name).decode(errors="replace")

    def find(self, module: str, name: str) -> Found | None:
        """The function `name`, a method as `Class.method`; None where it is not there."""
        held: ast.Module | ast.ClassDef | None = None
        *kinds, last = name.split(".")
        home = self._home(module, (kinds or [last])[0])
        if home is None:
            return None
        held = self._tree(home)
        for kind in kinds:
            held = next(
                (one for one in _defined(held) if isinstance(one, ast.ClassDef) and one.name == kind), None
            )
            if held is None:
                return None
        for one in _defined(held):
            if isinstance(one, Function) and one.name == last:
                return _found(one, in_class=bool(kinds))
        return None

    def _home(self, module: str, name: str) -> str | None:
        """The module that defines `name`, which `module` may only import."""
        for _ in range(FOLLOWED):
            if (tree := self._tree(module)) is None:
                return None
            for one in _statements(tree):
                if isinstance(one, (ast.ClassDef, Function)) and one.name == name:
                    return module
            brought = next(
                (
                    (one.module, alias.name)
                    for one in _statements(tree)
                    if isinstance(one, ast.ImportFrom) and one.module and not one.level
                    for alias in one.names
                    if (alias.asname or alias.name) == name
                ),
                None,
            )
            if brought is None or brought[1] != name:
                return None
            module = brought[0]
        return None

    def _parsed(self, module: str) -> ast.Module | None:
        stem = module.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in self._names:
                return ast.parse(self._wheel.read(path))
        return None


def unlike(
    sources: Sources, contracts: Iterable[Contract], properties: Iterable[tuple[str, str, str]] = ()
) -> list[str]:
    """What is not as it must be, a sentence each; `contracts.differences` says it of an installed engine."""
    said = []
    for contract in contracts:
        found, where = sources.find(contract.module, contract.name), f"{contract.module}.{contract.name}"
        if found is None:
            said.append(f"{where} is not there")
            continue
        known = found.parameters[: len(contract.parameters)] if contract.more else found.parameters
        if known != contract.parameters:
            said.append(f"{where} takes {', '.join(found.parameters)}")
    for module, kind, name in properties:
        found = sources.find(module, f"{kind}.{name}")
        if found is None or not found.is_property:
            said.append(f"{module}.{kind}.{name} is no property")
    return said


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Those of a module or class, under its conditions too, but not inside of functions and classes."""
    for one in ast.iter_child_nodes(tree):
        if isinstance(one, ast.stmt):
            yield one
        if isinstance(one, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _statements(one)


def _defined(tree: ast.AST | None) -> list[ast.stmt]:
    return (
        []
        if tree is None
        else [one for one in _statements(tree) if isinstance(one, (ast.ClassDef, Function))]
    )


def _found(one: Function, *, in_class: bool) -> Found:
    marks = {getattr(mark, "id", getattr(mark, "attr", "")) for mark in one.decorator_list}
    given = one.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    names += [given.vararg.arg] if given.vararg else []
    names += [arg.arg for arg in given.kwonlyargs]
    names += [given.kwarg.arg] if given.kwarg else []
    bound = in_class and "classmethod" in marks
    return Found(tuple(names[1:] if bound else names), bool(marks & {"property", "cached_property"}))
