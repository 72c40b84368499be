"""A scan over layers, and its backward pass with the exchange inside the loop."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp._src.kernels.common.threefry import fold_key
from gradcomp._src.mesh.axes import AxisName
from gradcomp._src.mesh.closures import arrays_of
from gradcomp._src.mesh.trees import combine, split, trainable
from gradcomp._src.mesh.types import mark_varying, varying_axes
from gradcomp._src.parallel.options import differentiated_once
from gradcomp._src.parallel.scan_layer import GradientExchange, Kept
from gradcomp._src.parallel.scan_vmap import not_of_examples

# The messages of the layers above, by the number of their stages that have run.
Pending = list[Any]


class Given(NamedTuple):
  """The arrays that a scan takes, beside the carry."""

  closed: Any  # over which the body closes
  layers: Any
  kept: Kept | None  # of all layers, stacked
  key: jax.Array | None  # uint32[2]; a cotangent is None
  whole: Any = None  # what is read in place of layers; a cotangent is None

  @property
  def read(self) -> Any:
    return self.layers if self.whole is None else self.whole


class Found(NamedTuple):
  """The results of layers, stacked, in which some are still zeros."""

  means: Any  # like the leaves of the layers that are trained
  kept: Kept | None


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("saved",),
  meta_fields=("places", "treedef"),
)
@dataclasses.dataclass(frozen=True)
class Pull:
  """The cotangent of a layer's inputs, as a function of its outputs' cotangent.

  It is a tree of the arrays that it needs, without those which the backward pass has.
  """

  saved: Sequence[jax.Array | None]
  places: tuple[int | None, ...]  # among the arrays that the backward pass has
  treedef: Any

  def __call__(self, known: Sequence[jax.Array], cotangent: Any) -> Any:
    pairs = zip(self.saved, self.places, strict=True)
    leaves = [x if place is None else known[place] for x, place in pairs]
    return jax.tree.unflatten(self.treedef, leaves)(cotangent)[0]


class Source(Protocol):
  """Hands a worker its layers, one after the other.

  Attributes:
    axis_name: the axes of the workers.
    ahead: 1 if what it asks of others for a layer should be asked for while the one
      before it computes, else 0.
  """

  ahead: ClassVar[int]

  @property
  def axis_name(self) -> AxisName: ...

  def ask(self, given: Any, key: jax.Array) -> Any:
    """Returns the encoded parts of a layer from others; None if nothing is sent."""

  def keep(self, asked: Any) -> Any:
    """Returns the share of these parts that a worker keeps for the backward pass."""

  def again(self, given: Any, kept: Any, key: jax.Array) -> Any:
    """Returns the parts of a layer once more, in the backward pass."""

  def layer(self, given: Any, asked: Any) -> Any:
    """Returns a layer, typed as differing between workers."""


@dataclasses.dataclass(frozen=True)
class Whole:
  """The source of layers that each worker has."""

  axis_name: AxisName

  ahead: ClassVar[int] = 0

  def ask(self, given: Any, key: jax.Array) -> None:
    return None

  def keep(self, asked: None) -> None:
    return None

  def again(self, given: Any, kept: None, key: jax.Array) -> None:
    return None

  def layer(self, given: Any, asked: None) -> Any:
    # Typed so, or JAX adds up the gradients of all workers.
    return mark_varying(given, self.axis_name)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerScan:
  """A scan over layers.

  ``body(closed, carry, layer)`` closes over no array, and ``exchange`` is that of a
  layer's gradient.
  """

  body: Callable[..., tuple[Any, Any]]
  policy: Callable[..., bool] | None
  source: Source
  exchange: GradientExchange
  length: int

  def __call__(self, carry: Any, given: Given) -> tuple[Any, Any]:
    """Returns the last carry, and the stacked outputs of the layers."""

    def run(carry: Any, given: Given) -> tuple[Any, Any]:
      only = lambda *layer: (self.body(*layer), None)
      return self._walk(only, carry, given)[0]

    scan = jax.custom_vjp(run)
    scan.defvjp(self._forward, self._backward)
    return scan(carry, given)

  def _forward(self, carry: Any, given: Given) -> tuple[Any, Any]:
    carry, given = differentiated_once((carry, given))
    own = carry, given.closed
    carry, closed = not_of_examples(own, given.layers, self.source.axis_name)
    given = given._replace(closed=closed)
    result, saved, asked = self._walk(self._linearized, carry, given)
    return result, (given, saved, asked)

  def _walk(
    self, run: Callable[..., Any], carry: Any, given: Given
  ) -> tuple[Any, Any, Any]:
    """Runs layer after layer; returns the results of ``run``, and the parts asked for.

    What belongs to the last layers, which run behind the loop, is apart. Of others the
    parts are given up but for what the source keeps.
    """

    def step(state: Any, i: Any, last: bool = False) -> Any:
      carry, asked = state
      more = None if last else self._ask(given, i + 1)
      layer = self.source.layer(_at(given.read, i), asked)
      (carry, y), beside = run(given.closed, carry, layer)
      kept = None if last else self.source.keep(asked)
      return (carry, asked if last else more), (y, beside, kept)

    inside = self.length - self.source.ahead
    state = carry, self._ask(given, 0)
    state, (ys, beside, kept) = lax.scan(
      step, state, jnp.arange(inside, dtype=jnp.int32)
    )
    behind = []
    for i in range(inside, self.length):
      state, (y, own, _) = step(state, i, last=True)
      ys = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), ys, y)
      behind.append(own)
    carry, asked = state
    return (carry, ys), (beside, kept, behind), asked

  def _ask(self, given: Given, i: Any) -> Any:
    return self.source.ask(_at(given.read, i), _key(given, i))

  def _again(self, given: Given, copies: Any, i: Any) -> Any:
    own, kept = _at((given.read, copies), i)
    return self.source.again(own, kept, _key(given, i))

  def _linearized(self, closed: Any, carry: Any, layer: Any) -> tuple[Any, Pull]:
    """Returns the outputs of a layer, and the pull of its cotangents."""
    floats, others = split((closed, carry, layer))

    def of_floats(floats: Any) -> tuple[Any, Any]:
      return split(self.body(*combine(floats, others)))

    saved = jax.checkpoint(of_floats, policy=self.policy, prevent_cse=False)
    result, pull, rest = jax.vjp(saved, floats, has_aux=True)
    leaves, treedef = jax.tree.flatten(pull)
    known = jax.tree.leaves((closed, layer))
    places = tuple(
      next((i for i, y in enumerate(known) if x is y), None) for x in leaves
    )
    own = [x if at is None else None for x, at in zip(leaves, places, strict=True)]
    return combine(result, rest), Pull(own, places, treedef)

  def _backward(self, saved: Any, cotangents: Any) -> tuple[Any, Given]:
    given, (pulls, copies, behind), asked = saved
    cotangent, of_outputs = map(trainable, differentiated_once(cotangents))
    depth, inside = self.exchange.depth, self.length - len(behind)

    def layer_back(i: Any, state: Any, last: bool = False) -> Any:
      """Computes layer i, while the messages of layers above it are under way."""
      cotangent, of_closed, found, asked, pending = state
      pending, found = self._advance(i, pending, found, given)
      more = None if last else self._again(given, copies, i - 1)
      own, of_output = _at((given.read, of_outputs), i)
      apart = isinstance(i, int) and i >= inside
      pull = behind[i - inside] if apart else _at(pulls, i)
      known = jax.tree.leaves((given.closed, self.source.layer(own, asked)))
      new, cotangent, of_layer = pull(known, (cotangent, of_output))
      of_closed = jax.tree.map(jnp.add, of_closed, new)
      grads, kept = jax.tree.leaves(of_layer), _at(given.kept, i)
      pending[0], lost = self.exchange.begin(grads, kept, _key(given, i))
      if found.kept is not None:
        leaves = _put(found.kept.leaves, i, lost)
        found = found._replace(kept=found.kept._replace(leaves=leaves))
      return cotangent, of_closed, found, more, pending

    of_closed = zeros_of(trainable(given.closed))
    found = Found(zeros_of(trainable(given.layers)), zeros_of(given.kept))
    nothing: Pending = [None] * depth
    state = cotangent, of_closed, found, asked, nothing
    # A message of no layer would cost bytes: the loop starts when each stage has one,
    # and ends before nothing is left to ask for.
    stop = max(self.length - depth, 0)
    start = min(self.source.ahead, stop)
    for i in reversed(range(stop, self.length)):
      state = layer_back(i, state, last=i == 0)
    if start < stop:
      *begun, pending = state
      own, with_arrays = arrays_of(pending)

      def step(state: Any, i: jax.Array) -> tuple[Any, None]:
        *others, own = state
        *others, pending = layer_back(i, (*others, with_arrays(own)))
        return (*others, arrays_of(pending)[0]), None

      numbers = jnp.arange(start, stop, dtype=jnp.int32)
      (*begun, own), _ = lax.scan(step, (*begun, own), numbers, reverse=True)
      state = *begun, with_arrays(own)
    for i in reversed(range(start)):
      state = layer_back(i, state, last=True)
    cotangent, of_closed, found, _, pending = state
    for i in range(depth):
      pending, found = self._advance(-1 - i, pending, found, given)
    return cotangent, Given(of_closed, found.means, found.kept, None)

  def _advance(
    self, i: Any, pending: Pending, found: Found, given: Given
  ) -> tuple[Pending, Found]:
    """Runs the next stage of the messages of the layers above layer i."""
    depth = self.exchange.depth
    moved: Pending = [None] * depth
    for age, messages in enumerate(pending):
      if messages is None:
        continue
      messages = self.exchange.advance(messages, age)
      if age + 1 < depth:
        moved[age + 1] = messages
      else:
        found = self._arrived(i + depth, messages, found, given)
    return moved, found

  def _arrived(self, i: Any, messages: Any, found: Found, given: Given) -> Found:
    """Writes the mean of layer i, and this worker's residual of it."""
    lost = [] if found.kept is None else _at(found.kept.leaves, i)
    means, kept = self.exchange.finish(messages, lost, _at(given.kept, i))
    means = jax.tree.unflatten(jax.tree.structure(found.means), means)
    return Found(_put(found.means, i, means), _put(found.kept, i, kept))


def _key(given: Given, i: Any) -> jax.Array:
  """Returns the key of layer i."""
  assert given.key is not None
  return fold_key(given.key, i)


def _at(tree: Any, i: Any) -> Any:
  return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(tree: Any, i: Any, new: Any) -> Any:
  """Writes arrays at place i of stacked ones, typed as these."""

  def put(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, like(y.reshape(x.shape[1:]), x), i, 0)

  return jax.tree.map(put, tree, new)


def zeros_of(tree: Any) -> Any:
  return jax.tree.map(lambda x: like(jnp.zeros(x.shape, x.dtype), x), tree)


def like(x: jax.Array, y: jax.Array) -> jax.Array:
  """Types an array as varying over the axes of another."""
  axes = tuple(sorted(varying_axes(y)))
  return mark_varying(x, axes) if axes else x
