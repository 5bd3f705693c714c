"""Who may import whom (DESIGN section 4), read from the source."""

import ast
import sys
from pathlib import Path

import pytest

import async_rl

ROOT = Path(async_rl.__file__).parent
HEAVY = {"torch", "lightning", "transformers", "vllm", "deepspeed", "hydra", "omegaconf"}
ORCHESTRATOR = sorted((ROOT / "orchestrator").glob("*.py"))
# Data, the lock that the parts share and what a record's file is like; they import no part.
VOCABULARY = {"records", "room", "settings", "ledger_rows"}
# The simulator drives the shipped gate and planner.
MAY_IMPORT_PARTS = {"orchestrator", "simulator"}
# A part made of parts, which nobody but the orchestrator sees.
MADE_OF = {"fleet": {"restarts", "version", "watcher"}}
# Names only: who starts a vLLM process, or takes one as started right, must name the weight back end it registers.
NAMES_OF_THE_BACK_END = {
    ("vllm_launch.py", "async_rl.weights.shared_memory"),
    ("vllm_launch.py", "async_rl.weights.vllm_plugin"),
    ("vllm_server.py", "async_rl.weights.file"),
    ("vllm_server.py", "async_rl.weights.nccl"),
}


def imports(path: Path, *, everywhere: bool = True) -> set[str]:
    """Modules a file imports when it runs; without ``everywhere`` only those imported when it is itself imported."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return  # for the type checker only
        elif not everywhere and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def packages_of(folder: str, base: str) -> list[tuple[str, str]]:
    """(file, module of ours) pairs of imports from ``folder`` to outside of it, its own siblings' ``base.py`` aside."""
    return [
        (path.name, module)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module in imports(path)
        if module.startswith("async_rl") and not module.startswith(f"async_rl.{folder}") and not module.endswith(base)
    ]


@pytest.mark.parametrize("path", ORCHESTRATOR, ids=lambda p: p.name)
def test_the_control_plane_imports_only_itself_types_numpy_and_the_standard_library(path):
    for module in imports(path):
        top = module.split(".")[0]
        assert (
            module == "async_rl.types"
            or module.startswith("async_rl.orchestrator.")
            or top == "numpy"
            or top in sys.stdlib_module_names
        ), f"{path.name} imports {module}"


@pytest.mark.parametrize("path", ORCHESTRATOR, ids=lambda p: p.name)
def test_parts_of_the_control_plane_do_not_import_each_other(path):
    siblings = {
        m.removeprefix("async_rl.orchestrator.") for m in imports(path) if m.startswith("async_rl.orchestrator.")
    }
    if path.stem in VOCABULARY:
        assert not siblings
    elif path.stem not in MAY_IMPORT_PARTS:
        # `part.py` and `part_*.py` are one part in several files.
        part = path.stem.split("_")[0]
        assert {s for s in siblings if s.split("_")[0] != part} <= VOCABULARY | MADE_OF.get(part, set())


def test_algorithms_import_torch_only():
    for path in sorted((ROOT / "algorithms").glob("*.py")):
        for module in imports(path):
            top = module.split(".")[0]
            assert top == "torch" or module.startswith("async_rl.algorithms") or top in sys.stdlib_module_names, (
                f"{path.name} imports {module}"
            )


@pytest.mark.parametrize("folder", ["engines", "environments", "weights"])
def test_engines_environments_and_weights_meet_through_types_and_base(folder):
    others = {"orchestrator", "trainer", "policy", "datamodule", "callbacks", "session", "wiring", "main", "config"}
    siblings = {"engines", "environments", "weights"} - {folder}
    for file, module in packages_of(folder, ".base"):
        second = module.split(".")[1] if "." in module else ""
        assert second not in others, f"{folder}/{file} imports {module}"
        if (file, module) in NAMES_OF_THE_BACK_END:
            continue
        assert second not in siblings, f"{folder}/{file} imports {module}, not through base.py"


@pytest.mark.parametrize("path", [ROOT / "__init__.py", ROOT / "types.py", ROOT / "config.py"], ids=lambda p: p.name)
def test_cheap_modules_import_nothing_heavy(path):
    if not path.exists():
        pytest.skip(f"{path.name} is not there")
    heavy = {m for m in imports(path, everywhere=False) if m.split(".")[0] in HEAVY}
    assert not heavy, f"{path.name} imports {heavy}"


def test_base_modules_import_nothing_heavy():
    for path in ROOT.rglob("base.py"):
        if path.parent.name in {"engines", "environments", "weights"}:
            assert not {m for m in imports(path, everywhere=False) if m.split(".")[0] in HEAVY}, str(path)
