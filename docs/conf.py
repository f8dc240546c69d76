"""How the site is built: ``sphinx-build -W docs docs/_build``, without network.

Pages are MyST Markdown.  myst-nb runs the code on them while the site is built, each page in a
process of its own, and an exception ends the build.  It was chosen over doctest because what a page
shows is then what its code has just printed or drawn, and because the notebooks of the course go
the same way; what must hold is asserted in the cells.  The examples in docstrings are doctests,
which pytest runs.
"""

import os
import sys
import tempfile
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

import minisparse

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "figures")]
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["DOCS"] = str(HERE)  # where the cells of a page find the recorded figures
# Cells run with no user's settings, and without IPython's remark that it talks to itself by TCP.
os.environ["IPYTHONDIR"] = tempfile.mkdtemp()
Path(os.environ["IPYTHONDIR"], "profile_default").mkdir()
Path(os.environ["IPYTHONDIR"], "profile_default/ipython_kernel_config.py").write_text(
    "get_config().IPKernelApp.log_level = 40\n"
)

project = "minisparse"
author = "the minisparse developers"
copyright = author
release = version = minisparse.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_nb",
]
# reStructuredText comes first: what autosummary writes has the first suffix.
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = [
    "_build", "_generated", "figures", "jupyter_execute",  # the last is myst-nb's
    "course/*.ipynb",  # made by a reader, of the chapters
]  # fmt: skip
templates_path = ["_templates"]

autosummary_filename_map = {  # file systems that do not tell small letters from capitals
    "minisparse.tensor": "minisparse.tensor-function",
    "minisparse.viz.graph": "minisparse.viz.graph-function",
    "minisparse.gradcheck": "minisparse.gradcheck-function",
}
autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch"]  # its layer is documented without it
numpydoc_show_class_members = False
nitpicky = True  # a reference that leads nowhere is an error
nitpick_ignore_regex = [("py:.*", r"(numpy|scipy|hypothesis|torch|contextlib)\..*")]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_render_markdown_format = "myst"
nb_output_stderr = "error"  # a warning has no place on a page

html_theme = "pydata_sphinx_theme"
html_title = f"minisparse {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_math_renderer = "mathml"
html_theme_options = {
    "logo": {"text": "minisparse"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": [],
}
alone = "index", "performance", "promises", "security", "changelog", "contributing"
html_sidebars = {page: [] for page in alone}  # pages that head no section


def generate(app):
    """Draw the pictures from the recorded figures, and write the tables of calls."""
    import calls
    import draw

    draw.everything(HERE / "_generated")
    for library in calls.TITLES:
        (HERE / f"_generated/calls_{library}.md").write_text(calls.table(library))


def visit_math(self, node):
    """Write a formula as MathML, which browsers set by themselves: no script, no network."""
    mathml = convert(node.astext(), display="block" if node.tagname == "math_block" else "inline")
    if "\\" in mathml or ">&<" in mathml:  # what it does not know, it leaves as it is
        logging.getLogger(__name__).warning("not understood: %s", node.astext(), location=node)
    self.body.append(mathml)
    raise nodes.SkipNode


def show_public_bases(app, name, obj, options, bases):
    """Name the first base class that users can see."""
    for i, base in enumerate(bases):
        bases[i] = next((b for b in base.__mro__ if b.__name__.strip("_") == b.__name__), base)


def setup(app):
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("builder-inited", generate)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
