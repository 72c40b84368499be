"""Payloads to their mean: the only file that calls collectives.

Each strategy takes the rows that a worker encoded and returns the rows that every
worker decodes, with a leading axis of the payloads to average. Whatever a collective
carries is ``uint32``: XLA widens narrower floats and sub-byte integers on the way. The
collectives are named after the elements that they stand for, which is how
:func:`gradcomp.wire_report` knows what a plain mean would have sent.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from gradcomp import _axes
from gradcomp.codecs import Codec, Dense
from gradcomp.layout import Layout, mean_of_rows

Exchange = Literal["auto", "all_gather", "two_shot", "psum", "local"]

# Below this many bytes from all workers together, a second stage costs more in latency
# than it saves: two messages of 64 KiB take 1 ms at 1 Gbit/s, a stage about 0.1 ms.
_TINY_MESSAGE = 1 << 16


def check_exchange(exchange: str, codec: Codec) -> None:
  """ValueError for an unknown name, and for a sum of codes that cannot be added."""
  if exchange not in get_args(Exchange):
    raise ValueError(
      f"`exchange` must be one of {get_args(Exchange)}, got {exchange!r}."
    )
  if exchange == "psum" and codec != Dense():
    raise ValueError(
      '`exchange` must not be "psum" for a codec whose codes cannot be added, got '
      f'{codec}; use exchange="auto", or gradcomp.dense() for the plain mean.'
    )


def choose(exchange: Exchange, layout: Layout, workers: int) -> Exchange:
  """The strategy behind ``"auto"``; one that was asked for as it is.

  A worker receives ``(N-1) c`` bytes by ``all_gather`` and ``2 (N-1)/N c`` by
  ``two_shot``, which quantizes twice. So ``all_gather`` serves up to two workers, where
  the bytes are equal, and tiny messages; ``two_shot`` all others. Where every leaf is
  dense float32 there is nothing to encode, and ``psum`` is the plain mean.
  """
  if exchange != "auto":
    return exchange
  if all(codec == Dense() for codec in layout.codecs):
    return "psum"
  if workers <= 2 or workers * layout.nbytes <= _TINY_MESSAGE:
    return "all_gather"
  return "two_shot"


def average(
  layout: Layout,
  tree: Any,
  keys: jax.Array | None,
  axis_name: str | None,
  exchange: Exchange,
) -> tuple[Any, list[jax.Array] | None]:
  """The mean of all workers' trees, and the payload that this worker sent for it.

  Args:
    layout: the plan of the message.
    tree: float32 arrays.
    keys: ``uint32[leaves + codecs, 2]``, the last ones for the second stage, or None.
    axis_name: the axis to average over, or None to exchange nothing.
    exchange: the strategy.

  Returns:
    The mean, a tree of float32 arrays that is equal on all workers, and the worker's
    own ``uint32[1, rows, row_words]`` for each codec; None in place of it for a plain
    mean, which loses nothing.
  """
  if axis_name is not None and layout.elements:
    exchange = choose(exchange, layout, _axes.require_size(axis_name))
    if exchange == "psum":
      return pmean(tree, axis_name), None
  matrices = layout.encode(tree, keys)
  payload = [matrix[None] for matrix in matrices]
  if axis_name is None or not layout.elements or exchange == "local":
    gathered = payload
  elif exchange == "all_gather":
    gathered = all_gather(layout, matrices, axis_name)
  else:
    gathered = two_shot(layout, matrices, axis_name, keys)
  return layout.decode(gathered), payload


def pmean(tree: Any, axis_name: str) -> Any:
  """The plain mean over the axis, in the arrays' own dtype."""
  return lax.pmean(tree, axis_name)


def all_gather(
  layout: Layout, matrices: Sequence[jax.Array], axis_name: str
) -> list[jax.Array]:
  """Every worker receives every payload.

  Args:
    layout: the plan that the matrices follow.
    matrices: ``uint32[rows, row_words]`` for each codec.
    axis_name: the axis to exchange over.

  Returns:
    ``uint32[N, rows, row_words]`` for each codec, the same on every worker.
  """
  message = jnp.concatenate([matrix.reshape(-1) for matrix in matrices])
  with _first_stage(layout):
    received = _gather(message, axis_name)
  return _split(received, [matrix.shape for matrix in matrices])


def two_shot(
  layout: Layout,
  matrices: Sequence[jax.Array],
  axis_name: str,
  keys: jax.Array | None,
) -> list[jax.Array]:
  """Reduce and broadcast: each worker owns an Nth of the rows of each codec.

  The owner receives its rows from all workers, decodes and averages them in float32,
  encodes the mean and sends it to all. So a mean is quantized twice.

  Args:
    layout: the plan that the matrices follow.
    matrices: ``uint32[rows, row_words]`` for each codec.
    axis_name: the axis to exchange over.
    keys: ``uint32[leaves + codecs, 2]``, this worker's; the last ones round the means
      that it owns. None if no codec needs one.

  Returns:
    ``uint32[1, rows, row_words]`` for each codec, the same on every worker; rows are
    padded to a multiple of N.

  References:
    Grubic et al., 2018, section 2.4.1
  """
  workers = _axes.require_size(axis_name)
  shares = []
  for matrix in matrices:
    padded = jnp.pad(matrix, ((0, -matrix.shape[0] % workers), (0, 0)))
    shares.append(padded.reshape(workers, -1, matrix.shape[1]))
  message = jnp.concatenate([share.reshape(workers, -1) for share in shares], axis=1)
  with _first_stage(layout):
    received = lax.all_to_all(message, axis_name, 0, 0, tiled=True)
  owned = _split(received, [share.shape[1:] for share in shares])
  means = []
  for i, (codec, rows) in enumerate(zip(layout.codecs, owned, strict=True)):
    key = None if keys is None else keys[len(layout.slots) + i]
    encoded = codec.encode_rows(mean_of_rows(codec, rows), key=key)
    means.append(encoded.reshape(-1))
  with jax.named_scope("gradcomp_second_stage"):
    gathered = _gather(jnp.concatenate(means), axis_name)
  result = _split(gathered, [share.shape[1:] for share in shares])
  return [rows.reshape(1, -1, rows.shape[2]) for rows in result]


def _first_stage(layout: Layout) -> Any:
  return jax.named_scope(f"gradcomp_first_stage_{layout.elements}_elements")


def _gather(message: jax.Array, axis_name: str) -> jax.Array:
  """``[M]`` to ``[N, M]``, typed as equal on all workers where types are tracked."""
  if _axes.is_typed(axis_name):
    return lax.all_gather(message, axis_name, to="invarying")
  return lax.all_gather(message, axis_name)


def _split(received: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
  """Cuts ``[N, M]`` lines into ``[N, *shape]`` arrays that follow each other."""
  result = []
  start = 0
  for rows, words in shapes:
    stop = start + rows * words
    result.append(received[:, start:stop].reshape(-1, rows, words))
    start = stop
  return result
