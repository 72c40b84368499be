"""Describes a state's configuration as JSON, and compares two descriptions."""

import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from gradcomp._src.checks import see
from gradcomp._src.core.specs import state_specs
from gradcomp._src.exchange.layout import leaf_codecs
from gradcomp._src.exchange.plan import MessagePlan, own_axes, owned_matrices
from gradcomp._src.mesh import study
from gradcomp._src.mesh.axes import WorkerSizes, is_spec, sizes_of
from gradcomp._src.report import tracing
from gradcomp._src.version import __version__

# The version of states. It grows with every change after which a saved state would not
# go on with equal bits: of fields, shapes, orders, units, keys or defaults.
FORMAT = 1

_HOW = re.compile(r"(, )?\bimplementation=[^,)]*")  # it changes no bits

# The types of a record's parts.
_FORM = dict(format=int, workers=list, stacked=bool, platform=str, transformations=list)
_WORKERS = "the number of workers"
_PLATFORM = "the platform that cut the messages"
_CURES = {
  _WORKERS: "Restore the state for as many workers, and take gradcomp.reshard_state",
  _PLATFORM: "Give the new record and gradcomp.checkpoint.state_shapes that platform=, "
  "and take gradcomp.reshard_state with it as old_platform=",
}
_ANEW = "restore the parameters alone and begin with the state of optimizer.init"
# Facts of a transformation.
_AXIS = "the axis of workers"
_OWNED = "what the owners of messages keep a part of"


def make_record(
  optimizer: optax.GradientTransformation,
  params: Any,
  *,
  workers: WorkerSizes,
  platform: str | None = None,
) -> dict[str, Any]:
  """Returns the configuration of an optimizer state, to be saved beside it as JSON.

  With another codec or number of workers, the arrays of a state may have the same
  shapes, and mean something else. For each gradcomp transformation, the record has the
  shapes and codecs of leaves, the feedback, and the leaves and exchange of owner
  residuals, as texts. It fits into Orbax's ``custom_metadata=``. It has the platform,
  by which ``message_bytes="auto"`` cuts messages.

  Args:
    optimizer, params, workers, platform: as for :func:`gradcomp.explain`.

  Raises:
    ValueError: ``workers`` is no number of workers, or ``platform`` no platform.

  Example:
    >>> optimizer = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.1))
    >>> saved = make_record(optimizer, {"w": jnp.zeros((256, 256))}, workers=4)
    >>> (facts,) = saved["transformations"]
    >>> saved["format"], saved["workers"], facts["the shape of ['w']"]
    (1, [4], '[256, 256]')
    >>> facts["the feedback"]
    'NoFeedback()'
  """
  sizes, _ = sizes_of(workers)
  with study.planned_for(platform):
    trace, place = tracing.study(optimizer, params, workers), study.platform()
  specs = state_specs(trace.state, axis_name="workers")
  stacked = any(  # whether workers have arrays of their own, over axes that have names
    spec != PartitionSpec() and tracing.UNNAMED[0] not in jax.tree_util.keystr(path)
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
  )
  return {
    "format": FORMAT,
    "gradcomp": __version__,
    "workers": list(sizes),
    "stacked": max(sizes) > 1 and stacked,
    "platform": place,
    "transformations": [_facts(*x) for x in trace.made if not x[1].get("stateless")],
  }


def check_record(saved: Any, record: Mapping[str, Any]) -> None:
  """Raises an error if a saved state does not fit the optimizer of a new record.

  Call it before a state is restored. Equal must be: the leaves, their shapes and
  codecs, and the feedback; the number of workers and the names of their axes, if
  workers have arrays of their own; and the leaves and the exchange of owner residuals.
  ``implementation=``, ``dither=``, ``key=`` and other transformations may differ; so
  may ``exchange=`` and ``message_bytes=`` without owner residuals, and
  ``min_leaf_size=`` if the same leaves are small.

  Args:
    saved: the result of :func:`make_record` when the state was saved.
    record: its result now.

  Raises:
    ValueError: something differs. The message names it, with both values.
    TypeError: ``saved`` is no such record.

  Example:
    >>> def of(**options):
    ...   tx = gradcomp.qsgd(axis_name="data", **options)
    ...   return make_record(tx, {"w": jnp.zeros((256, 256))}, workers=4)
    >>> check_record(of(bits=4), of(bits=4, implementation="xla"))
    >>> check_record(of(bits=4), of(bits=8))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: `saved` must be the record of a state that this optimizer can go on
      with, but the codec of ['w'] was QSGD(bits=4) and is QSGD(bits=8). Make the...
  """
  for name, value in (("record", record), ("saved", saved)):
    parts: Any = value if isinstance(value, Mapping) else {}
    version = parts.get("format")
    if isinstance(version, int) and version != FORMAT:
      raise ValueError(
        f"`{name}` must be of the format {FORMAT}, which gradcomp {__version__} goes "
        f"on with, got {version}, of gradcomp {parts.get('gradcomp')}; go on with that "
        f"version, or {_ANEW}."
      )
    wrong = [x for x, kind in _FORM.items() if not isinstance(parts.get(x), kind)]
    if wrong or not all(isinstance(x, Mapping) for x in parts["transformations"]):
      part = [*wrong, "transformations"][0]
      raise TypeError(
        f"`{name}` must be what gradcomp.checkpoint.make_record returned, but its "
        f"{part!r} is {parts.get(part)!r}; save it beside the state, or {_ANEW}."
      )
  if found := _differences(saved, record):
    told = ", ".join(f"{what} was {old} and is {new}" for what, old, new in found[:3])
    more = f", and {len(found) - 3} more" if found[3:] else ""
    cure = _CURES.get(
      found[0][0], "Make the transformation that the state was saved with"
    )
    raise ValueError(
      "`saved` must be the record of a state that this optimizer can go on with, but "
      f"{told}{more}. {cure}, or {_ANEW}."
      f"{see('a-state-that-this-optimizer-can-go-on-with')}"
    )


def _facts(plan: MessagePlan, made: Mapping[str, Any]) -> dict[str, str]:
  """Names the facts that give the arrays of a transformation their meaning."""
  facts: dict[str, str] = {}
  # Not bound to a number of workers, which the record has once.
  whole = [leaf._replace(addends=None, ranges=1) for leaf in plan.leaves]
  codecs = leaf_codecs(whole, made["codec"], min_leaf_size=made["min_leaf_size"])
  for name, leaf, codec in zip(plan.names, whole, codecs, strict=True):
    facts[f"the shape of {name}"] = str([*leaf.shape])
    facts[f"the codec of {name}"] = _text(codec)
  facts["the feedback"] = _text(made["feedback"])
  axes = own_axes(plan.axis_name, ())
  named = axes[:1] != tracing.UNNAMED[:1]  # else init cannot know the number of owners
  owned: list[tuple[Any, Any]]
  if "params" in made:  # zero, whose owners keep the rows of every message
    facts["the codec of parameters"] = _text(made["params"])
    owned = [(x.exchange, x.leaves) for x in plan.messages]
  else:
    # Platforms may cut other messages, and owners keep the same arrays nevertheless.
    matrices = itertools.chain(*owned_matrices(plan).values()) if named else ()
    owned = [(x.message.exchange, [i for i, *_ in x.leaves()]) for x in matrices]
  names = [", ".join(plan.names[i] for i in leaves) for _, leaves in owned]
  facts["the delay"] = str(made.get("delay") or 0)  # of a mean, in local steps
  facts |= {_OWNED: "; ".join(names), _AXIS: str([*axes] if named else [])}
  exchanges = enumerate(_text(exchange) for exchange, _ in owned)
  return facts | {f"the exchange of message {i}": x for i, x in exchanges}


def _text(option: Any) -> str:
  """Returns the text of an option, without fields that change no bits."""
  text = _HOW.sub("", repr(option)).replace("(, ", "(")
  return re.sub(r"\bdtype\('?(\w+)'?\)", r"'\1'", text)


def _differences(saved: Any, record: Any) -> list[tuple[str, Any, Any]]:
  """Returns differences, with both values; the first is the cause of the others."""
  found = []
  stacked = saved["stacked"] or record["stacked"]
  if stacked and saved["workers"] != record["workers"]:
    was, now = (" x ".join(map(str, x["workers"])) for x in (saved, record))
    found.append((_WORKERS, was, now))
  old, new = saved["transformations"], record["transformations"]
  owned = [[facts.get(_OWNED) for facts in each] for each in (old, new)]
  if saved["platform"] != record["platform"] and owned[0] != owned[1]:
    found.append((_PLATFORM, saved["platform"], record["platform"]))
  if len(old) != len(new):
    return [*found, ("the number of gradcomp transformations", len(old), len(new))]
  for number, (was, now) in enumerate(zip(old, new, strict=True)):
    where = f" of transformation {number}" if len(old) > 1 else ""
    for x in {**was, **now}:
      if was.get(x) != now.get(x) and (stacked or x != _AXIS):
        found.append((x + where, *_shown(was.get(x), now.get(x))))
    if not found and [*was] != [*now]:
      found.append((f"the order of leaves{where}", *_shown([*was], [*now])))
  return found


def _shown(old: Any, new: Any) -> tuple[str, str]:
  """Returns the texts of two values, of options of one type those that differ."""
  texts = [str(x or "nothing") for x in (old, new)]
  if match := re.fullmatch(r"(\w+)\((.*)\)\n(\w+)\((.*)\)", "\n".join(texts)):
    kind, was, other, now = match.groups()
    fields = zip(was.split(", "), now.split(", "), strict=False)
    differ = zip(*(pair for pair in fields if pair[0] != pair[1]), strict=True)
    if kind != other:
      texts = [kind, other]
    elif not re.search(r"[(\[]", was + now):
      texts = [f"{kind}({', '.join(x)})" for x in differ] or texts
  was, now = (x if len(x) <= 300 else f"{x[:300]}..." for x in texts)
  return was, now
