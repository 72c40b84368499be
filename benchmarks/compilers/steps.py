"""Cases: whole train steps of a small transformer, by method, form and net.

The unit is the same step with JAX's own mean of gradients. Exchanges are compiled where
layers are unrolled, recipes where they are scanned, all in a ``jax.shard_map``; the
plain mean and 4 bits both ways, and 4 bits also in plain ``jax.jit`` with Explicit
axes.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradcomp
from benchmarks.common.shapes import mapped, placed
from benchmarks.compilers import program as hlo
from benchmarks.compilers import targets
from gradcomp import local, parallel
from gradcomp.codecs import QSGD, EightBit
from gradcomp.exchange import Hierarchical

P = jax.P
Form = Literal["shard_map", "jit"]
PLAIN = "plain mean"
BATCH = 4  # sequences of a worker
Params = dict[str, Any]


class Net(NamedTuple):
  """A decoder-only transformer, as small as messages of large models allow."""

  layers: int = 4
  width: int = 256
  heads: int = 4
  symbols: int = 1024
  length: int = 128
  scanned: bool = False
  dtype: Any = jnp.float32

  def params(self) -> Params:
    d = self.width
    of = lambda *shape: jax.ShapeDtypeStruct(shape, self.dtype)
    layer = {"norm1": of(d), "attend": of(d, 3 * d), "mix": of(d, d)}
    layer |= {"norm2": of(d), "widen": of(d, 4 * d), "narrow": of(4 * d, d)}
    stacked = {name: of(self.layers, *x.shape) for name, x in layer.items()}
    layers = stacked if self.scanned else [layer] * self.layers
    return {"embed": of(self.symbols, d), "layers": layers, "norm": of(d)}

  def tokens(self) -> jax.ShapeDtypeStruct:
    """Returns the struct of a batch for all workers of the mesh."""
    batch = BATCH * jax.sharding.get_mesh().size
    return jax.ShapeDtypeStruct((batch, self.length + 1), jnp.int32)

  def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
    """Computes the mean loss of each next token, ``int32[batch, length + 1]``."""
    x, layers = params["embed"][tokens[:, :-1]], params["layers"]
    if self.scanned:
      x, _ = jax.lax.scan(lambda x, layer: (self.layer(layer, x), None), x, layers)
    for layer in layers if not self.scanned else ():
      x = self.layer(layer, x)
    logits = _normed(x, params["norm"]) @ params["embed"].T
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    labels = jax.nn.one_hot(tokens[:, 1:], self.symbols)
    return -jnp.mean(jnp.sum(found * labels, axis=-1))

  def layer(self, params: Params, x: jax.Array) -> jax.Array:
    """Applies attention and two dense layers, each added to its input."""
    batch, length, width = x.shape
    given = _normed(x, params["norm1"]) @ params["attend"]
    heads = given.reshape(batch, length, self.heads, -1)
    query, key, value = jnp.split(heads, 3, axis=-1)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x += mixed.reshape(batch, length, width) @ params["mix"]
    wide = jax.nn.gelu(_normed(x, params["norm2"]) @ params["widen"])
    return x + wide @ params["narrow"]


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
  whole = x.astype(jnp.float32)
  root = jax.lax.rsqrt(jnp.mean(whole**2, axis=-1, keepdims=True) + 1e-6)
  return (whole * root).astype(x.dtype) * scale


class Method(NamedTuple):
  """An optimizer, and the parameters that it updates."""

  # Returns the optimizer from the names of the axes of the workers.
  make: Callable[[Any], optax.GradientTransformation]
  # Their names and sizes, by default one axis over all devices.
  axes: tuple[tuple[str, int], ...] = (("data", 8),)
  dtype: Any = jnp.float32  # of the parameters
  sharded: bool = False  # whether workers gather parameters that are cut (FSDP)

  @property
  def names(self) -> Any:
    """Returns the names of the axes, or the one name."""
    names = tuple(dict(self.axes))
    return names if len(names) > 1 else names[0]


TWO = (("slice", 2), ("chip", 4))
FOUR, EIGHT = QSGD(bits=4), EightBit(bucket_size=128)
NEAREST = QSGD(bits=4, bucket_size=128, rounding="nearest")


def _behind(recipe: Any, **options: Any) -> Method:
  """Returns the method that puts a recipe in front of SGD with momentum."""
  return Method(lambda axes: optax.chain(recipe(axis_name=axes, **options), _INNER))


_INNER, _OUTER = optax.sgd(0.1, momentum=0.9), optax.sgd(0.7, 0.9, nesterov=True)
_made = lambda make, *of, **way: Method(lambda axes: make(*of, axis_name=axes, **way))
_FITTED: dict[str, Any] = {"bucket_size": 128, "levels": "nonuniform"}
_SHARED: dict[str, Any] = {"bucket_size": None, "share_scale": True}
_BETWEEN = {"exchange": "hierarchical"}
qsgd4, pmean = functools.partial(gradcomp.qsgd, bits=4), jax.lax.pmean
_BY_DEFAULT = "eight_bit natural aps terngrad onebit_sgd blocktop".split()
_SPARSE = ("topk", "redsync", "randomk")
METHODS: dict[str, Method] = {
  PLAIN: _behind(lambda axis_name: optax.stateless(lambda x, _: pmean(x, axis_name))),
  "dense": _behind(gradcomp.dense),
  "dense bfloat16": _behind(gradcomp.dense, dtype=jnp.bfloat16),
  "qsgd 8 bits": _behind(gradcomp.qsgd, bits=8),
  "qsgd 4 bits": _behind(qsgd4),
  "qsgd 4 bits, feedback": _behind(qsgd4, feedback="error"),
  "qsgd 2 bits, fitted": _behind(gradcomp.qsgd, bits=2, **_FITTED),
  "qsgd 4 bits, all_gather": _behind(qsgd4, exchange="all_gather"),
  "qsgd 4 bits, ring": _behind(qsgd4, exchange="ring"),
  "qsgd 4 bits, psum": _behind(qsgd4, **_SHARED, exchange="psum"),
  "qsgd 4 bits, groups of 4": _behind(qsgd4, exchange=Hierarchical(group_size=4)),
  "qsgd 4 bits, hierarchical": _behind(qsgd4, **_BETWEEN)._replace(axes=TWO),
  "qsgd 4 bits, messages": _behind(qsgd4, message_bytes=400_000),
  "qsgd 4 bits, bfloat16 parameters": _behind(qsgd4)._replace(dtype=jnp.bfloat16),
  **{x: _behind(getattr(gradcomp, x)) for x in _BY_DEFAULT},
  "loss_scaling_cast": _behind(gradcomp.loss_scaling_cast, factor=2.0**10),
  **{x: _behind(getattr(gradcomp, x), density=0.01) for x in _SPARSE},
  "powersgd": _behind(gradcomp.powersgd, rank=4),
  "policy": _behind(gradcomp.policy, rules=[("attend", QSGD(bits=8)), ("", FOUR)]),
  "zero": _made(parallel.zero, _INNER, grads=FOUR, params=FOUR),
  "local_steps": _made(local.local_steps, _INNER, _OUTER, every=4, codec=FOUR),
  "gather, float32": Method(lambda axes: optax.sgd(0.1), sharded=True),
  "gather": Method(lambda axes: optax.sgd(0.1), sharded=True),
}
SLICES = "2 slices of v5e"
QUICK = dict.fromkeys(("v5e", "H100"), ("qsgd 4 bits, scanned, jit",))
QUICK[SLICES] = ("qsgd 4 bits, hierarchical, unrolled, shard_map",)
# The others have the same compilers, and few methods show what differs; between slices
# these are the exchanges.
WHOLE = ("v5e", "H100")
BETWEEN = ("dense bfloat16", "qsgd 4 bits, ring", "qsgd 4 bits, groups of 4")
BETWEEN += ("qsgd 4 bits, hierarchical", "qsgd 4 bits, messages", "local_steps")
BETWEEN += ("zero", "gather")
# Each is another codec in the same exchange. A scan has a quarter of the leaves, and
# compiles as much faster.
RECIPES = {*_BY_DEFAULT, *_SPARSE, "loss_scaling_cast", "powersgd", "policy", "dense"}
RECIPES |= {"qsgd 8 bits", "qsgd 2 bits, fitted"}


class Case(NamedTuple):
  method: str
  scanned: bool = False
  form: Form = "shard_map"

  @property
  def name(self) -> str:
    return f"{self.method}, {'scanned' if self.scanned else 'unrolled'}, {self.form}"

  def net(self) -> Net:
    return Net(scanned=self.scanned, dtype=METHODS[self.method].dtype)


def cases(target: str, extent: targets.Extent) -> dict[str, Case]:
  every = [Case(PLAIN), Case("qsgd 4 bits"), Case(PLAIN, scanned=True)]
  every += [Case("qsgd 4 bits", True, "jit")]
  if target == SLICES:
    every += [Case(name) for name in BETWEEN]
  if extent == "all" or target in WHOLE:
    every += [Case(name, scanned=name in RECIPES) for name in METHODS]
    every += [Case("qsgd 4 bits", True), Case("gather", True)]
    every += [Case("qsgd 4 bits", False, "jit")]
  if extent == "all":
    every += [Case(name, name not in RECIPES) for name in METHODS]
  quick = QUICK.get(target, ())
  return {case.name: case for case in every if extent != "quick" or case.name in quick}


def row(target: str, case: Case) -> tuple[dict[str, Any], Any]:
  compiled, facts = _compiled(target, case)
  found = {
    "gradient": 4 * sum(x.size for x in jax.tree.leaves(case.net().params())),
    "unit": _unit(target, case.scanned),
    "wire": _wire(compiled) | {"explained": _explained(case)},
  }
  return found | kept(facts), compiled


def kept(facts: dict[str, Any]) -> dict[str, Any]:
  """Returns the facts that the record keeps: what its page and its tests read."""
  every, collectives = facts["collectives"], collections.Counter[str]()
  for x in every:
    dtypes = "+".join(sorted({of.partition("[")[0] for of in x["types"]}))
    collectives[f"{x['kind']}{'~' if x['asynchronous'] else ''} {dtypes}"] += x["times"]
  left = {k: v for k, v in facts.items() if k not in ("kernels", "lower_seconds")}
  return left | {
    "moved": {part: x for part, x in facts["moved"].items() if part != "model"},
    "loops": [x["trips"] for x in facts["loops"] if x["part"] != "model"],
    "collectives": dict(collectives),
    "sent": {of: sum(x[of] for x in every) for of in ("bytes", "padded")},
  }


@functools.cache
def _unit(target: str, scanned: bool) -> dict[str, Any]:
  """Returns the cycles, temporaries and launches of the step with the plain mean."""
  _, facts = _compiled(target, Case(PLAIN, scanned))
  return {
    "cycles": facts["cycles"] and sum(facts["cycles"].values()),
    "temporaries": facts["temporaries"],
    "launches": sum(v for k, v in facts["launches"].items() if k != "scalars"),
  }


def _wire(compiled: Any) -> dict[str, Any]:
  """Returns what gradcomp reads of the bytes that cross the wire."""
  try:
    report = gradcomp.wire_report(compiled)
    # Between slices XLA breaks plain sums up, and names no part of them.
    ratio = None if report.untold else round(report.ratio, 6)
    return {"bytes": report.bytes_sent, "ratio": ratio}
  except Exception as error:  # the table says it
    return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def _explained(case: Case) -> int | None:
  """Returns the bytes that ``gradcomp.explain`` counts, or None where it cannot."""
  method = METHODS[case.method]
  if method.sharded or case.method == PLAIN:  # no transformation exchanges anything
    return None
  optimizer, workers = method.make(method.names), dict(method.axes)
  return gradcomp.explain(optimizer, case.net().params(), workers=workers).bytes_sent


def _compiled(target: str, case: Case) -> tuple[Any, dict[str, Any]]:
  method, found = METHODS[case.method], targets.TARGETS[target]
  with jax.set_mesh(found.mesh(dict(method.axes), explicit=case.form == "jit")):
    make = _gathering if method.sharded else _whole
    step, args = make(case.net(), method.make(method.names), method.names, case)
    return hlo.compile_for(found, step, args)


def _whole(net: Net, optimizer: Any, axes: Any, case: Case) -> tuple[Any, Any]:
  """Makes a step in one map, or in plain ``jax.jit``, as the README does."""
  mesh, params, plainly = jax.sharding.get_mesh(), net.params(), case.form == "jit"
  state = jax.eval_shape(optimizer.init, params)
  kept = gradcomp.state_specs(state, axis_name=axes)

  def step(params: Any, state: Any, tokens: Any) -> Any:
    at, grad_fn = params, jax.value_and_grad(net.loss)
    if plainly:
      grad_fn = gradcomp.value_and_grad(net.loss, axis_name=axes)
    else:
      at = local.local_params(params, state)
      at = at if case.method == PLAIN else gradcomp.defer_reduction(at, axis_name=axes)
    loss, grads = grad_fn(at, tokens)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, loss if plainly else jax.lax.pmean(loss, axes)

  args, donated = (params, state, net.tokens()), {"donate_argnums": (0, 1)}
  given, made, checked = (P(), kept, P(axes)), (P(), kept, P()), case.method != PLAIN
  if plainly:
    return jax.jit(step, **donated), placed(mesh, args, given)
  return mapped(mesh, step, args, given, made, check_vma=checked, **donated)


def _gathering(net: Net, optimizer: Any, axes: Any, case: Case) -> tuple[Any, Any]:
  """Makes a step whose workers have parts of the parameters, and gather them (FSDP)."""
  mesh = jax.sharding.get_mesh()
  # Each layer's parts are cut along their first axis, behind that of a scan.
  stacked = lambda path: case.scanned and path[0].key == "layers"
  cut = lambda path, _: P(None, axes) if stacked(path) else P(axes)
  params = net.params()
  specs = jax.tree.map_with_path(cut, params)

  def unsent(path: Any, x: Any) -> Any:
    """Returns the residual of a leaf, as large on each worker as the whole leaf."""
    at = int(stacked(path))
    if len(x.shape) - at < 2 or case.method != "gather":
      return None
    shape = *x.shape[:at], mesh.size * x.shape[at], *x.shape[at + 1 :]
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  residuals = jax.tree.map_with_path(unsent, params)
  of_residuals = jax.tree.map(lambda spec, x: x and spec, specs, residuals)

  def whole(pair: Any) -> Any:
    part, kept = pair
    coded = case.method == "gather" and part.ndim > 1
    there, back = (EIGHT, NEAREST) if coded else (None, None)
    return parallel.gather(
      part, axis_name=axes, params=there, grads=back, residual=kept
    )

  wholes = lambda pairs: jax.tree.map(whole, pairs, is_leaf=lambda x: type(x) is tuple)

  class Gathered(Net):
    def layer(self, params: Any, x: jax.Array) -> jax.Array:
      inside = lambda params, x: Net.layer(self, wholes(params), x)
      return jax.checkpoint(inside)(params, x)

  def loss_fn(params: Any, residuals: Any, tokens: Any) -> jax.Array:
    pairs = jax.tree.map(lambda w, e: (w, e), params, residuals)
    ends = {name: whole(pairs[name]) for name in ("embed", "norm")}
    return Gathered(*net).loss(pairs | ends, tokens) / jax.lax.axis_size(axes)

  def worker(params: Any, residuals: Any, state: Any, tokens: Any) -> Any:
    grad_fn = jax.value_and_grad(loss_fn, (0, 1))
    loss, (grads, residuals) = grad_fn(params, residuals, tokens)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, residuals, state, jax.lax.psum(loss, axes)

  state = jax.eval_shape(optimizer.init, params)
  given = (specs, of_residuals, P(axes), P(axes))
  args, made = (params, residuals, state, net.tokens()), (*given[:-1], P())
  return mapped(mesh, worker, args, given, made, donate_argnums=(0, 1, 2))
