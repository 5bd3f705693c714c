"""Nothing a run reads back is unpickled: a checkpoint, record or config from elsewhere must not be able to run code."""

import ast
from pathlib import Path

import pytest

import async_rl

SOURCES = sorted(Path(async_rl.__file__).parent.rglob("*.py"))
READERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unpickling(source):
    """Calls in a module's source that may run code from a file, as ``line: call``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        name = ast.unparse(node.func)
        module, _, function = name.rpartition(".")
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if (
            (module.split(".")[0] in READERS and function in ("load", "loads", "Unpickler", "open"))
            or (name == "torch.load" and given.get("weights_only") != "True")
            or (module in ("np", "numpy") and function == "load" and given.get("allow_pickle", "False") != "False")
        ):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(SOURCES[0].parent)))
def test_no_module_unpickles_what_it_reads(path):
    assert unpickling(path.read_text()) == []


def test_the_test_sees_what_it_looks_for():
    for call in (
        "pickle.loads(x)",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "np.load(p, allow_pickle=True)",
    ):
        assert unpickling(call) == [f"1: {call}"]
    for call in ("pickle.dumps(x)", "torch.load(p, weights_only=True)", "np.load(p)"):
        assert unpickling(call) == []
