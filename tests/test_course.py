"""The course runs as it stands; its checks accept the solutions, and refuse wrong ones."""

import ast
import contextlib
import io
import pathlib
import re
from typing import NamedTuple

import pytest

import minisparse as ms

COURSE = pathlib.Path(__file__).parents[1] / "docs" / "course"
CHAPTERS = "chapter1", "chapter2", "chapter3", "chapter4"

# exercise: what to replace in the solution, each time once, to make it wrong
DETACHED = "({0}.detach() if isinstance({0}, ms.Tensor) else {0})"  # right at first order only
WRONG = {
    "quotient_slopes": [("-a / b**2", "a / b**2"), ("1 / b,", "2 / b,")],
    "sum_to": [("g.sum", "g.mean")],
    "pick_rule": [("np.add.at(out, index, g)", "out[index] += g")],
    "logsumexp_rule": [("g * ", ""), ("np.exp(x - out)", "np.exp(x) / np.exp(x).sum()")],
    "swish_rule": [("g * (s", "2 * g * (s"), ("sigmoid(x)", f"sigmoid{DETACHED.format('x')}")],
    "to_csr": [("counts = ", "counts = 0 * "), ("which, values", "which, None"), ("% ", "// ")],
    "spmm_transposed": [("+= ", "= "), ("values[e] * ", "")],
    "value_gradient": [("g[i]", "2 * g[i]"), ("out[e]", "out[-e]")],
    "sddmm_rule": [("Z @ v", "2 * (Z @ v)"), ("pattern, g)", f"pattern, {DETACHED.format('g')})")],
    "scale_rule": [("values * c[cols]", "c[cols]"), ("r[rows], min", "c[cols], min")],
    "sddmm": [
        ("= total", "= 2 * total"),
        ("= total", "+= total"),
        ("= u.", "= total if e else u."),
        ("indptr[i + 1]", "indptr[i + 1] - 1"),
    ],
    "traffic": [("(n_rows + 1)", "n_rows"), ("small + n_cols * k", "small + n_rows * k")],
    "by_column": [("rows[perm], perm", "rows, perm"), ("], perm", "], np.argsort(perm)")],
    "fair_bounds": [
        ("indptr + np", "np"),
        ("parts + 1)", "parts + 1) * 0.9"),
        ("parts + 1)", "parts)"),
    ],
    "momentum_step": [("+= g", "+= (1 - momentum) * g"), ("lr * buffer", "lr * g")],
    "adam_step": [
        ("m / (1 - beta1**step)", "m"),
        ("(v_hat) + eps", "(v_hat + eps)"),
        ("p -= ", "p = p - "),
        ("m += ", "m = m + "),
        ("v[...] = ", "v = "),
    ],
    "free_gradient": [
        ("index[there], g[there]", "index % n_free, g"),
        ("return", "return 2 *"),
        (", minlength=n_free", ""),
    ],
    "convolution_labels": [(" - pattern.rows", "")],
    "deviations": [
        ("pattern.fan_in[pattern.rows]", "(pattern.fan_in[pattern.rows] + 1)"),
        ("pattern.fan_in[pattern.rows]", "np.full(pattern.nnz, pattern.shape[1])"),
        ("[pattern.rows]", ""),
    ],
}

FENCE = r"^```\{code-cell\}[^\n]*\n((?:---\n.*?^---\n|(?::[^\n]*\n)+\n*)?)(.*?)^```$"


class Cell(NamedTuple):
    options: str
    source: str
    line: int

    def has(self, tag):
        return tag in re.findall(r"\w+", "".join(re.findall(r"tags: \[(.*)\]", self.options)))

    def run(self, names, source=None):
        """Run it, or a source in its place; return what it printed."""
        code = "\n" * self.line + self.source if source is None else source
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "cell", "exec"), names)
        return printed.getvalue()


def cells(chapter):
    text = (COURSE / f"{chapter}.md").read_text(encoding="utf-8")
    found = re.finditer(FENCE, text, re.MULTILINE | re.DOTALL)
    return [Cell(m[1], m[2], text.count("\n", 0, m.start(2))) for m in found]


def functions(source):
    """Return {name: (source, arguments)} of the functions in a source."""
    defined = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {f.name: (ast.get_source_segment(source, f), ast.dump(f.args)) for f in defined}


def solutions(chapter):
    return functions((COURSE / "solutions" / f"{chapter}.py").read_text(encoding="utf-8"))


@pytest.fixture
def names(monkeypatch):
    """The names a chapter starts from, which leaves everything as it was."""
    matplotlib = pytest.importorskip("matplotlib", reason="the course needs the extra `examples`")
    pytest.importorskip("sklearn", reason="the course needs the extra `examples`")
    matplotlib.use("agg")
    monkeypatch.syspath_prepend(COURSE)
    import course

    monkeypatch.setattr(course.quickest, "__defaults__", (0.0,))  # nothing is measured here
    threads = ms.get_num_threads()
    yield {"__name__": "__main__"}
    ms.set_num_threads(threads)
    course.plt.close("all")


@pytest.mark.compiled
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_as_it_stands(chapter, names):
    for cell in cells(chapter):
        printed = cell.run(names)
        assert not cell.has("check") or re.fullmatch(r"exercise \d\.\d: not yet\n", printed)


@pytest.mark.compiled
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_checks_accept_the_solutions_and_refuse_wrong_ones(chapter, names):
    right, exercise = solutions(chapter), None
    for cell in cells(chapter):
        if cell.has("exercise"):
            ((exercise, _),) = functions(cell.source).items()
        elif cell.has("check"):
            source, _ = right[exercise]
            cell.run(names, source)
            assert re.search(r"exercise \d\.\d: correct\n$", cell.run(names)), exercise
            for old, new in WRONG[exercise]:
                assert source.count(old) == 1, (exercise, old)
                cell.run(names, source.replace(old, new))
                with pytest.raises(AssertionError, match=r"\w"):  # it says why
                    cell.run(names)
            cell.run(names, source)
        else:
            cell.run(names)


def test_exercises_checks_solutions_and_wrong_ones_belong_together():
    exercises = []
    for chapter in CHAPTERS:
        marked = [cell for cell in cells(chapter) if cell.has("exercise") or cell.has("check")]
        assert all(cell.has("exercise") for cell in marked[::2])
        assert all(cell.has("check") for cell in marked[1::2])
        stubs = {
            name: stub for cell in marked[::2] for name, stub in functions(cell.source).items()
        }
        assert all("raise NotImplementedError" in source for source, _ in stubs.values())
        signatures = {name: arguments for name, (_, arguments) in stubs.items()}
        assert signatures == {name: args for name, (_, args) in solutions(chapter).items()}
        exercises += signatures
    assert sorted(exercises) == sorted(WRONG)


def test_every_assertion_of_a_check_says_what_is_wrong():
    for chapter in CHAPTERS:
        for cell in cells(chapter):
            for node in ast.walk(ast.parse(cell.source)) if cell.has("check") else ():
                if isinstance(node, ast.Assert):  # the checker speaks for itself
                    says = node.msg or ast.unparse(node.test).startswith("ms.gradcheck(")
                    assert says, (chapter, cell.line + node.lineno)


def test_the_tape_has_sixty_lines_and_pictures_have_words():
    (tape,) = [cell.source for cell in cells("chapter1") if cell.has("tape")]
    (walk,) = [f for cell in cells("chapter1") if (f := functions(cell.source).get("newest_first"))]
    lines = "\n".join([tape, walk[0], solutions("chapter1")["sum_to"][0]]).splitlines()
    assert sum(line.strip() != "" for line in lines) < 60
    for chapter in CHAPTERS:
        for cell in cells(chapter):
            if re.search(r"^(_, ax|draw\()", cell.source, re.MULTILINE):
                assert "alt:" in cell.options, (chapter, cell.line)
