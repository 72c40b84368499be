"""The site: ``make docs`` builds it from the pages and the docstrings, offline."""

import inspect
import os
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
MAP = PAGES / "README.md"
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
# Of index.myst, whose directives are no language of a page of the repository.
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".myst": "myst-nb"}
exclude_patterns = ["_build", "README.md"]  # index.myst includes the latter
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
html_theme_options = {
  "repository_url": REPOSITORY,
  "use_repository_button": True,
  "navbar_persistent": [],  # its search button has another name than its label
  "max_navbar_depth": 1,  # what opens deeper levels has no name for a screen reader
}
html_sidebars = {"**": ["top.html", "sbt-sidebar-nav.html"]}
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


def results(value, shown):
  """Returns the paths of types of results, without a public name, that no page shows.

  A function returns these, and fields of a class or of the ones before hold these.
  """
  found, todo = [], [value]
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
RESULTS = {
  f"{path}.{name}": results(getattr(space, name), PATHS)
  for path, space in SPACES.items()
  for name in space.__all__
}
autosummary_context = {"namespaces": list(NAMESPACES), "results": RESULTS}
for name, space in NAMESPACES.items():
  sys.modules[name] = space  # autodoc imports it by its path, which may be an attribute
  publish(vars(space) | {"__name__": name})  # coverage counts what is at home there


def fill(app, page, source):
  """Puts tables of the records behind the marks of a page."""
  source[0] = records.filled(source[0], records.TABLES | study.TABLES)


def lead(text, start, end):
  """Returns a text that moves to another folder: its links out of docs/ leave the site.

  They lead into the repository.
  """

  def link(found):
    path = start.joinpath(found[1]).resolve()
    if path == MAP:
      return "](#all-pages"
    if path.is_relative_to(PAGES) or path.suffix == ".png":
      return f"]({os.path.relpath(path, end)}"
    view = "tree" if path.is_dir() else "blob"
    return f"]({REPOSITORY}/{view}/{COMMIT}/{path.relative_to(PAGES.parent)}"

  return re.sub(r"\]\((?!\w+:)([^)#\s]+)", link, text)


def lead_out(app, page, source):
  """Leads the links of a page to files outside of docs/ to the repository."""
  folder = (PAGES / page).parent
  source[0] = lead(source[0], folder, folder)


def lead_in(app, file, page, source):
  """Leads the links of the front page, which the start page includes, to the site."""
  source[0] = lead(source[0], (PAGES / file).parent, PAGES)


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


def show_types(app, value, bound):
  """Puts types of shared options into a signature; the help is shorter without them."""
  signature = vars(value).get("__signature__") if inspect.isfunction(value) else None
  hints = typing.get_type_hints(value) if signature else {}
  for options in hints.values():
    if typing.get_origin(options) is typing.Unpack:
      hints = typing.get_type_hints(typing.get_args(options)[0]) | hints
  typed = lambda x: x.replace(annotation=hints.get(x.name, x.annotation))
  if signature:
    shown = map(typed, signature.parameters.values())
    value.__signature__ = signature.replace(parameters=[*shown])


def name_classes(app, what, name, value, options, signature, returned):
  """Names a class that is a default as code does: Sphinx cannot read its ``repr``."""
  return signature and re.sub(r"<class '([\w.]+)'>", r"\1", signature), returned


PARAMETERS = r'<dl>\n((?:<dd><em class="sig-param">.*</dd>\n)+)</dl>'


def mend(app, page, template, context, tree):
  """Makes lines of a signature a list, and an empty header of a table an empty cell.

  Screen readers miss terms of a list of definitions, and texts of headers.
  """
  item = lambda x: x.replace("<dd>", "<li>").replace("</dd>", "</li>")
  lines = lambda found: f"<ul>\n{item(found[1])}</ul>"
  body = re.sub(PARAMETERS, lines, context.get("body", ""))
  context["body"] = body.replace('<th class="head"><p></p></th>', "<td></td>")


def inline_formula(translator, node):
  """Writes a formula as MathML, which browsers show without scripts and fonts."""
  translator.body.append(latex2mathml.tex2mathml(node.astext()))
  raise nodes.SkipNode


def formula(translator, node):
  """Writes a formula that has a line of its own, and scrolls by keys where it must."""
  mathml = latex2mathml.tex2mathml(node.astext(), as_block=True)
  translator.body.append(f'<div class="formula" tabindex="0">{mathml}</div>')
  raise nodes.SkipNode


def setup(app):
  app.connect("source-read", fill)
  app.connect("source-read", lead_out)
  app.connect("include-read", lead_in)
  app.connect("autodoc-before-process-signature", show_types)
  app.connect("autodoc-process-signature", name_classes)
  app.connect("autodoc-process-docstring", names_together, priority=600)
  app.connect("autodoc-process-docstring", lead_to_results)
  app.connect("autodoc-skip-member", skip_numbers)
  app.connect("html-page-context", mend)
  app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
