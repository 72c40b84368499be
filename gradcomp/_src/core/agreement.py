"""Comparison of transformations between processes, before the first step runs.

Two processes with different codecs or leaves would decode each other's words to wrong
numbers. Two that count the steps of a round differently would wait for ever.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
import optax

from gradcomp._src.checks import see
from gradcomp._src.mesh import run_store
from gradcomp._src.mesh.axes import AxisName, axis_names
from gradcomp._src.mesh.run_store import is_alone, named, processes_of
from gradcomp._src.mesh.types import mesh_of
from gradcomp._src.version import WIRE, __version__

Part = dict[str, str]  # one transformation: its options and leaves, by their names
Record = Sequence[Part]

# The digests that this process and those of a mesh have agreed on, in their order.
_agreed: dict[tuple[int, tuple[int, ...]], list[str]] = {}

# The parts of the record of the step that is being traced.
_open: ContextVar[list[Part] | None] = ContextVar("_open", default=None)


def require_agreement(
  what: str,
  options: Mapping[str, Any],
  leaves: Any,
  axes: AxisName | None = None,
  **trees: Any,
) -> None:
  """Raises ValueError if another process traces another transformation in this place.

  ``options`` come from ``locals()`` at the first line of a public function, or from
  ``vars`` of a dataclass: a list of names would lack the next option.

  In :func:`one_record` it adds to the record. Elsewhere it compares a record of its
  own, if the mesh has all devices of the run: only then are all processes known.
  """
  if is_alone():
    return
  parts = _open.get()
  mesh = mesh_of(leaves)
  names = () if axes is None else axis_names(axes)
  sizes = {"axes": {name: mesh.shape.get(name) for name in names}}
  part = _part(what, {**sizes, **options}, leaves=leaves, **trees)
  if parts is not None:
    parts.append(part)
  elif set(names).issubset(mesh.axis_names):
    _compare([part], processes_of(mesh))


@contextlib.contextmanager
def one_record(
  mesh: Any, what: str, options: Mapping[str, Any], trees: Mapping[str, Any]
) -> Iterator[list[Part]]:
  """Compares all transformations that are traced in the body as one record.

  It yields the parts so far, which a body that traces again clears. The body may add to
  ``trees``. If it fails, the other processes read the error.
  """
  processes = () if is_alone() else processes_of(mesh)
  parts: list[Part] = []
  token = _open.set(parts)
  try:
    yield parts
  except Exception as error:
    if processes:
      agreed = _agreed.setdefault((jax.process_index(), processes), [])
      said = f"{type(error).__name__}: {error}"[:500]
      run_store.publish(f"{_folder(processes, [{'failed': said}])}digest/", "failed")
      agreed.append("no agreement")  # so that all go on to the next record
    raise
  finally:
    _open.reset(token)
  if processes:
    _compare([*parts, _part(what, options, **trees)], processes)


def _part(what: str, options: Mapping[str, Any], **trees: Any) -> Part:
  """Describes a transformation in words: options and leaves first, then its states."""
  leaves = _listed("leaves", trees.pop("leaves", None))
  told = {x: _words(y) for x, y in options.items() if not _is_told_elsewhere(y)}
  part = {"transformation": what, "gradcomp": __version__, "WIRE": str(WIRE)}
  part |= leaves | told
  # States come last, because other leaves or options are the cause of other states.
  for name, tree in trees.items():
    part |= _listed(name, tree)
  return part


def _words(value: Any) -> str:
  """Describes an option in words, with all elements of arrays."""
  with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
    # Addresses differ between processes.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _is_told_elsewhere(value: Any) -> bool:
  """Returns True for numbers of the state, and for optimizers, which show theirs."""
  if isinstance(value, jax.core.Tracer | optax.GradientTransformation):
    return True
  several = isinstance(value, list | tuple) and bool(value)
  return several and all(map(_is_told_elsewhere, value))


def _listed(name: str, tree: Any) -> Part:
  """Describes the leaves of a tree in words, with their paths."""
  # Empty nodes are listed too: they distinguish chains of stateless transformations.
  is_empty = lambda x: isinstance(x, tuple) and not x
  result = {}
  nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_empty)
  for i, (path, x) in enumerate(nodes):
    kind = getattr(x, "dtype", type(x).__name__)
    size = "" if is_empty(x) else list(np.shape(x))
    result[f"{name}[{i}]"] = f"{jax.tree_util.keystr(path)} {kind}{size}"
  return result


def _compare(record: Record, processes: tuple[int, ...]) -> None:
  """Blocks until all processes have this n-th record; ValueError if one does not."""
  if not processes:
    return
  own = jax.process_index()
  agreed = _agreed.setdefault((own, processes), [])
  digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()[:32]
  if digest in agreed:  # traced before
    return
  folder, what = _folder(processes, record), record[0]["transformation"]
  given = f"{folder}digest/", digest, processes, f"`{what}` must be traced"
  found = run_store.meet(*given, alike=True)
  other = next((x for x in processes if found.get(x, digest) != digest), None)
  if other is None:
    agreed.append(digest)
    return
  agreed.append("no agreement")  # nobody has agreed: all go on to the next one
  store = run_store.run_store()
  text = store.blocking_key_value_get(f"{folder}text/{other}", 10_000)
  theirs = json.loads(zlib.decompress(base64.b64decode(text)))
  raise _difference(record, theirs, found, own, other)


def _folder(processes: tuple[int, ...], record: Record) -> str:
  """Returns the folder of the next record of some processes, and writes it there.

  Others read it if their digests differ.
  """
  group = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
  folder = f"gradcomp/{group}/{len(_agreed[jax.process_index(), processes])}/"
  text = base64.b64encode(zlib.compress(json.dumps(record).encode())).decode()
  run_store.publish(f"{folder}text/", text)
  return folder


def _difference(
  own: Record, theirs: Record, found: Mapping[int, str], process: int, other: int
) -> ValueError:
  """Returns the error that names the first difference of two records."""
  if "failed" in theirs[0]:
    return ValueError(
      f"`{own[0]['transformation']}` must be traced by all processes, but process "
      f"{other} failed: {theirs[0]['failed']}"
    )
  none: Part = {}
  pairs = enumerate(itertools.zip_longest(own, theirs, fillvalue=none), 1)
  number, name, mine, those = next(
    (number, name, a.get(name, "nothing"), b.get(name, "nothing"))
    for number, (a, b) in pairs
    for name in {**a, **b}
    if a.get(name) != b.get(name)
  )
  same = [[x for x in found if found[x] == found[y]] for y in (process, other)]
  what = (list(own) + list(theirs[len(own) :]))[number - 1]["transformation"]
  place = f"number {number} of the step, {what}" if len(own) > 1 else what
  return ValueError(
    f"`{name}` must be the same in all processes, which read each other's codes, got "
    f"{mine} in {named(same[0])} and {those} in {named(same[1])}, in {place}; start "
    "all processes with the same program, options and version of gradcomp."
    f"{see('must-be-the-same-in-all-processes')}"
  )
