"""The way of one parameter through the files of the product: `python -m tests.repo.walk`.

The walk starts in a function, follows each call that gets the parameter, or a value made from it, and goes into the
callee before it goes on. It reads a function once. A stay is a stretch of entered functions within one file; a return
is a stay in a file that the walk has left before. A method is found by the class of its object,
where an assignment, an annotation or `self` tells that class. Nothing is run.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.repo.tree import ROOT

SOURCES = ("crds", "operator", "trainer_image")
START = "rlhf_trainer.run.on_ray", "run_on_ray", "job"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """A module of the product: its syntax tree, its definitions and what each imported name stands for."""

    name: str
    tree: ast.Module

    @cached_property
    def definitions(self) -> Mapping[str, ast.stmt]:
        """Functions and classes by name."""
        return {node.name: node for node in self.tree.body if isinstance(node, Function | ast.ClassDef)}

    @cached_property
    def imports(self) -> Mapping[str, tuple[str, str]]:
        """Local name -> (module, name there)."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.module]
        return {each.asname or each.name: (str(node.module), each.name) for node in found for each in node.names}


@dataclass
class Walk:
    """The walk so far."""

    modules: Mapping[str, Module]
    stays: list[str] = field(default_factory=list)
    """Module of each stay, in order."""
    entered: set[tuple[str, str]] = field(default_factory=set)
    """Module and qualified name of each function that the walk has been in."""

    @property
    def rooms(self) -> int:
        """Files that the walk has been in."""
        return len(set(self.stays))

    @property
    def returns(self) -> int:
        """Stays in a file that the walk had left before."""
        return len(self.stays) - self.rooms

    def stay(self, module: str) -> None:
        """Note that the walk is in a module."""
        if not self.stays or self.stays[-1] != module:
            self.stays.append(module)

    def enter(self, module: Module, owner: str, function: Function, carried: set[str]) -> None:
        """Follow the carried names through a function; `owner` is its class, or empty."""
        key = module.name, f"{owner}.{function.name}"
        self.stay(module.name)
        if key in self.entered:
            return
        self.entered.add(key)
        kinds = {each.arg: _class_name(each.annotation) for each in _arguments(function)}
        if owner:
            kinds["self"] = owner
        for statement in function.body:
            self._follow(module, statement, carried, kinds)

    def _follow(self, module: Module, statement: ast.stmt, carried: set[str], kinds: dict[str, str]) -> None:
        for node in _in_order(statement):
            if isinstance(node, ast.Call) and _names(node) & carried:
                self._call(module, node, carried, kinds)
            elif isinstance(node, ast.Assign | ast.For | ast.withitem | ast.NamedExpr | ast.comprehension):
                _carry_over(node, carried, kinds)

    def _call(self, module: Module, call: ast.Call, carried: set[str], kinds: Mapping[str, str]) -> None:
        found = self._callee(module, call.func, kinds)
        if not found:
            return
        place, owner, function = found
        names = [each.arg for each in _arguments(function)]
        passed: set[str] = set()
        if owner and isinstance(call.func, ast.Attribute) and _names(call.func.value) & carried:
            passed.add("self")
        positions = names[1:] if owner else names
        for name, value in zip(positions, call.args, strict=False):
            if _names(value) & carried:
                passed.add(name)
        passed |= {word.arg for word in call.keywords if word.arg in names and _names(word.value) & carried}
        if passed:
            self.enter(place, owner, function, passed | ({"self"} if function.name == "__init__" else set()))

    def _callee(self, module: Module, func: ast.expr, kinds: Mapping[str, str]) -> tuple[Module, str, Function] | None:
        if isinstance(func, ast.Name):
            place, definition = self._defined(module, func.id)
            if isinstance(definition, ast.ClassDef):
                return self._method(place, definition, "__init__")
            return (place, "", definition) if isinstance(definition, Function) else None
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            place, definition = self._defined(module, kinds.get(func.value.id, func.value.id))
            return self._method(place, definition, func.attr) if isinstance(definition, ast.ClassDef) else None
        return None

    def _method(self, module: Module, of: ast.ClassDef, name: str) -> tuple[Module, str, Function] | None:
        for node in of.body:
            if isinstance(node, Function) and node.name == name:
                return module, of.name, node
        return None

    def _defined(self, module: Module, name: str) -> tuple[Module, ast.stmt | None]:
        if name in module.definitions:
            return module, module.definitions[name]
        place, there = module.imports.get(name, ("", ""))
        return (found, found.definitions.get(there)) if (found := self.modules.get(place)) else (module, None)


def _arguments(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _class_name(annotation: ast.expr | None) -> str:
    if isinstance(annotation, ast.BinOp):  # Thing | None
        annotation = annotation.left
    return annotation.id if isinstance(annotation, ast.Name) else ""


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes in the order in which they run: the parts of a call before the call."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


def _carry_over(
    node: ast.Assign | ast.For | ast.withitem | ast.NamedExpr | ast.comprehension,
    carried: set[str],
    kinds: dict[str, str],
) -> None:
    """Carry the target of an assignment whose value is made from a carried name; note its class where that is plain."""
    value = node.context_expr if isinstance(node, ast.withitem) else getattr(node, "value", None) or node.iter  # type: ignore[union-attr]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None) or node.optional_vars]  # type: ignore[union-attr]
    if not _names(value) & carried:
        return
    for target in filter(None, targets):
        carried |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name) and each.id != "self"}
        if isinstance(target, ast.Name) and isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            kinds[target.id] = value.func.id


def product_modules(root: Path = ROOT) -> dict[str, Module]:
    """Every module of the product by its dotted name."""
    found = {}
    for source in SOURCES:
        for path in (root / source).rglob("*.py"):
            name = ".".join(path.relative_to(root / source).with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(name, ast.parse(path.read_text(encoding="utf-8")))
    return found


def walk_from(modules: Mapping[str, Module], module: str, function: str, parameter: str) -> Walk:
    """Walk from a function of a module along one of its parameters."""
    walk, place = Walk(modules), modules[module]
    start = place.definitions[function]
    assert isinstance(start, Function)
    walk.enter(place, "", start, {parameter})
    return walk


def main() -> None:
    """Print each stay and the counts."""
    walk = walk_from(product_modules(), *START)
    print(*walk.stays, sep="\n")
    print(f"{len(walk.stays)} stays in {walk.rooms} files, {walk.returns} returns", file=sys.stderr)


if __name__ == "__main__":
    main()
