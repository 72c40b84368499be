"""What one stage gathers or adds, where the table of rows does not reach."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradcomp
from gradcomp._src.codecs.sums.codes import Integers
from gradcomp.codecs import QSGD
from tests.specs import qsgd
from tests.support import modes
from tests.table import laws as table
from tests.table import run


def test_sixty_four_emulated_workers():
  """Beyond the unrolled sum: the loop adds in the same order, and obeys every law."""
  found = run.run(run.Row("qsgd-8-64", "all_gather", "none", "vmap", 64))
  for law in table.LAWS:
    law(found)


@pytest.mark.parametrize("workers, dtype", [(18, "s8"), (19, "s16")])
def test_sums_at_the_edge_of_an_integer(workers, dtype):
  """18 workers at the top level of 7 make 126; 19 would be 133 and wrap around."""
  codec = QSGD(bits=4, bucket_size=32, share_scale=True, rounding="nearest")
  assert codec.sums.sum_dtype(workers) == {"s8": jnp.int8, "s16": jnp.int16}[dtype]
  extremes = np.where(np.arange(512) % 2, 3.0, -3.0).astype(np.float32)
  grads = {"w": jnp.asarray(np.broadcast_to(extremes, (workers, 512)))}
  tx = gradcomp.compress(codec, axis_name="data", exchange="psum", feedback=None)
  (output,), _ = modes.run("vmap", tx, [grads])
  # 19 * 3 * (1/19) is one rounding away from 3.
  np.testing.assert_allclose(output["w"][0], extremes, rtol=2.0**-23)


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 8, 9])
@pytest.mark.parametrize(
  "bits, bucket_size, levels",
  [(4, 32, "sign_magnitude"), (4, None, "uniform"), (1, 32, "uniform")]
  + [(3, 64, "sign_magnitude"), (16, 32, "uniform")],
)
def test_packed_sums_are_the_documented_words(bits, bucket_size, levels, workers):
  """Every sum in its own bits, the extremes too, and what follows the last is zero."""
  options = dict(bits=bits, bucket_size=bucket_size, levels=levels)
  codec = QSGD(share_scale=True, **options)
  limit = workers * codec.max_code
  sums = np.random.default_rng(workers).integers(-limit, limit + 1, 3 * codec.tile_size)
  sums[:2] = -limit, limit
  given = sums.reshape(3, -1, codec.row_words).astype(np.int32)
  packed = np.asarray(jax.jit(Integers(limit).pack)(given))
  np.testing.assert_array_equal(packed, qsgd.pack_sums(sums, workers, **options))
  read = qsgd.unpack_sums(packed, sums.size, workers, **options)
  np.testing.assert_array_equal(read, sums)


def test_a_cpu_writes_rows_down_before_it_decodes_them():
  """Else XLA fuses encoding into decoding, and a word is encoded for each element.

  The mean is written down, too, and so are the indices of keys.
  """
  tx = gradcomp.qsgd(bits=4)
  like = jax.ShapeDtypeStruct((2**18,), jnp.float32)
  state = jax.eval_shape(tx.init, like)
  text = jax.jit(tx.update).lower(like, state).compile().as_text()
  assert text.count(" conditional(") == 3
