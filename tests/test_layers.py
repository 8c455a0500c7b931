"""Who may import whom: upward only. Imports inside functions count as well."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "optimum_prune"

LAYERS = (
    {"errors", "registry", "checks", "config"},
    {"allocation", "scorers", "adapters"},
    {"binding", "surgery", "sizes", "scoring", "calibration"},
    {"pipeline", "report", "measurements", "metrics", "latency", "evaluation"},
    {"integrations"},
    {"pruner"},
    {"commands"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

FOREIGN = {
    "": {"wrapt"},
    "errors": set(),
    "registry": set(),
    "checks": set(),
    "config": {"yaml"},
    "adapters": set(),
    "allocation": {"torch"},
    "scorers": {"torch"},
    "commands": {"optimum"},
    "integrations": {"torch", "transformers", "safetensors", "huggingface_hub", "yaml"},
} | {name: {"torch", "transformers", "datasets", "evaluate"} for name in LAYERS[2] | LAYERS[3] | LAYERS[5]}
"""What each may import besides the standard library; "" is the package's own `__init__`."""

WHERE_USED = {"yaml", "peft", "datasets", "evaluate", "matplotlib"}
"""Imported in functions only: they cost much, or a help page must not need them."""
EXCEPTIONS = {
    ("metrics", "evaluate"),  # its classes derive from evaluate's; it is itself imported where used
    ("metrics", "datasets"),
    ("integrations.card", "yaml"),  # huggingface_hub has it in memory by then
}


class Import(NamedTuple):
    target: str
    inside: bool  # in a function, or for type checkers only
    typing: bool
    line: int


def modules() -> dict[str, Path]:
    """Return all modules, by their dotted name inside of the package; the package itself is ""."""
    root = ROOT / PACKAGE
    names = {path: path.relative_to(root).with_suffix("").parts for path in sorted(root.rglob("*.py"))}
    return {".".join(part for part in parts if part != "__init__"): path for path, parts in names.items()}


def imports(tree: ast.AST, *, inside: bool = False, typing: bool = False) -> Iterator[Import]:
    """Yield every import below a node; `from a import b` as `a.b`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, inside, typing, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(f"{start}.{alias.name}", inside, typing, node.lineno)
        else:
            checker = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, inside=inside or function or checker, typing=typing or checker)


MODULES = modules()
IMPORTS = {name: list(imports(ast.parse(path.read_text("utf-8")))) for name, path in MODULES.items()}


def top(name: str) -> str:
    return name.partition(".")[0]


def own(found: Import) -> str | None:
    """Return the module of the package that is imported, "" for the package itself, None for a foreign one."""
    parts = [*found.target.split("."), ""]
    return parts[1] if parts[0] == PACKAGE else None


def test_every_module_has_a_layer():
    assert {top(name) for name in MODULES} - {""} == set(LEVEL)


@pytest.mark.parametrize("name", MODULES)
def test_imports_inside_the_package_are_absolute(name):
    assert [found for found in IMPORTS[name] if found.target.startswith(".")] == []


@pytest.mark.parametrize("name", [name for name in MODULES if name])  # the __init__ names everything, lazily
def test_imports_go_upward_only(name):
    targets = {target for found in IMPORTS[name] if (target := own(found))}
    assert targets <= set(LEVEL), "inside the package, names are imported from their modules"
    assert {target for target in targets if LEVEL[target] > LEVEL[top(name)]} == set()


@pytest.mark.parametrize("name", MODULES)
def test_third_parties(name):
    allowed = FOREIGN[top(name)] | sys.stdlib_module_names | {PACKAGE}
    foreign = {top(found.target) for found in IMPORTS[name] if not found.typing}
    assert foreign - allowed == set()


@pytest.mark.parametrize("name", MODULES)
def test_what_is_imported_where_it_is_used(name):
    early = {top(found.target) for found in IMPORTS[name] if not found.inside} & WHERE_USED
    assert {what for what in early if (name, what) not in EXCEPTIONS} == set()


@pytest.mark.parametrize("name", [name for name in MODULES if top(name) in LAYERS[0] | {"", "commands"}])
def test_help_needs_no_torch(name):
    """What is imported to print help is the standard library, optimum's base class and layer 0."""
    for found in IMPORTS[name]:
        if not found.inside and top(found.target) not in sys.stdlib_module_names:
            target = own(found)
            light = target in LAYERS[0] | {"", "commands"}
            assert light or found.target.startswith(("optimum.commands.base.", "wrapt.")), found


@pytest.mark.parametrize("name", [name for name in MODULES if top(name) in LAYERS[1]])
def test_arithmetic_knows_no_live_module(name):
    """Scorers and allocation are functions of tensors: no nn.Module, no hooks. Adapters are names."""
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8")))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert not {word for word in names if word in ("Module", "nn") or "hook" in word}


def test_only_metrics_brings_evaluate():
    """Its module-level imports are allowed because nobody imports it at module level."""
    early = {name for name, all_ in IMPORTS.items() for i in all_ if own(i) == "metrics" and not i.inside}
    assert early == set()
