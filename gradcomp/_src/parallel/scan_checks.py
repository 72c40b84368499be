"""The options, plans and maps that a scan over layers refuses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from gradcomp._src.codecs.protocol import LeafCodec, is_codec, require_contraction
from gradcomp._src.core import codec_memory
from gradcomp._src.core.compression import Compression
from gradcomp._src.core.feedback import ErrorFeedback, NoFeedback
from gradcomp._src.core.state import Kept
from gradcomp._src.core.step import by_fallbacks
from gradcomp._src.exchange.auto import as_exchange
from gradcomp._src.exchange.plan import MessagePlan
from gradcomp._src.kernels.common import threefry
from gradcomp._src.mesh import closures, specs, trees, types
from gradcomp._src.mesh.axes import AxisName, axis_names, manual_axes

NO_SHARDS = (
  "where each worker has whole layers, got {}; say by axis=0 along which axis of a "
  "layer its arrays are sharded."
)
NOTHING_GATHERED = (
  "with `whole`, of which nothing is gathered, got {}; encode the layers where you "
  "gather them, by gradcomp.parallel.all_gather."
)
FIRST_OF_WHOLE = (
  "start with gradcomp.parallel.compress_in_scan(...).init(layers).residual of the "
  'same options, with feedback="error".'
)
FIRST_OF_SHARDS = (
  "start with gradcomp.parallel.gather_residual of each array, with axis=axis + 1."
)


def layer_options(
  axis_name: AxisName, codec: Any, exchange: Any, *, keeps: bool
) -> Compression:
  """Returns the options of the exchange of a whole layer; an error for bad ones."""
  if not is_codec(codec):
    raise TypeError(
      f"`codec` must be a codec of gradcomp.codecs, got {codec!r}; "
      "gradcomp.codecs.Dense() sends float32."
    )
  if not keeps and (codec.facts.needs_feedback or codec.facts.drops):
    raise ValueError(
      "`codec` must send every element, and work without error feedback, where "
      f"`residual` is None, got {codec}; {FIRST_OF_WHOLE}"
    )
  if keeps:
    require_contraction("codec", codec, "`residual=None`")
  way = as_exchange(exchange)
  if not way.sends:
    raise ValueError(
      "`exchange` must send gradients, or there is nothing to hide, got "
      f"{way.name!r}; use lax.scan, and gradcomp.compress behind it."
    )
  feedback = ErrorFeedback() if keeps else NoFeedback()
  return Compression(codec, axis_name, way, feedback, None, None, 0, "shared")


def check_plan(plan: MessagePlan, codec: LeafCodec) -> None:
  """Raises ValueError for codecs that need more than one message of one step."""
  remembers = codec_memory.first_stored(plan, jnp.zeros(2, jnp.uint32)) is not None
  if remembers:
    raise ValueError(
      "`codec` must be without a memory, which nothing here carries from step to step, "
      f"got {codec}; choose another, or exchange the gradients of all layers behind "
      "the loop, by gradcomp.compress."
    )
  if by_fallbacks(plan) != plan:
    raise ValueError(
      "`codec` must send any numbers at once, because a scan sends no layer again, got "
      f"{codec}; choose Dense(dtype=jnp.bfloat16), or exchange the gradients of all "
      "layers behind the loop, by gradcomp.compress."
    )


def checked_key(codec: LeafCodec, key: jax.Array | None) -> jax.Array | None:
  """Returns ``uint32[2]``, or None without a key; ValueError if it is missing."""
  if codec.needs_key and key is None:
    raise ValueError(
      f"`key` must be given for {codec}, which draws random numbers: pass a "
      "jax.random.key that all workers share, another one for each step."
    )
  return None if key is None else threefry.key_words(key)


def check_none(rule: str, **given: Any) -> None:
  """Raises ValueError for options that have no meaning here."""
  for name, value in given.items():
    if value is not None:
      raise ValueError(f"`{name}` must be None {rule.format(repr(value))}")


def check_shards(back: Any, way: Any, axis_name: AxisName, inner: Any) -> None:
  """Raises ValueError for options with which shards are not sent."""
  if by_fallbacks(back) != back:
    raise ValueError(
      "`codec` must send any numbers at once, because a scan sends no gradient again, "
      f"got {back}; choose Dense(dtype=jnp.bfloat16)."
    )
  if way != "auto":
    raise ValueError(
      "`exchange` must be left out for layers in shards, whose gradients go to their "
      f"owners, got {way!r}; leave out axis= where each worker has whole layers."
    )
  every, names = axis_names(axis_name), inner if isinstance(inner, tuple) else (inner,)
  known = all(x in every for x in names) and len(set(names)) == len(names)
  if inner is not None and not (known and 0 < len(names) < len(every)):
    raise ValueError(
      f"`backward_axis_name` must be some of the axes {every} of `axis_name`, and not "
      f"all, got {inner!r}; name those along which the workers of one host differ, or "
      "leave it out, to gather from all workers in the backward pass, too."
    )


def first_layer(name: str, layers: Any, axis_name: AxisName) -> tuple[int, Any]:
  """Returns the number of layers, and one, typed as differing between workers."""
  leaves = jax.tree.leaves(layers)
  lengths = {x.shape[0] if x.ndim else 0 for x in leaves}
  if len(lengths) != 1 or not max(lengths):
    raise ValueError(
      f"`{name}` must stack one layer or more on the first axis, the same number in "
      f"each array, got {sorted(lengths)}; stack them by jnp.stack, and leave the scan "
      "out where there are no layers."
    )
  if not any(map(trees.is_trainable, leaves)) or any(map(jnp.iscomplexobj, leaves)):
    raise TypeError(
      f"`{name}` must have arrays of real floats, and none of complex ones, got "
      f"{sorted({str(x.dtype) for x in leaves})}."
    )
  layer = jax.tree.map(lambda x: x[0], layers)
  return max(lengths), types.mark_varying(layer, axis_name)


def first_whole(layers: Any, shards: Any, like: Any, axis_name: AxisName) -> Any:
  """Returns the first of whole layers; ValueError if they do not fit the shards."""
  _, first = first_layer("whole", layers, axis_name)
  mine, of_shards = map(trees.trainable, (layers, shards))
  length = len(jax.tree.leaves(of_shards)[0])
  want = [(length, *x.shape) for x in jax.tree.leaves(trees.trainable(like))]
  got = [x.shape for x in jax.tree.leaves(mine)]
  structure: Any = jax.tree.structure
  if structure(mine) != structure(of_shards) or got != want:
    raise ValueError(
      f"`whole` must be a tree like `layers`, with floats of the shapes {want}, got "
      f"{got}; gather each array by gradcomp.parallel.all_gather, with axis=axis + 1."
    )
  return first


def check_equal(layers: Any, axis_name: AxisName) -> None:
  """Raises ValueError for layers that are typed as differing between workers."""
  names = set(axis_names(axis_name))
  for x in jax.tree.leaves(trees.trainable(layers)):
    if own := names & types.varying_axes(x):
      raise ValueError(
        "`layers` must be typed as equal on all workers, or compress would exchange "
        f"their means once more, got {jax.typeof(x).str_short(True)}, which differs "
        f"over {sorted(own)}; leave them out of gradcomp.defer_reduction and "
        "gradcomp.value_and_grad, and take their gradient by jax.grad."
      )


def check_residual(residual: Any, first: Kept, length: int, cure: str) -> None:
  """Raises ValueError for a residual that cannot get the new one as its cotangent."""
  want, got = jax.tree.leaves(first), jax.tree.leaves(residual)
  shapes = [(length, *x.shape) for x in want]
  same = jax.tree.structure(residual) == jax.tree.structure(first)  # type: ignore
  floats = all(x.dtype == jnp.float32 for x in got)
  if not same or not floats or [x.shape for x in got] != shapes:
    raise ValueError(
      f"`residual` must have float32 arrays of the shapes {shapes} here, got "
      f"{[jax.typeof(x).str_short() for x in got]}; {cure}"
    )
  for x, y in zip(got, want, strict=True):
    if missing := types.varying_axes(y) - types.varying_axes(x):
      raise ValueError(
        f"`residual` must differ between the workers of {sorted(missing)}, or JAX adds "
        "up what they keep, got an array that is typed as equal on all of them; "
        f"{cure} Pass it with in_specs=P(axes)."
      )


def of_parts(
  scan: Callable[..., tuple[Any, Any]],
  body: Any,
  carry: Any,
  given: Any,
  axis_name: Any,
) -> tuple[Any, Any]:
  """Maps ``scan(body, carry, given)`` over workers; ``ys`` are [L, all rows, ...].

  The arrays of functions among these trees must be leaves, too.
  """
  names = axis_names(axis_name)
  found = map(types.typed_spec, jax.tree.leaves(carry))
  if not frozenset[str]().union(*map(specs.sharded_axes, found)).issuperset(names):
    raise ValueError(
      f"`carry` must have an array that is sharded over {axis_name!r}, or every worker "
      f"would compute the same, got {jax.tree.map(jax.typeof, carry)}; put the batch "
      "there: jax.device_put(batch, jax.NamedSharding(mesh, jax.P(axis_name)))."
    )
  for x in jax.tree.leaves(given.layers):
    spec = types.typed_spec(x)
    if any(specs.entries(spec)) or spec.reduced or spec.unreduced:
      raise ValueError(
        "`layers` must be typed as whole on each device in plain jax.jit, got "
        f"{jax.typeof(x).str_short(True)}; give it layers without "
        "gradcomp.defer_reduction, or call it, for shards over the workers with axis=, "
        "in a jax.shard_map over all axes of the mesh."
      )
  arrays, with_arrays = closures.arrays_of((body, carry, given))
  mesh = types.mesh_of(arrays)
  own_spec = lambda x: specs.restrict_spec(types.typed_spec(x), names)

  def own(*own: jax.Array) -> tuple[Any, Any]:
    body, carry, given = with_arrays(own)
    body = closures.with_note(body, closures.OF_BODY, mesh, names)
    carry, ys = scan(body, carry, given)
    return carry, types.mark_varying(jax.tree.map(_with_rows, ys), axis_name)

  return jax.shard_map(
    own,
    mesh=None if manual_axes() else mesh,
    in_specs=tuple(map(own_spec, arrays)),
    out_specs=(jax.tree.map(own_spec, carry), PartitionSpec(None, axis_name)),
    axis_names=set(names),
  )(*arrays)


def _with_rows(y: jax.Array) -> jax.Array:
  """Returns an output of layers, ``[L, rows, ...]``; ValueError if it has no rows."""
  if jnp.ndim(y) > 1:
    return y
  raise ValueError(
    "`body` must return outputs y with a first axis in plain jax.jit, where those of "
    f"all workers are joined, got {jax.typeof(y[0]).str_short()}; return y[None]."
  )


def not_of_examples(carry: Any, layers: Any, axis_name: AxisName) -> Any:
  """Returns the carry; ValueError under ``jax.vmap`` over it, and not over layers."""
  # The workers may be those of a jax.vmap. Then it numbers them.
  workers = [lax.axis_index(name) for name in axis_names(axis_name)]
  return _checked(carry, layers, workers)


@jax.custom_batching.custom_vmap
def _checked(carry: Any, layers: Any, workers: list[jax.Array]) -> Any:
  return carry


@_checked.def_vmap
def _batched(size: int, is_batched: Any, *given: Any) -> tuple[Any, Any]:
  del size
  of_carry, *others = is_batched
  if any(jax.tree.leaves(of_carry)) and not any(jax.tree.leaves(others)):
    raise ValueError(
      "`scan` must not be inside of jax.vmap over examples, each of which would be "
      "exchanged by itself, and take the residual once more; put jax.vmap inside of "
      "`body`, or map over layers, too, to train several models."
    )
  return _checked(*given), of_carry
