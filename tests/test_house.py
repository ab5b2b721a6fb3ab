"""The house keeps its size, and its front door opens on little; who may import whom stands in pyproject.toml (`make lint`)."""

import ast
import subprocess
import sys

from test_docs import ROOT

MOST_LINES = {
    "benchmarks": 1_746,
    "causalqwen": 1_188,  # its own files
    "causalqwen/data": 1_573,
    "causalqwen/decoding": 1_148,
    "causalqwen/distributions": 513,
    "causalqwen/evaluation": 1_966,
    "causalqwen/individuals": 671,
    "causalqwen/kernels": 850,
    "causalqwen/modeling": 8_081,
    "causalqwen/numbers": 1_678,
    "causalqwen/parts": 883,
    "causalqwen/serving": 2_753,
    "causalqwen/training": 5_218,
    "causalqwen_cli": 1_274,
    "causalqwen_evals": 382,
    "causalqwen_vllm": 1_844,
    "tests": 27_789,
}
"""Lines of Python in a package at most. A row is lowered with them, and raised only for what takes the place of more."""


def test_no_package_grows():
    lines = dict.fromkeys(MOST_LINES, 0)
    for file in [file for name in ("src", "benchmarks", "tests") for file in (ROOT / name).rglob("*.py")]:
        folder = file.relative_to(ROOT).parts[:-1]
        name = "/".join(folder[1:3]) if folder[0] == "src" else folder[0]
        lines[name] = lines.get(name, 0) + len(file.read_bytes().splitlines())
    assert {name: count for name, count in lines.items() if count > MOST_LINES.get(name, 0)} == {}


def test_no_function_is_longer_than_a_page():
    long = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[min(ast.get_docstring(node) is not None, len(node.body) - 1)]
                long |= {(file.name, node.name)} if node.end_lineno - first.lineno >= 60 else set()
    # The grammar's rows in their order, and the one pass of a CUDA kernel.
    assert long == {("table.py", "table"), ("triton_ovr.py", "_stage")}


def test_to_import_the_library_loads_none_of_its_extras():
    heavy = {"sklearn", "fastapi", "uvicorn", "pandas", "pyarrow", "matplotlib", "peft"}
    code = f"import sys, causalqwen; print({heavy} & sys.modules.keys() or '')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
