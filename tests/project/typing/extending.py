"""A codec and a recipe of a user's own, local steps, and the collectives of layers."""

import dataclasses
from typing import Unpack, assert_type

import jax
import jax.numpy as jnp
import optax

import gradcomp
from gradcomp.codecs import Codec, Context


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
    halves = words.reshape(-1, 2, self.bucket_size)
    return gradcomp.kernels.pack_planes([halves[:, 0], halves[:, 1]], 16)

  def decode_rows(self, rows: jax.Array) -> jax.Array:
    words = gradcomp.kernels.unpack_planes(rows, 16)
    return jax.lax.bitcast_convert_type(words << 16, jnp.float32)


def halves(
  bucket_size: int = 128, **options: Unpack[gradcomp.CompressOptions]
) -> optax.GradientTransformationExtraArgs:
  """A recipe of one's own, with the options of all recipes."""
  return gradcomp.compress(Halves(bucket_size=bucket_size), **options)


def use(params: dict[str, jax.Array], x: jax.Array) -> None:
  codec: gradcomp.codecs.LeafCodec = Halves()
  optimizer = gradcomp.local.local_steps(
    optax.adam(1e-3),
    optax.sgd(0.7),
    axis_name="data",
    every=30,
    codec=codec,
    options=gradcomp.local.LocalOptions(fragments=2, merge="mean"),
  )
  opt_state = optimizer.init(params)
  assert_type(gradcomp.local.local_params(params, opt_state), dict[str, jax.Array])
  assert_type(
    gradcomp.parallel.all_gather(x, axis_name="model", codec=codec, backward=None),
    jax.Array,
  )
  assert_type(gradcomp.parallel.reshard(x, jax.P(), codec=codec), jax.Array)
  both = gradcomp.parallel.reshard(x, jax.P(), codec=codec, residual=x)
  assert_type(both, tuple[jax.Array, jax.Array])
  halves(min_leaf_size=0, exchange=gradcomp.exchange.TwoShot(feedback=False))


def mistakes(x: jax.Array) -> None:
  gradcomp.compress(4)  # type: ignore[arg-type]
  halves(min_leafsize=0)  # type: ignore[call-arg]
  gradcomp.local.LocalOptions(fragment=2)  # type: ignore[call-arg]
  gradcomp.parallel.psum(x, axis_name="data", codec="qsgd")  # type: ignore[arg-type]
  gradcomp.kernels.random_lanes(x, 4, 2)  # type: ignore[arg-type]
  gradcomp.cost.PlanOptions(margins=0.1)  # type: ignore[call-arg]
