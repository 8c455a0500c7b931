"""Who may import whom: upward only, and third parties where they belong. Read off the source."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import optimum_prune

PACKAGE = Path(optimum_prune.__file__).parent
LAYERS = [
    {"errors", "checks", "registry", "fetching", "options", "config"},
    {"allocation", "bounds", "masks", "objectives", "quantiles", "scales", "solvers", "compensation"}
    | {"adapters", "scorers"},
    {
        "batching",
        "binding",
        "wrapping",
        "biases",
        "configs",
        "skipping",
        "surgery",
        "padded",
        "sizes",
        "scoring",
        "modes",
        "processes",
        "calibration",
        "layerwise",
    }
    | {
        "sparsity",
        "callbacks",
        "semi_structured",
        "refit",
        "rescaling",
        "streams",
        "scaling",
        "induction",
        "class_switch",
    },
    {
        "pipeline",
        "pools",
        "ranked",
        "structured",
        "depth",
        "masking",
        "selection",
        "report",
        "measurements",
        "context",
        "metrics",
        "latency",
        "evaluation",
        "stages",
    }
    | {"planning", "comparing", "plots", "recovery", "layouts"},
    {"integrations"},
    {"pruner"},
    {"checkpoint_evaluation"},
    {"commands"},
]
LAYER = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
PURE = {
    "allocation",
    "bounds",
    "masks",
    "quantiles",
    "scales",
    "solvers",
    "compensation",
    "scorers",
}  # functions of tensors: no modules, no hooks, no files, no output
HEAVY = {
    "peft",
    "datasets",
    "evaluate",
    "matplotlib",
}  # imported where used; `metrics` is itself one such place


class Import(NamedTuple):
    name: str  # with dots; for `from package import name`, both joined
    eager: bool  # runs when the module is imported


def imports(tree: ast.AST, eager: bool = True) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue  # never runs
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (Import(f"{node.module}.{alias.name}", eager) for alias in node.names)
        yield from imports(node, eager and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def own(imported: Import) -> str | None:
    """Return the part of the package that is imported, or None for another package or the package itself."""
    root, _, rest = imported.name.partition(".")
    part = rest.partition(".")[0]
    return part if root == "optimum_prune" and part in LAYER else None


def third_party(tree: ast.AST) -> set[tuple[str, bool]]:
    roots = {(imported.name.partition(".")[0], imported.eager) for imported in imports(tree)}
    return {(root, eager) for root, eager in roots if root not in {*sys.stdlib_module_names, "optimum_prune"}}


def may_import(part: str, eager: bool) -> set[str] | None:
    """Return the third parties that a part may import, or None where there is no rule."""
    if LAYER[part] == 0:
        return set() if eager else {"yaml", "huggingface_hub"}
    return {"adapters": set[str](), "scorers": {"torch"}, "allocation": {"torch"}}.get(part)


def complaints(part: str, source: str) -> list[str]:
    """Return what a module of that part of the package must not import or name."""
    tree = ast.parse(source)
    found = [
        f"{part} is below {target}" for target in filter(None, map(own, imports(tree))) if LAYER[target] > LAYER[part]
    ]
    for root, eager in third_party(tree):
        if (allowed := may_import(part, eager)) is not None and root not in allowed:
            found.append(f"{part} must not import {root}")
        if eager and part != "metrics" and root in HEAVY:
            found.append(f"{root} must be imported where it is used")
        if eager and part == "commands" and root != "optimum":
            found.append(f"optimum-cli would import {root} to print help")
        if root in {"pickle", "dill", "cloudpickle"}:
            found.append("pickle runs code of the file it reads")
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    if part in PURE:
        impure = {n for n in names | attributes if n in {"Module", "open", "print"} or n.startswith("register_")}
        found += [f"{part} is pure, and names {name}" for name in impure]
    if part != "commands" and "print" in names:
        found.append("only commands print")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if part != "__init__":  # the front door: its look-ups are lazy, see test_lazy_imports.py
            yield part, path


def test_every_module_has_a_layer():
    assert {part for part, _ in modules()} == set(LAYER)


@pytest.mark.parametrize(("part", "path"), [pytest.param(*m, id=str(m[1].relative_to(PACKAGE))) for m in modules()])
def test_module(part, path):
    assert complaints(part, path.read_text(encoding="utf-8")) == []


def test_the_package_itself_imports_nothing_of_its_own():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert [imported for imported in imports(tree) if imported.eager and own(imported)] == []


@pytest.mark.parametrize(
    ("part", "source", "complaint"),
    [
        ("surgery", "from optimum_prune.pipeline import prune", "surgery is below pipeline"),
        ("surgery", "def f():\n    from optimum_prune import pipeline", "surgery is below pipeline"),
        ("config", "import optimum_prune.scorers.ntk", "config is below scorers"),
        ("config", "try:\n    import yaml\nexcept ImportError: ...", "config must not import yaml"),
        ("config", "def f():\n    import torch", "config must not import torch"),
        ("adapters", "import torch", "adapters must not import torch"),
        ("scorers", "from transformers import AutoModel", "scorers must not import transformers"),
        ("scorers", "def f(m: nn.Module): ...", "scorers is pure, and names Module"),
        ("allocation", "x.register_forward_hook(f)", "allocation is pure, and names register_forward_hook"),
        ("pruner", "import datasets.utils", "datasets must be imported where it is used"),
        ("commands", "import huggingface_hub", "optimum-cli would import huggingface_hub to print help"),
        ("report", "print(1)", "only commands print"),
    ],
)
def test_this_test_can_fail(part, source, complaint):
    assert complaint in complaints(part, source)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("config", "def f():\n    import yaml"),
        ("config", "if TYPE_CHECKING:\n    import torch"),
        ("scorers", "import torch\nfrom torch.nn import functional"),
        ("pruner", "def f():\n    import datasets"),
        ("pipeline", "import optimum_prune\nfrom optimum_prune import registry"),
    ],
)
def test_what_is_allowed(part, source):
    assert complaints(part, source) == []
