"""Nothing a run reads back is unpickled: a checkpoint, record or config from elsewhere must not be able to run code."""

import ast
from pathlib import Path

import pytest

import async_rl

SOURCES = sorted(Path(async_rl.__file__).parent.rglob("*.py"))
READERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unpickling(source):
    """Calls in a module's source that may run code from a file, as ``line: call``."""
    tree = ast.parse(source)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        first, *rest = ast.unparse(node.func).split(".")
        module, _, function = ".".join([imported.get(first, first), *rest]).rpartition(".")
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if (
            (module.split(".")[0] in READERS and function in ("load", "loads", "Unpickler", "open"))
            or (
                module in ("torch", "torch.serialization")
                and function == "load"
                and given.get("weights_only") != "True"
            )
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


@pytest.mark.parametrize(
    ("how", "call"),
    [
        ("from pickle import loads", "loads(x)"),
        ("from pickle import loads as read", "read(x)"),
        ("import pickle as p", "p.loads(x)"),
        ("from torch import load", "load(p)"),
        ("from torch import load", "load(p, weights_only=False)"),
        ("from torch import serialization", "serialization.load(p)"),
        ("import torch as t", "t.load(p)"),
        ("from numpy import load", "load(p, allow_pickle=True)"),
    ],
)
def test_whatever_name_it_was_imported_under(how, call):
    assert unpickling(f"{how}\n{call}") == [f"2: {call}"]
    assert unpickling(f"def f():\n    {how}\n    {call}") == [f"3: {call}"]


def test_what_has_the_name_only_is_nothing():
    assert unpickling("from json import loads\nloads(x)") == []
    assert unpickling("from torch import load\nload(p, weights_only=True)") == []
    assert unpickling("load(p)\nself.load(p)") == []
