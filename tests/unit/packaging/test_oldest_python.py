"""Nothing evaluates a union of types that is written `A | B`, which Python 3.9 can't.

Annotations aren't evaluated, except by pydantic, those of its models.
"""

from __future__ import annotations

import ast
import importlib

import pydantic

from tests.unit.packaging.test_layout import ROOT, package_modules

TYPES = {"bool", "bytes", "dict", "float", "int", "list", "set", "str", "tuple"}


def is_a_type(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        return is_a_type(node.value)
    return isinstance(node, ast.Name) and node.id in TYPES or ast.unparse(node) == "None"


class Unions(ast.NodeVisitor):
    """Finds the unions of types that are evaluated."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.BitOr) and (is_a_type(node.left) or is_a_type(node.right)):
            self.lines.append(node.lineno)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        node.returns = None
        self.generic_visit(node)


def unions(text: str) -> list[int]:
    found = Unions()
    found.visit(ast.parse(text))
    return found.lines


def models(base: type = pydantic.BaseModel) -> list[type[pydantic.BaseModel]]:
    return [model for one in base.__subclasses__() for model in (one, *models(one))]


def test_unions_that_are_evaluated_are_found():
    for text in ("A = int | None", "A = Tuple[B | None]", "f(x, y | None)", "A = B | list[int]"):
        assert unions(text) == [1], text
    for text in ("x: int | None = 3", "def f(x: int | None) -> str | None: return A | B"):
        assert unions(text) == [], text


def test_no_module_evaluates_a_union():
    modules = {**package_modules(), **{str(path): path for path in ROOT.glob("modelzoo/**/*.py")}}
    assert len(modules) > len(package_modules())
    found = {name: unions(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_field_of_a_model_is_a_union():
    for name, path in package_modules().items():
        if "pydantic" in path.read_text(encoding="utf-8"):
            importlib.import_module(name)
    fields = {
        f"{model.__module__}.{model.__qualname__}.{field}": str(annotation)
        for model in models()
        if model.__module__.startswith("collective")
        for field, annotation in model.__dict__.get("__annotations__", {}).items()
    }
    assert len(fields) > 20
    assert {name: text for name, text in fields.items() if "|" in text} == {}
