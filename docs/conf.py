"""The site: ``make docs`` builds it from the pages and the docstrings, offline."""

import pathlib
import sys

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

import gradcomp
import gradcomp.testing

ROOT = pathlib.Path(__file__).parents[1]
REPOSITORY = "https://github.com/gradcomp/gradcomp"

project = "gradcomp"
author = copyright = "the authors of gradcomp"
version = release = gradcomp.__version__
html_title = "gradcomp"
html_baseurl = "https://gradcomp.readthedocs.io/en/stable/"

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.coverage",
  "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "README.md"]  # index.rst includes it
templates_path = ["_templates"]

myst_heading_anchors = 4
myst_links_external_new_tab = False
nb_execution_mode = "off"  # the tests run the code of the pages

autosummary_ignore_module_all = False
autosummary_imported_members = True
# Each page's name differs from all others also where case does not count.
autosummary_filename_map = {
  "gradcomp.cost.Plan": "gradcomp.cost.Plan-class",
  "gradcomp.testing.Trial": "gradcomp.testing.Trial-class",
}
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_use_ivar = True
add_module_names = False

coverage_modules = ["gradcomp"]
coverage_ignore_modules = [r"gradcomp\._src"]
coverage_show_missing_items = True
coverage_statistics_to_stdout = True

html_theme = "sphinx_book_theme"
html_theme_options = {
  "repository_url": REPOSITORY,
  "use_repository_button": True,
  "show_toc_level": 2,
}
html_math_renderer = "mathml"

# Some namespaces lie in others and are no modules of their own; autodoc imports each.
for name in ("cost.papers", "telemetry.plots", "testing.laws", "testing.modes"):
  space, inner = name.split(".")
  sys.modules[f"gradcomp.{name}"] = getattr(getattr(gradcomp, space), inner)
for name in gradcomp.cost.papers.__all__:
  sys.modules[f"gradcomp.cost.papers.{name}"] = getattr(gradcomp.cost.papers, name)


class LinksToTheRepository(SphinxTransform):
  """Leads links of pages to files outside of docs/ to the repository."""

  default_priority = 5

  def apply(self) -> None:
    page = pathlib.Path(self.env.doc2path(self.env.docname))
    for kind in (addnodes.download_reference, addnodes.pending_xref):
      for link in list(self.document.findall(kind)):
        target = (page.parent / link["reftarget"]).resolve()
        if link.get("reftype") == "myst" and target.exists() and ".." in link["reftarget"]:
          path = target.relative_to(ROOT)
          if path.parts[0] != "docs":
            view = "tree" if target.is_dir() else "blob"
            uri = f"{REPOSITORY}/{view}/main/{path}"
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri))


def inline_formula(translator, node):
  """Writes a formula as MathML, which browsers show without scripts and fonts."""
  translator.body.append(latex2mathml.tex2mathml(node.astext()))
  raise nodes.SkipNode


def formula(translator, node):
  """Writes a formula of its own line."""
  mathml = latex2mathml.tex2mathml(node.astext(), as_block=True)
  translator.body.append(f'<div class="math">{mathml}</div>')
  raise nodes.SkipNode


def setup(app):
  app.add_transform(LinksToTheRepository)
  app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
