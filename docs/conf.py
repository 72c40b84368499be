"""The site: ``make docs`` builds it from the pages and the docstrings, offline."""

import inspect
import pathlib
import re
import sys
import types
import typing

from docutils import nodes
from docutils.utils.math import latex2mathml

import gradcomp
from gradcomp._src.public import publish

PAGES = pathlib.Path(__file__).parent
sys.path.append(str(PAGES.parent))  # behind what is installed
from benchmarks.pages import records, study  # noqa: E402

REPOSITORY = "https://github.com/gradcomp/gradcomp"

project = "gradcomp"
author = copyright = "the authors of gradcomp"
version = release = gradcomp.__version__
COMMIT = "main" if "dev" in version else f"v{version}"  # that links lead to
html_title = "gradcomp"
html_baseurl = "https://gradcomp.readthedocs.io/en/stable/"

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.coverage",
  "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "README.md"]  # index.rst includes the latter
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

myst_heading_anchors = 4  # of ##, ### and ####, as GitHub makes them
nb_execution_mode = "off"  # the tests run the code of the pages

autosummary_ignore_module_all = False  # the names of ``__all__``, and no others
autosummary_imported_members = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_attr_annotations = False  # the signature has the types
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

nitpicky = True  # a reference that leads nowhere is a warning
nitpick_ignore_regex = [
  # Pages of other packages: the inventories of their names would have to be fetched.
  (
    "py:.*",
    r"(abc|collections|fractions|jax|jaxlib|matplotlib|numpy|optax|os|typing)\..*",
  ),
  ("py:class", "Figure|Mesh|P"),  # as annotations in quotes name matplotlib's and JAX's
  # Types in signatures that users get and pass on, and do not name.
  ("py:class", r"gradcomp\.(_src|contrib\._\w+)\..*"),
]

# Methods without a docstring have it in their protocol, where autodoc does not look;
# a test holds that public names have one.
coverage_skip_undoc_in_source = True
coverage_show_missing_items = True  # a warning each, and warnings are errors

html_theme = "sphinx_book_theme"
html_theme_options = {"repository_url": REPOSITORY, "use_repository_button": True}
html_sidebars = {"**": ["navbar-logo.html", "sbt-sidebar-nav.html"]}
html_math_renderer = "mathml"


def namespaces(path, space):
  """Yields the paths of the public modules in a module, and the modules."""
  for name in space.__all__:
    if isinstance(inner := getattr(space, name), types.ModuleType):
      yield f"{path}.{name}", inner
      yield from namespaces(f"{path}.{name}", inner)


NAMESPACES = dict(namespaces("gradcomp", gradcomp))
if missing := {"gradcomp", *NAMESPACES}.difference(
  (PAGES / "api" / "index.rst").read_text().split()
):
  raise ValueError(f"docs/api/index.rst must have a page of {sorted(missing)}.")


def parts(hint):
  """Yields a type and the types that it consists of."""
  yield hint
  for part in typing.get_args(hint):
    yield from parts(part)


def results(space, shown):
  """Returns the paths of types of results, without a public name, that no page shows.

  Functions of the module return these, and fields of the ones before hold these.
  """
  found, todo = [], [getattr(space, name) for name in space.__all__]
  for value in todo:
    hints = typing.get_type_hints(value) if callable(value) else {}
    named = hints.values() if inspect.isclass(value) else [hints.get("return")]
    for part in (x for hint in named for x in parts(hint)):
      private = inspect.isclass(part) and part.__module__.startswith("gradcomp._src.")
      path = private and f"{part.__module__}.{part.__name__}"
      told = not inspect.isclass(value) or "Attributes:" in str(part.__doc__)
      if private and told and path not in shown:
        found.append(path)
        shown.add(path)
        todo.append(part)
  return found


PATHS = set()
SPACES = {"gradcomp": gradcomp, **NAMESPACES}
RESULTS = {path: results(space, PATHS) for path, space in SPACES.items()}
autosummary_context = {"namespaces": list(NAMESPACES), "results": RESULTS}
for name, space in NAMESPACES.items():
  sys.modules[name] = space  # autodoc imports it by its path, which may be an attribute
  publish(vars(space) | {"__name__": name})  # coverage counts what is at home there


def fill(app, page, source):
  """Puts tables of the records behind the marks of a page."""
  source[0] = records.filled(source[0], records.TABLES | study.TABLES)


def lead_out(app, page, *arguments):
  """Leads the links of a page to files outside of docs/ to the repository."""
  source = arguments[-1]  # a list of one text, to be replaced

  def link(found):
    path = (PAGES / page).parent.joinpath(found[1]).resolve()
    if path.is_relative_to(PAGES) or path.suffix == ".png":
      return found[0]
    view = "tree" if path.is_dir() else "blob"
    return f"]({REPOSITORY}/{view}/{COMMIT}/{path.relative_to(PAGES.parent)}"

  source[0] = re.sub(r"\]\((\.\./[^)#\s]*)", link, source[0])


def names_together(app, what, name, value, options, lines):
  """Keeps the names of an entry ``a, b:`` together: Sphinx takes ``a,`` for a type."""
  for number, line in enumerate(lines):
    if field := re.match(r":(param|ivar) (.*?):", line):
      lines[number] = field[0].replace(", ", r",\ ") + line[field.end() :]


def lead_to_results(app, what, name, value, options, lines):
  """Leads references to types of results, and in their texts, to what they name."""
  paths = {path.split(".")[-1]: path for path in PATHS}
  if name.startswith("gradcomp._src."):
    for path, space in SPACES.items():
      paths |= {x: f"{path}.{x}" for x in space.__all__}
  lead = lambda x: f"{x[1]}`~{paths[x[2]]}`" if x[2] in paths else x[0]
  lines[:] = [re.sub(r"(:(?:class|func):)`(\w+)`", lead, line) for line in lines]


def skip_numbers(app, what, name, value, skip, options):
  """Skips fields of named tuples: the signature and the docstring explain them."""
  return skip or str(value.__doc__).startswith("Alias for field number")


def inline_formula(translator, node):
  """Writes a formula as MathML, which browsers show without scripts and fonts."""
  translator.body.append(latex2mathml.tex2mathml(node.astext()))
  raise nodes.SkipNode


def formula(translator, node):
  """Writes a formula that has a line of its own."""
  mathml = latex2mathml.tex2mathml(node.astext(), as_block=True)
  translator.body.append(f'<div class="formula">{mathml}</div>')
  raise nodes.SkipNode


def setup(app):
  app.connect("source-read", fill)
  app.connect("source-read", lead_out)
  app.connect("include-read", lead_out)
  app.connect("autodoc-process-docstring", names_together, priority=600)
  app.connect("autodoc-process-docstring", lead_to_results)
  app.connect("autodoc-skip-member", skip_numbers)
  app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
