"""A codec and a recipe of a user's own, steps, local steps, and collectives."""

import dataclasses
import functools
from typing import Any, Unpack, assert_type

import jax
import jax.numpy as jnp
import optax

import gradcomp
from gradcomp.codecs import Codec, Context

Params = dict[str, jax.Array]
Pair = tuple[jax.Array, jax.Array]
OPTIMIZER = optax.chain(gradcomp.qsgd(bits=4, axis_name="data"), optax.sgd(0.1))


def loss_fn(params: Params, x: jax.Array, scale: float = 1.0) -> jax.Array:
  return scale * jnp.mean((x @ params["w"] - x[:, ::-1]) ** 2)


def loss_and_accuracy(params: Params, x: jax.Array) -> tuple[jax.Array, float]:
  return loss_fn(params, x), 1.0


def weighed(params: Params, x: jax.Array) -> Pair:
  return loss_fn(params, x), jnp.ones(())


def loss_of_array(params: jax.Array, batch: jax.Array) -> jax.Array:
  return loss_fn({"w": params}, batch)


def norm_loss(params: Params, averages: jax.Array, batch: jax.Array) -> Pair:
  return loss_fn(params, batch - averages), averages


def front_page(params: Params, batch: jax.Array) -> None:
  opt_state = OPTIMIZER.init(params)

  @jax.jit
  def train_step(params: Params, opt_state: optax.OptState, batch: jax.Array) -> Any:
    loss, grads = gradcomp.value_and_grad(loss_fn, axis_name="data")(params, batch)
    assert_type(loss, jax.Array)
    assert_type(grads, Params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  report = gradcomp.wire_report(train_step.lower(params, opt_state, batch))
  assert_type(report.bytes_sent, int)
  grad_fn = gradcomp.value_and_grad(loss_and_accuracy, axis_name="data", has_aux=True)
  (_, accuracy), grads = grad_fn(params, batch)
  assert_type(accuracy, float)
  assert_type(grads, Params)
  gradcomp.value_and_grad(loss_fn, axis_name=None, argnums=1)(params, x=batch)
  gradcomp.value_and_grad(weighed, axis_name="data", has_weight=True)(params, batch)
  gradcomp.value_and_grad(lambda w, x: x @ w, axis_name=None)(params, batch)


def run(step: gradcomp.TrainStep[Params], params: Params, x: list[jax.Array]) -> Params:
  opt_state = OPTIMIZER.init(params)
  for batch in x:
    params, opt_state, metrics = step(params, opt_state, batch)
    assert_type(metrics, dict[str, Any])
    assert_type(gradcomp.telemetry.scalars(metrics), dict[str, float])
  return params


def one_call(params: Params, batch: jax.Array, opt_state: optax.OptState) -> None:
  options, make = gradcomp.TrainOptions(accumulate=2), gradcomp.make_train_step
  step = make(loss_fn, OPTIMIZER, axis_name="data", donate=False, options=options)
  assert_type(step, gradcomp.TrainStep[Params])
  assert_type(run(step, params, [batch]), Params)
  key, more = jax.random.key(0), {"scale": 2.0}
  params, opt_state, _ = step(params, opt_state, batch, rng=key, extra_args=more)
  params, opt_state, _ = step(params, opt_state, batch, 0.5, inspect=True)
  assert_type(step.lower(params, opt_state, batch), jax.stages.Lowered)
  of_any = make(lambda w, x: jnp.mean(x @ w), OPTIMIZER, axis_name=None)
  of_any(jnp.ones(3), opt_state, batch)
  options = gradcomp.TrainOptions(model_state="mean", report=True)
  with_state = make(norm_loss, OPTIMIZER, axis_name="data", options=options)
  params, opt_state, _, _ = with_state(params, opt_state, jnp.zeros(3), batch)
  assert_type(params, Params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves(Codec):
  """Sends the upper half of each number's bits."""

  bucket_size: int = 128

  @property
  def tile_size(self) -> int:
    return 2 * self.bucket_size

  @property
  def row_words(self) -> int:
    return self.bucket_size

  def encode_rows(self, tiles: jax.Array, context: Context) -> jax.Array:
    words = jax.lax.bitcast_convert_type(tiles, jnp.uint32) >> 16
    return gradcomp.kernels.pack_planes([words[::2], words[1::2]], 16)

  def decode_rows(self, rows: jax.Array) -> jax.Array:
    return gradcomp.kernels.unpack_planes(rows, 16).astype(jnp.float32)


def halves(
  bucket_size: int = 128, **options: Unpack[gradcomp.CompressOptions]
) -> optax.GradientTransformationExtraArgs:
  """A recipe of one's own, with the options of all recipes."""
  return gradcomp.compress(Halves(bucket_size=bucket_size), **options)


def use(params: Params, x: jax.Array) -> None:
  codec: Codec = Halves()
  inner, outer = optax.adam(1e-3), optax.sgd(0.7)
  optimizer = gradcomp.local.local_steps(
    inner,
    outer,
    axis_name="data",
    every=30,
    codec=codec,
    fragments=2,
    merge="mean",
    key=1,
  )
  assert_type(gradcomp.local.local_params(params, optimizer.init(params)), Params)
  y = gradcomp.parallel.all_gather(x, axis_name="model", codec=codec, backward=None)
  assert_type(y, jax.Array)
  assert_type(gradcomp.parallel.reshard(x, jax.P(), codec=codec), jax.Array)
  both = gradcomp.parallel.reshard(x, jax.P(), codec=codec, residual=x)
  assert_type(both, tuple[jax.Array, jax.Array])
  halves(min_leaf_size=0, exchange=gradcomp.exchange.TwoShot(feedback=False))


def mistakes(params: Params, batch: jax.Array, opt_state: Any) -> None:
  gradcomp.value_and_grad(loss_fn, axis_name="data")(params)  # type: ignore[call-arg]
  of_batch = gradcomp.value_and_grad(loss_fn, axis_name=None, argnums=1)
  of_batch(params)  # type: ignore[call-arg]
  gradcomp.value_and_grad(loss_fn)(params, batch)  # type: ignore[call-overload]
  gradcomp.qsgd(bit=4)  # type: ignore[call-arg]
  gradcomp.qsgd(bits="4")  # type: ignore[arg-type]
  gradcomp.qsgd(exchange="two_shots")  # type: ignore[arg-type]
  gradcomp.quantized(bits=4)  # type: ignore[attr-defined]
  print(gradcomp.cost.plans)  # type: ignore[attr-defined]
  step = gradcomp.make_train_step(loss_fn, OPTIMIZER, axis_name="data")
  step(batch, opt_state, batch)  # type: ignore[call-overload]
  step(params, opt_state, batch, inspct=True)  # type: ignore[call-overload]
  step(params, opt_state, batch, rng=0)  # type: ignore[call-overload]
  params, opt_state = step(params, opt_state, batch)  # type: ignore[misc]
  other = gradcomp.make_train_step(loss_of_array, OPTIMIZER, axis_name="data")
  run(other, params, [batch])  # type: ignore[arg-type]
  gradcomp.make_train_step(loss_fn, OPTIMIZER, axis="data")  # type: ignore[call-arg]
  gradcomp.TrainOptions(accumulation=2)  # type: ignore[call-arg]
  gradcomp.TrainOptions(model_state="sum")  # type: ignore[arg-type]
  gradcomp.compress(4)  # type: ignore[arg-type]
  halves(min_leafsize=0)  # type: ignore[call-arg]
  rounds = functools.partial(gradcomp.local.local_steps, axis_name="data", every=30)
  rounds(OPTIMIZER, OPTIMIZER, codec=Halves(), fragment=2)  # type: ignore[call-arg]
  gradcomp.parallel.psum(batch, axis_name="data", codec="qsgd")  # type: ignore[arg-type]
  gradcomp.kernels.random_lanes(batch, 4, 2)  # type: ignore[arg-type]
  gradcomp.cost.PlanOptions(margins=0.1)  # type: ignore[call-arg]
