"""The package itself: imports point one way, public names are documented, nothing grew large."""

import ast
import inspect
import io
import pathlib
import re
import tokenize

import pytest
from hypothesis import settings

import minisparse as ms

PACKAGE = pathlib.Path(ms.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import, of the package, only what stands before it here.  `ops` is one entry, and so
# is `kernels`; within them, files import files of their own folder.
ALLOWED = {
    "engine": set(),
    "kernels": set(),
    "cuda": {"kernels"},
    "pattern": {"kernels", "engine"},
    "ops": {"engine", "kernels"},
    "optim": {"engine", "kernels"},
    "sparse": {"ops", "engine", "pattern", "kernels"},
    "algebra": {"ops", "engine", "pattern", "kernels", "sparse"},
    "linalg": {"engine", "sparse"},
    "functional": {"engine", "sparse"},
    "nn": {"ops", "engine", "pattern", "sparse", "kernels"},
    "io": {"engine", "pattern"},
    "interop": {"kernels", "pattern", "nn"},
    "viz": {"engine"},
    "gradcheck": {"engine", "sparse", "pattern"},
    "testing": {"engine", "pattern", "sparse"},
    "runtime": {"kernels"},
    "__main__": {"runtime"},
}


def imported(path):
    """Yield the parts of the package that a file imports, and everything else it imports."""
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "_members":
            continue  # exists for type checkers only
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) + 1 - node.level]
            targets = [node.module] if node.module else [a.name for a in node.names]
            for target in targets:
                yield (*base, *target.split("."))[0], None
        elif isinstance(node, ast.ImportFrom):
            yield None, node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield None, alias.name.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    inside, outside = zip(*imported(path), strict=True) if list(imported(path)) else ((), ())
    assert set(inside) - {None, own} <= ALLOWED[own]
    assert "minisparse" not in outside
    if own == "engine":
        standard = {
            "contextlib",
            "contextvars",
            "functools",
            "inspect",
            "itertools",
            "operator",
        }
        assert set(outside) - {None} <= standard | {"typing", "numpy"}
    if own != "kernels":
        assert "numba" not in outside
    if own != "testing":
        assert "hypothesis" not in outside


def code_lines(path):
    """Count the lines of code: no blank lines, comments or docstrings."""
    source, lines = path.read_text(), set()
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*empty, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_small_is_the_product():
    sizes = {path: code_lines(path) for path in FILES}
    assert sizes[PACKAGE / "engine.py"] < 350
    # Compiled kernels stay in one file: Numba's cache misses a change in a helper elsewhere.
    assert max(n for path, n in sizes.items() if path.name != "cpu.py") <= 500
    assert sum(sizes.values()) < 4000


def public_things():
    for name in ms.__all__:
        thing = getattr(ms, name)
        yield name, thing
        if inspect.ismodule(thing):
            for member, value in vars(thing).items():
                own = getattr(value, "__module__", None) == thing.__name__ and member[0] != "_"
                if own or member in getattr(thing, "__all__", ()):
                    yield f"{name}.{member}", value


def test_every_public_name_is_documented():
    missing = []
    for name, thing in public_things():
        if not inspect.getdoc(thing):
            missing.append(name)
        if inspect.isclass(thing):
            missing += [
                f"{name}.{member}"
                for member, value in vars(thing).items()
                if inspect.isfunction(getattr(value, "__func__", value))
                and member[0] != "_"
                and member != "forward"
                and not inspect.getdoc(getattr(thing, member))
            ]
            missing += [  # a property of an attrgetter has Python's own text if it has none
                f"{name}.{member}"
                for member, value in inspect.getmembers_static(thing)
                if isinstance(value, property)
                and member[0] != "_"
                and (value.__doc__ or "attrgetter").startswith("attrgetter")
            ]
    assert not missing


def test_type_checkers_see_what_is_bound():
    dense, sparse = ast.parse((PACKAGE / "_members.pyi").read_text()).body[-2:]
    told = {n.name for n in sparse.body}
    assert told <= set(vars(ms.SparseTensor))
    bound = {name for name in vars(ms.algebra._Members) if name not in ("__module__", "__doc__")}
    assert bound - {"_takes"} <= told
    told = {getattr(n, "name", None) or n.target.id for n in dense.body}
    bound = set(vars(ms.Tensor)) - set(vars(ms.engine.Tensor.__base__)) | {"__eq__", "__ne__"}
    assert told <= set(vars(ms.Tensor))
    public = {n for n in bound if not n.startswith("_")} - {"data", "grad", "requires_grad"}
    assert public - {"shape", "ndim", "size", "dtype", "detach", "backward"} <= told
    operators = {f"__{side}{op}__" for side in ("", "r", "i") for op in OPERATORS}
    assert operators <= told


OPERATORS = ("add", "sub", "mul", "truediv", "pow", "matmul")


def test_no_deadline_while_something_compiles():
    """CASES 36."""
    for name in ("dev", "ci", "deep"):
        assert settings.get_profile(name).deadline is None


def test_every_reported_fault_has_a_test():
    """The faults that users reported are numbered; a test that holds one says "CASES" and which."""
    named = set()
    for path in pathlib.Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for numbers in re.findall(
                    r"CASES ((?:\d+b?(?:, | and )?)+)", ast.get_docstring(node) or ""
                ):
                    named |= set(re.findall(r"\d+b?", numbers))
    assert named == {*map(str, range(1, 43)), "19b"}


def test_all_is_what_is_there():
    assert len(set(ms.__all__)) == len(ms.__all__)
    assert all(hasattr(ms, name) for name in ms.__all__)
    hidden = {
        name
        for name, value in vars(ms).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert hidden <= set(ms.__all__)


def test_import_is_quiet(in_new_process):
    """CASES 39: importing changes no setting, starts no thread, loads nothing extra."""
    printed = in_new_process(
        "import os, threading, sys, numpy, scipy.sparse\n"
        "before = dict(os.environ)\n"
        "threads = len(os.listdir('/proc/self/task')) if os.path.exists('/proc/self/task') else 1\n"
        "import minisparse\n"
        "assert dict(os.environ) == before\n"
        "assert threading.active_count() == 1\n"
        "if os.path.exists('/proc/self/task'):\n"
        "    assert len(os.listdir('/proc/self/task')) == threads\n"
        "print(sorted({'numba', 'hypothesis', 'torch', 'matplotlib', 'cupy'} & set(sys.modules)))\n"
    )
    assert printed.strip() == "[]"


def test_configuration_report(in_new_process):
    printed = in_new_process("import runpy; runpy.run_module('minisparse', run_name='__main__')")
    for name in ("python", "minisparse", "numpy", "threads", "backend"):
        assert name in printed
