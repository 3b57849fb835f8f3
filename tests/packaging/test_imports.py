# SPDX-License-Identifier: Apache-2.0
"""Who imports whom: layers point one way, and light things stay light."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.packaging.tree import module_name, python_files

MODULES = {module_name(file): file for file in python_files()}
LAYERS = ("core", "plugins", "export", "runtime")
MAY_IMPORT = {
    "core": {"core"},
    "plugins": {"core", "plugins"},
    "export": {"core", "plugins", "export"},
    "runtime": {"core", "plugins", "runtime"},
}
HEAVY = (
    "torch", "transformers", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "polygraphy", "triton",
    "tensorrt", "tensorrt_rtx", "tensorrt_bindings", "matplotlib", "huggingface_hub", "safetensors",
)  # fmt: skip
# Modules that are about a heavy library; everything else of core and runtime imports none.
ABOUT = {
    "dspark_trt.models": "torch",
    "dspark_trt.runtime.targets.transformers_model": "torch",
    "dspark_trt.runtime.backends.torch": "torch",
}


def layer_of(module: str) -> str:
    second = module.split(".")[1] if "." in module else ""
    return second if second in LAYERS else "core"


def imports(tree: ast.AST, *, lazy: bool) -> Iterator[tuple[str, int]]:
    """Imported module names and lines; without ``lazy`` only those that run on import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not lazy:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            assert node.module is not None
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        else:
            yield from imports(node, lazy=lazy)


@pytest.mark.parametrize("module", MODULES)
def test_layers_point_one_way(module: str) -> None:
    """Core <- plugins <- {export, runtime}, in functions too; only the CLI, lazily, sees everything.

    The reference modules call the sampling specification eagerly, in one function.
    """
    layer = layer_of(module)
    allowed = MAY_IMPORT[layer]
    if module.startswith("dspark_trt.cli."):
        allowed = set(LAYERS)
    if module == "dspark_trt.models.operators":
        allowed = {"core", "plugins"}
    tree = ast.parse(MODULES[module].read_text())
    for name, line in imports(tree, lazy=True):
        if name.split(".")[0] == "dspark_trt":
            assert layer_of(name) in allowed, f"{MODULES[module]}:{line} imports {name}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("dspark_trt.cli")])
def test_commands_import_the_upper_layers_inside_functions(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    for name, line in imports(tree, lazy=False):
        if name.split(".")[0] == "dspark_trt":
            assert layer_of(name) == "core", f"{MODULES[module]}:{line} imports {name} at once"


@pytest.mark.parametrize("module", [m for m in MODULES if layer_of(m) in ("core", "runtime")])
def test_core_and_runtime_import_nothing_heavy_at_once(module: str) -> None:
    allowed = {library for about, library in ABOUT.items() if module.startswith(about)}
    for name, line in imports(ast.parse(MODULES[module].read_text()), lazy=False):
        library = name.split(".")[0]
        assert library not in HEAVY or library in allowed, f"{MODULES[module]}:{line}: {name}"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_imported(module: str) -> None:
    if module == "dspark_trt.__main__":
        return  # runs the command line
    loaded = importlib.import_module(module)
    assert loaded.__file__ is not None
    assert Path(loaded.__file__).resolve() == MODULES[module].resolve()


def loaded_after(statements: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after running ``statements``."""
    program = f"import sys, json\n{statements}\nprint(json.dumps([m.split('.')[0] for m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_package_itself_loads_nothing() -> None:
    """Not even NumPy: `import dspark_trt` adds one module to a bare interpreter."""
    assert loaded_after("import dspark_trt") - loaded_after("") == {"dspark_trt"}


def test_a_host_process_loads_neither_torch_nor_onnx() -> None:
    """Everything of core and runtime that a host with a bundle may import, in one process."""
    light = [
        module
        for module in MODULES
        if layer_of(module) in ("core", "runtime")
        and not module.startswith((*ABOUT, "dspark_trt.__main__"))
    ]
    loaded = loaded_after("\n".join(f"import {module}" for module in light))
    assert not loaded & set(HEAVY)


def test_help_is_quick_to_load() -> None:
    loaded = loaded_after("from dspark_trt.cli import build_app; build_app()")
    assert not loaded & {*HEAVY, "numpy"}
