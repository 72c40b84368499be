"""The loop over layers. Its backward pass exchanges gradients while it computes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.core.state import Kept
from gradcomp._src.kernels.common import threefry
from gradcomp._src.mesh import axes, closures, trees, types
from gradcomp._src.parallel import options


class Given(NamedTuple):
  """The arrays that a scan takes beside the carry, or their cotangents so far."""

  closed: Any  # over which the body closes
  layers: Any
  kept: Kept | None  # the residual of all layers, stacked
  key: Any  # uint32[2]; a cotangent is None
  whole: Any = None  # what is read in place of layers; a cotangent is None

  @property
  def read(self) -> Any:
    return self.layers if self.whole is None else self.whole


class Source(NamedTuple):
  """Hands a worker its layers, one after the other; ``parts`` come from others."""

  ahead: int  # 1: parts are asked for while the layer before computes; else 0
  ask: Callable[..., Any]  # (given, key) -> parts, still encoded, or None
  keep: Callable[..., Any]  # (parts) -> the share of them kept for the backward pass
  again: Callable[..., Any]  # (given, share, key) -> parts, in the backward pass
  layer: Callable[..., Any]  # (given, parts) -> layer, typed as differing by worker


class Exchange(NamedTuple):
  """Exchanges the gradient of one layer, in ``depth`` stages."""

  depth: int
  first: Callable[[], Kept]  # () -> the first residual of a layer: zeros
  begin: Callable[..., Any]  # (grads, kept, key) -> messages, each leaf's error
  advance: Callable[..., Any]  # (messages, age) -> messages, after stage age
  finish: Callable[..., Any]  # (messages, errors, kept) -> results, new kept


def whole_layers(axis_name: Any) -> Source:
  """The source of layers that each worker has."""
  nothing = lambda *_: None
  # Typed so, or JAX adds up the gradients of all workers.
  layer = lambda given, _: types.mark_varying(given, axis_name)
  return Source(0, nothing, nothing, nothing, layer)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerScan:
  """A scan over layers, ``body(closed, carry, layer) -> (carry, y)`` of no closure."""

  body: Callable[..., tuple[Any, Any]]
  policy: Callable[..., bool] | None  # of jax.checkpoint
  axis_name: Any
  source: Source
  exchange: Exchange
  length: int

  def __call__(self, carry: Any, given: Given) -> tuple[Any, Any]:
    """Returns the last carry, and the stacked outputs of the layers."""
    plain = lambda *layer: (self.body(*layer), None)
    scan = jax.custom_vjp(lambda carry, given: self._walk(plain, carry, given)[0])
    scan.defvjp(self._forward, self._backward)
    return scan(carry, given)

  def _forward(self, carry: Any, given: Given) -> tuple[Any, Any]:
    carry, given = options.differentiated_once((carry, given))
    # Under a jax.vmap over the workers, it numbers them.
    workers = [lax.axis_index(name) for name in axes.axis_names(self.axis_name)]
    carry, closed = _not_of_examples((carry, given.closed), given.layers, workers)
    given = given._replace(closed=closed)
    result, saved, asked = self._walk(self._linearized, carry, given)
    return result, (given, saved, asked)

  def _walk(self, run: Any, carry: Any, given: Given) -> tuple[Any, Any, Any]:
    """Runs all layers; returns results, all that ``run`` saves, and the last parts."""
    ask = lambda i: self.source.ask(_at(given.read, i), _key(given, i))

    def step(state: Any, i: Any, last: bool = False) -> Any:
      carry, asked = state
      more = asked if last else ask(i + 1)
      layer = self.source.layer(_at(given.read, i), asked)
      (carry, y), beside = run(given.closed, carry, layer)
      return (carry, more), (y, beside, None if last else self.source.keep(asked))

    inside = self.length - self.source.ahead
    state = carry, ask(0)
    numbers = jnp.arange(inside, dtype=jnp.int32)
    state, (ys, beside, kept) = lax.scan(step, state, numbers)
    behind = []
    for i in range(inside, self.length):
      state, (y, own, _) = step(state, i, last=True)
      ys = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), ys, y)
      behind.append(own)
    carry, asked = state
    return (carry, ys), (beside, kept, behind), asked

  def _linearized(self, closed: Any, carry: Any, layer: Any) -> tuple[Any, Any]:
    """Returns the outputs of a layer, and the pull of its cotangents."""
    # Of the arrays that the backward pass has, the pull holds only the places.
    floats, others = trees.split((closed, carry, layer))

    def of_floats(floats: Any) -> tuple[Any, Any]:
      return trees.split(self.body(*trees.combine(floats, others)))

    saved = jax.checkpoint(of_floats, policy=self.policy, prevent_cse=False)
    result, pull, rest = jax.vjp(saved, floats, has_aux=True)
    leaves, treedef = jax.tree.flatten(pull)
    known = jax.tree.leaves((closed, layer))
    places = [next((i for i, y in enumerate(known) if x is y), None) for x in leaves]
    own = [x if at is None else None for x, at in zip(leaves, places, strict=True)]

    def again(own: Any, known: Sequence[jax.Array], cotangent: Any) -> Any:
      pairs = zip(own, places, strict=True)
      whole = [x if at is None else known[at] for x, at in pairs]
      return jax.tree.unflatten(treedef, whole)(cotangent)[0]

    return trees.combine(result, rest), jax.tree_util.Partial(again, own)

  def _backward(self, saved: Any, cotangents: Any) -> tuple[Any, Given]:
    given, (pulls, copies, behind), asked = saved
    cotangents = options.differentiated_once(cotangents)
    cotangent, of_outputs = map(trees.trainable, cotangents)
    depth, inside = self.exchange.depth, self.length - len(behind)

    def layer_back(i: Any, state: Any, last: bool = False) -> Any:
      """Computes layer i, while the messages of layers above it are under way."""
      cotangent, found, asked, pending = state
      pending, found = self._advance(i, pending, found, given)
      more = None
      if not last:
        below, share = _at((given.read, copies), i - 1)
        more = self.source.again(below, share, _key(given, i - 1))
      own, of_output = _at((given.read, of_outputs), i)
      apart = isinstance(i, int) and i >= inside
      pull = behind[i - inside] if apart else _at(pulls, i)
      known = jax.tree.leaves((given.closed, self.source.layer(own, asked)))
      new, cotangent, of_layer = pull(known, (cotangent, of_output))
      found = found._replace(closed=jax.tree.map(jnp.add, found.closed, new))
      grads, kept = jax.tree.leaves(of_layer), _at(given.kept, i)
      pending[0], lost = self.exchange.begin(grads, kept, _key(given, i))
      if found.kept is not None:
        leaves = _put(found.kept.leaves, i, lost)
        found = found._replace(kept=found.kept._replace(leaves=leaves))
      return cotangent, found, more, pending

    found: Given = zeros_of(trees.trainable(given._replace(key=None, whole=None)))
    # With the messages of layers above, by the number of their stages that have run.
    state: Any = cotangent, found, asked, [None] * depth
    # A message of no layer would cost bytes: the loop starts when each stage has one,
    # and ends before nothing is left to ask for.
    stop = max(self.length - depth, 0)
    start = min(self.source.ahead, stop)
    for i in reversed(range(stop, self.length)):
      state = layer_back(i, state, last=i == 0)
    if start < stop:
      *begun, pending = state
      own, with_arrays = closures.arrays_of(pending)

      def step(state: Any, i: jax.Array) -> tuple[Any, None]:
        *others, own = state
        *others, pending = layer_back(i, (*others, with_arrays(own)))
        return (*others, closures.arrays_of(pending)[0]), None

      numbers = jnp.arange(start, stop, dtype=jnp.int32)
      (*begun, own), _ = lax.scan(step, (*begun, own), numbers, reverse=True)
      state = *begun, with_arrays(own)
    for i in reversed(range(start)):
      state = layer_back(i, state, last=True)
    cotangent, found, _, pending = state
    for i in range(depth):
      pending, found = self._advance(-1 - i, pending, found, given)
    return cotangent, found

  def _advance(
    self, i: Any, pending: list[Any], found: Given, given: Given
  ) -> tuple[list[Any], Given]:
    """Runs the next stage of the messages of the layers above layer i."""
    *on_the_way, last = [
      None if messages is None else self.exchange.advance(messages, age)
      for age, messages in enumerate(pending)
    ]
    if last is not None:
      at = i + self.exchange.depth
      lost = [] if found.kept is None else _at(found.kept.leaves, at)
      results, kept = self.exchange.finish(last, lost, _at(given.kept, at))
      results = jax.tree.unflatten(jax.tree.structure(found.layers), results)
      layers, kept = _put((found.layers, found.kept), at, (results, kept))
      found = found._replace(layers=layers, kept=kept)
    return [None, *on_the_way], found


def _key(given: Given, i: Any) -> jax.Array:
  """Returns the key of layer i."""
  return threefry.fold_key(given.key, i)


def _at(tree: Any, i: Any) -> Any:
  return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(tree: Any, i: Any, new: Any) -> Any:
  """Writes arrays at place i of stacked ones, typed as these."""

  def put(x: jax.Array, y: jax.Array) -> jax.Array:
    y = types.mark_varying(y.reshape(x.shape[1:]), (), x)
    return lax.dynamic_update_index_in_dim(x, y, i, 0)

  return jax.tree.map(put, tree, new)


def zeros_of(tree: Any) -> Any:
  """Returns zeros in place of arrays, typed as these."""
  typed = lambda x: types.mark_varying(jnp.zeros(x.shape, x.dtype), (), x)
  return jax.tree.map(typed, tree)


@jax.custom_batching.custom_vmap
def _not_of_examples(carry: Any, layers: Any, workers: list[jax.Array]) -> Any:
  """Returns the carry; ValueError under ``jax.vmap`` over it, and not over layers."""
  return carry


@_not_of_examples.def_vmap
def _batched(size: int, is_batched: Any, *given: Any) -> tuple[Any, Any]:
  del size
  of_carry, *others = is_batched
  if any(jax.tree.leaves(of_carry)) and not any(jax.tree.leaves(others)):
    raise ValueError(
      "`scan` must not be inside of jax.vmap over examples: each would be exchanged by "
      "itself, with the same residual; put jax.vmap inside of `body`, or map over "
      "layers, too, to train several models."
    )
  return _not_of_examples(*given), of_carry
