"""Describes a state's configuration as JSON, and compares two descriptions."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from gradcomp._src.checkpoint.forms import FIRST, WHOLE, check_form
from gradcomp._src.checks import see
from gradcomp._src.core.specs import state_specs
from gradcomp._src.exchange.layout import leaf_codecs
from gradcomp._src.exchange.owners import owned_matrices
from gradcomp._src.exchange.plan import MessagePlan, own_axes
from gradcomp._src.mesh import platforms
from gradcomp._src.mesh.axes import WorkerSizes, sizes_of
from gradcomp._src.mesh.specs import is_spec
from gradcomp._src.report import tracing
from gradcomp._src.version import WIRE, __version__

# The version of states. It grows with every change after which a saved state would not
# go on with equal bits: of fields, shapes, orders, units, keys or defaults.
FORMAT = 1

_HOW = {"implementation"}  # fields of codecs that change no bits


def record(
  optimizer: optax.GradientTransformation,
  params: Any,
  *,
  workers: WorkerSizes,
  platform: str | None = None,
) -> dict[str, Any]:
  """Records the configuration of an optimizer state, to be saved beside it.

  With another codec or number of workers, the arrays of a state may have the same
  shapes, and mean something else. For each gradcomp transformation, the record has the
  leaves with their shapes and codecs, the feedback, and the owner residuals with their
  leaves and exchange. It has the platform, by which ``message_bytes="auto"`` cuts them.

  Args:
    optimizer: an optax transformation with gradcomp's in it.
    params: the parameters, or their ``jax.ShapeDtypeStruct``, whole.
    workers: the number of workers, or the sizes of axes: see :func:`gradcomp.explain`.
    platform: that of the workers, as for :func:`gradcomp.explain`.

  Returns:
    Dicts, lists, strings and numbers, for ``json.dump`` or Orbax's ``JsonSave``.

  Raises:
    ValueError: ``workers`` is no number of workers, or ``platform`` no platform.

  Example:
    >>> optimizer = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.1))
    >>> saved = record(optimizer, {"w": jnp.zeros((256, 256))}, workers=4)
    >>> saved["format"], saved["workers"]
    (1, [4])
    >>> (transformation,) = saved["transformations"]
    >>> transformation["leaves"], transformation["feedback"]
    ({"['w']": {'shape': [256, 256], 'codec': 0}}, {'type': 'NoFeedback'})
  """
  sizes, _ = sizes_of(workers)
  with platforms.planned_for(platform):
    trace, place = tracing.study(optimizer, params, workers), platforms.platform()
  kept = [made for made in trace.made if not made[1].get("stateless")]
  return {
    "format": FORMAT,
    "gradcomp": __version__,
    "wire": WIRE,
    "workers": list(sizes),
    "stacked": max(sizes) > 1 and _stacked(trace.state),
    "platform": place,
    "transformations": [_transformation(*made) for made in kept],
  }


def check_record(saved: Any, record: Mapping[str, Any]) -> None:
  """Raises an error if a saved state does not fit the optimizer of a new record.

  Call it before the state itself is restored. What gives arrays their meaning must be
  equal: the leaves, their shapes and codecs, and the feedback; the number of workers
  and the names of their axes, if workers have arrays of their own; and the leaves and
  the exchange of owner residuals, if there are any. ``implementation=``, ``dither=``
  and ``key=`` may differ (the state has its key), and so may ``exchange=`` and
  ``message_bytes=`` without owner residuals, ``min_leaf_size=`` if the same leaves are
  small, options of other transformations, like a learning rate, and the version of
  gradcomp with the same format of states.

  Args:
    saved: the result of :func:`record` when the state was saved.
    record: its result now.

  Raises:
    ValueError: something differs. The message names it, with both values.
    TypeError: ``saved`` is no such record, or a damaged one. The message has the place.

  Example:
    >>> def of(**options):
    ...   tx = gradcomp.qsgd(axis_name="data", **options)
    ...   return record(tx, {"w": jnp.zeros((256, 256))}, workers=4)
    >>> check_record(of(bits=4), of(bits=4, implementation="xla"))
    >>> check_record(of(bits=4), of(bits=8))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: `saved` must be the record of a state that this optimizer can go on
      with, but the codec of ['w'] was QSGD(bits=4) and is QSGD(bits=8). Make the...
  """
  check_form("saved", saved, FIRST)
  check_form("record", record, WHOLE)
  if saved["format"] != record["format"]:
    raise ValueError(
      f"`saved` must be of the format {record['format']}, which gradcomp "
      f"{record['gradcomp']} goes on with, got {saved['format']}, of gradcomp "
      f"{saved['gradcomp']}; go on with that version, or restore the parameters alone "
      "and begin with the state of optimizer.init."
    )
  check_form("saved", saved, WHOLE)
  found = list(_differences(saved, record))
  if found:
    told = ", ".join(f"{what} was {old} and is {new}" for what, old, new in found[:3])
    otherwise = "Make the transformation that the state was saved with"
    cure = _CURES.get(found[0][0], otherwise)
    more = f", and {len(found) - 3} more" if found[3:] else ""
    raise ValueError(
      "`saved` must be the record of a state that this optimizer can go on with, but "
      f"{told}{more}. {cure}, or restore the parameters alone and begin with "
      f"the state of optimizer.init.{see('a-state-that-this-optimizer-can-go-on-with')}"
    )


_WORKERS = "the number of workers"
_PLATFORM = "the platform that cut the messages"
_CURES = {
  _WORKERS: "Restore the state for as many workers, and take gradcomp.reshard_state",
  _PLATFORM: "Give the new record and gradcomp.checkpoint.state_shapes that platform=, "
  "and take gradcomp.reshard_state with it as old_platform=",
}


def _stacked(state: Any) -> bool:
  """Returns True if workers have arrays of their own, over axes that have names."""
  specs = state_specs(state, axis_name="workers")
  return any(
    spec != PartitionSpec() and tracing.UNNAMED[0] not in jax.tree_util.keystr(path)
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
  )


def _transformation(plan: MessagePlan, made: Mapping[str, Any]) -> dict[str, Any]:
  """Describes the state of a transformation, and its leaves."""
  codecs: list[dict[str, Any]] = []
  leaves = {}
  # Not bound to a number of workers, which the record has once.
  whole = [leaf._replace(addends=None, ranges=1) for leaf in plan.leaves]
  chosen = leaf_codecs(whole, made["codec"], min_leaf_size=made["min_leaf_size"])
  for name, leaf, codec in zip(plan.names, whole, map(_described, chosen), strict=True):
    if codec not in codecs:
      codecs.append(codec)
    leaves[name] = {"shape": list(leaf.shape), "codec": codecs.index(codec)}
  axes = own_axes(plan.axis_name, ())
  named = axes[:1] != tracing.UNNAMED[:1]  # else init cannot know the number of owners
  names = lambda exchange, numbers: {
    "exchange": _described(exchange),
    "leaves": [plan.names[i] for i in numbers],
  }
  result = {"axes": list(axes) if named else [], "codecs": codecs, "leaves": leaves}
  result["feedback"] = _described(made["feedback"])
  if "params" in made:  # zero, whose owners keep the rows of every message
    result["params"] = _described(made["params"])
    result["arrays"] = [names(x.exchange, x.leaves) for x in plan.messages]
  else:
    # Platforms may cut other messages, and owners keep the same arrays nevertheless.
    matrices = itertools.chain(*owned_matrices(plan).values()) if named else ()
    of_array = lambda x: names(x.message.exchange, [i for i, *_ in x.leaves()])
    result["arrays"] = list(map(of_array, matrices))
  if made.get("delay"):  # of local steps, which keep a mean until it is applied
    result["delay"] = made["delay"]
  return result


def _described(option: Any) -> dict[str, Any]:
  """Describes an option, which is a dataclass, by its type and fields."""
  names = [x.name for x in dataclasses.fields(option) if x.name not in _HOW]
  values = {name: _plain(getattr(option, name)) for name in names}
  return {"type": type(option).__name__, **values}


def _plain(value: Any) -> Any:
  """Returns a value in the form that JSON restores."""
  if isinstance(value, tuple | list):
    return [_plain(x) for x in value]
  if dataclasses.is_dataclass(value):
    return _described(value)
  return value if isinstance(value, int | float | str | None) else str(value)


def _differences(saved: Any, record: Any) -> Iterator[tuple[str, Any, Any]]:
  """Yields differences, with both values; the first is the cause of the others."""
  stacked = saved["stacked"] or record["stacked"]
  if stacked and saved["workers"] != record["workers"]:
    was, now = (" x ".join(map(str, x["workers"])) for x in (saved, record))
    yield _WORKERS, was, now
  old, new = saved["transformations"], record["transformations"]
  places = [x["platform"] for x in (saved, record)]
  owned = [[y["arrays"] for y in x] for x in (old, new)]
  if places[0] != places[1] and owned[0] != owned[1]:
    yield _PLATFORM, *places
  if len(old) != len(new):
    yield "the number of gradcomp transformations", len(old), len(new)
    return
  for number, pair in enumerate(zip(old, new, strict=True)):
    where = f" of transformation {number}" if len(old) > 1 else ""
    lacking = zip(pair, pair[::-1], strict=True)
    lists = [[x for x in a["leaves"] if x not in b["leaves"]] for a, b in lacking]
    if any(lists):
      was, now = (f"one with {_listed(x)}" if x else "one without" for x in lists)
      yield "the list of leaves" + where, was, now
    facts, others = (_facts(made, stacked) for made in pair)
    for what, was in facts.items():
      now = others.get(what, was)
      if isinstance(was, dict):
        was, now = _in_common(was, now)
      if was != now:
        yield what + where, _text(was), _text(now)


def _facts(made: Mapping[str, Any], stacked: bool) -> dict[str, Any]:
  """Names the facts that give the arrays of a transformation their meaning."""
  leaves, codecs, owned = made["leaves"], made["codecs"], made["arrays"]
  facts: dict[str, Any] = {
    **{f"the shape of {x}": str([*kept["shape"]]) for x, kept in leaves.items()},
    **{f"the codec of {x}": codecs[kept["codec"]] for x, kept in leaves.items()},
    "the feedback": made["feedback"],
    "the codec of parameters": made.get("params", {"type": "none"}),
    "the delay": made.get("delay", 0),
    "what the owners of messages keep a part of": [x["leaves"] for x in owned],
  }
  if stacked:
    facts["the axis of workers"] = str([*made["axes"]])
  for i, message in enumerate(owned):
    what = f"the exchange of message {i}, of {_listed(message['leaves'])}"
    facts[what] = message["exchange"]
  return facts


def _text(value: Any) -> str:
  """Returns a value for an error, with the first of many leaves of messages."""
  nested = isinstance(value, list)
  return ("; ".join(map(_listed, value)) or "nothing") if nested else str(value)


def _in_common(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, str]:
  """Returns the texts of two options, of fields that both have and that differ."""
  # A field that only one version has must have a default that changes nothing.
  differ = [x for x in old if x in new and old[x] != new[x]]
  if "type" in differ:
    return old["type"], new["type"]
  of = lambda y: f"{old['type']}({', '.join(f'{x}={y[x]!r}' for x in differ)})"
  return of(old), of(new)


def _listed(names: list[str]) -> str:
  return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
