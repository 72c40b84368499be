"""Counts how often gradients do not fit the 12 bits of codecs.Lossless.

  python -m benchmarks.training.overflow [--nets transformer lstm lenet resnet]
    [--steps 24] [--data FILE] [--output FOLDER] [--quick]

The nets, the data and the four workers are those of benchmarks.training.adam, and so is
AdamW, of the plain mean. ResNet sees images of half the height and width. Gradients are
rounded to bfloat16. A leaf that travels in float32, because it is small, does not
count. In each step there are the rows of all workers, and those of their mean, which
the second stage of two_shot sends:

escapes  The share of elements whose exponents a row has to list.
most     How many of them a row of a worker has at most.
rows     The share of rows that have more than the 10 of a list.
repeats  The share of steps that are sent again: one row of a worker or of the mean, of
         any leaf, is full.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.common import cli
from benchmarks.common.tables import table
from benchmarks.training import adam
from benchmarks.training.plain_steps import mean_of, plain_steps
from gradcomp._src.codecs.protocol import to_tiles
from gradcomp._src.codecs.sums.records import Leaf
from gradcomp._src.exchange.layout import leaf_codecs
from gradcomp._src.kernels.common.planes import unpack_planes
from gradcomp._src.kernels.lossless import COLUMNS, ESCAPES
from gradcomp.codecs import Lossless

NETS = ("transformer", "lstm", "lenet", "resnet")
ESCAPE = 15  # the code of an element whose exponent is listed
Counts = dict[str, np.ndarray]  # of each step


def escapes_of(tree: Any, counted: list[bool]) -> jax.Array:
  """Returns the number of escapes in each row of a tree."""
  leaves = zip(jax.tree.leaves(tree), counted, strict=True)
  tiles = [to_tiles(x.astype(jnp.float32), Lossless()) for x, own in leaves if own]
  rows = jnp.concatenate([Lossless().encode_rows(x, None) for x in tiles])
  codes = unpack_planes(rows[:, 2 * COLUMNS : 3 * COLUMNS], 4)
  return jnp.sum(codes == ESCAPE, axis=tuple(range(1, codes.ndim)))


def measure(problem: adam.Problem, rate: Any, steps: int) -> dict[str, Any]:
  """Returns the counts of each step, and the numbers that they are shares of."""
  shapes = jax.eval_shape(problem.init, jax.random.key(0))
  leaves = [Leaf(x.shape) for x in jax.tree.leaves(shapes)]
  counted = [codec == Lossless() for codec in leaf_codecs(leaves, Lossless())]
  elements = sum(x.size for x, own in zip(leaves, counted, strict=True) if own)

  @jax.jit
  def counts(grads: Any) -> Any:
    escapes = jax.vmap(lambda x: escapes_of(x, counted))(grads)
    is_full = lambda number: jnp.sum(number > ESCAPES, axis=-1)
    return {
      "escapes": escapes.sum(),
      "most": escapes.max(),
      "full": is_full(escapes),
      "of_mean": is_full(escapes_of(mean_of(grads), counted)),
    }

  trees = plain_steps(problem, rate, steps, 0, jnp.bfloat16)
  found = [counts(grads) for grads in trees]
  rows = sum(-(-x.size // 1024) for x, own in zip(leaves, counted, strict=True) if own)
  by_name = {name: np.array([x[name] for x in found]).tolist() for name in found[0]}
  return by_name | {"elements": elements, "rows": rows}


def shares(net: str, found: dict[str, Any], start: int, stop: int) -> list[str]:
  """Returns a line of the table: the shares in some steps of a net."""
  escapes, full, of_mean = (
    np.array(found[name][start:stop]) for name in ("escapes", "full", "of_mean")
  )
  workers, steps = adam.WORKERS, len(escapes)
  again = full.any(axis=1) | (of_mean > 0)
  return [
    net,
    f"{found['elements']:,}",
    f"{start + 1} to {stop}",
    f"{escapes.sum() / (steps * workers * found['elements']):.3%}",
    str(max(found["most"][start:stop])),
    f"{full.sum() / (steps * workers * found['rows']):.3%}",
    f"{of_mean.sum() / (steps * found['rows']):.3%}",
    f"{again.mean():.0%}",
  ]


def markdown(record: dict[str, Any]) -> str:
  """Writes the table of all nets, at the start and at the end."""
  header = ["net", "elements", "steps", "escapes", "most", "rows", "rows of means"]
  header.append("repeats")
  rows = []
  for net, found in record["nets"].items():
    steps = len(found["escapes"])
    part = -(-steps // 4)
    for start, stop in ((0, part), (steps - part, steps)):
      rows.append(shares(net, found, start, stop))
  return "\n\n".join(
    [
      "# How often Lossless sends a step again",
      "`python -m benchmarks.training.overflow` writes this file, and says what the "
      f"columns are. {adam.WORKERS} workers, {record['steps']} steps of AdamW, on "
      f"{record['device']}.",
      table(header, rows) + "\n",
    ]
  )


def main() -> None:
  sys.stdout.reconfigure(line_buffering=True)
  args = cli.options(
    __doc__,
    "four steps of narrow nets, on numbers drawn at random",
    "folder of lossless_overflow.json and .md",
    nets=cli.Option([*NETS], ["transformer", "lenet"], choices=NETS),
    steps=cli.Option(24, 4),
    width=cli.Option([64, 128], [16, 16], "of the transformer and the LSTM"),
    data=cli.Option(None, help="file of the arrays", kind=Path),
  )
  arrays = adam.random_arrays() if args.quick else adam.load(args.data)
  record = {"steps": args.steps, "device": jax.devices()[0].device_kind}
  nets = {}
  for net in args.nets:
    own = adam.smaller(arrays) if net == "resnet" else arrays
    size = adam.FULL[net]._replace(
      width=dict(zip(NETS, args.width, strict=False)).get(net, 0)
    )
    rate = optax.cosine_decay_schedule(adam.FULL[net].rate, args.steps, alpha=0.1)
    nets[net] = measure(adam.problem(net, own, size), rate, args.steps)
    print(*shares(net, nets[net], 0, args.steps))
  record |= {"commit": cli.commit(), "nets": nets}
  print(markdown(record))
  cli.write(args.output, "lossless_overflow", record, markdown(record))


if __name__ == "__main__":
  main()
