"""Measures the squared error of each codec beside its bits, and beside other codes.

  python -m benchmarks.codecs.distortion [--quick] [--output FOLDER]

The vectors have 65,536 elements. *Gaussian* and *Laplace* ones are drawn, and all
workers hold the same one, which is where a bias shows: no mean removes it. Those of
*lenet*, *transformer* and *resnet* are the middle of real gradients, of each worker's
own batch, after some steps of AdamW in float32. The nets and the data are the study's:
Fashion-MNIST, and the Brown corpus by characters.

An error is that of the mean of N workers, squared, over the mean of the workers'
squared norms; N = 1 is one message. Bits are those of a message of `all_gather` over
the elements, with all that is in it: scales, levels, indices and padding. The bound is
2^(-2b), which no code of Gaussian numbers in b bits is below. *Lost* are the bits by
which a code's message is longer than the bound's at the error that it has there.

Eden is the library's, by blocks. EDEN and THC were measured once, by models in NumPy,
and keep their rows of the record.
"""

import itertools
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

import gradcomp
from benchmarks.common import cli, tables
from benchmarks.study import tasks
from examples.lib.training import AXIS, Task
from gradcomp import codecs, contrib

WORKERS = (1, 4, 16)
NETS = {"lenet": "fashion-mnist", "transformer": "brown", "resnet": "fashion-mnist"}
DRAWN = ("Gaussian", "Laplace")
BATCH = 16  # samples of a step, and of a worker's gradient
_COLORS = {"gradcomp": "#2f6db3", "others": "#c4622d"}
RMS: dict[str, Any] = {"norm": "rms", "levels": "uniform", "rounding": "nearest"}
FITTED: dict[str, Any] = {"levels": "nonuniform"}
SMALL: dict[str, Any] = {"bits": 2, "bucket_size": 128}

_bits = lambda n: f"{n} bit{'s' * (n > 1)}"
_least = lambda n: contrib.Eden(bits=n, scale="least squares")
_rotated = lambda n: codecs.QSGD(bits=n, rotate=32, **RMS)
CODECS: dict[str, Any] = {
  "QSGD, 1 bit": codecs.QSGD(bits=1, levels="uniform"),
  **{f"QSGD, {bits} bits": codecs.QSGD(bits=bits) for bits in (2, 3, 4, 5, 6, 8)},
  **{f"QSGD, {n} bits, fitted": codecs.QSGD(bits=n, **FITTED) for n in (2, 3, 4)},
  "QSGD, 2 bits, buckets of 128": codecs.QSGD(**SMALL),
  "QSGD, 2 bits, buckets of 128, fitted": codecs.QSGD(**SMALL, **FITTED),
  **{f"QSGD, {_bits(n)}, rms": codecs.QSGD(bits=n, **RMS) for n in (1, 2, 3, 4)},
  **{f"QSGD, {_bits(n)}, rms, rotated": _rotated(n) for n in (1, 2, 4)},
  **{f"Eden, {_bits(n)}": contrib.Eden(bits=n) for n in (1, 2, 3, 4, 8)},
  **{f"Eden, {_bits(n)}, least squares": _least(n) for n in (1, 2, 4)},
  "Eden, 1 bit, two rotations": contrib.Eden(bits=1, rotations=2),
  "1-bit SGD, buckets of 512": codecs.OneBit(bucket_size=512),
  "signs, buckets of 64": codecs.Sign(),
  "TernGrad": codecs.Ternary(),
  "TernGrad, base 3": codecs.Ternary(packing="base3"),
  "natural": codecs.Natural(),
  "8 bits, dynamic tree": codecs.EightBit(bucket_size=512),
  "float (5, 2)": codecs.FloatCast(accumulate="float32"),
  "MXFP8": codecs.BlockFloat(),
  "MXFP6": codecs.BlockFloat(element="e2m3"),
  "MXFP4": codecs.BlockFloat(element="e2m1"),
  "NVFP4": codecs.BlockFloat(element="e2m1", scale="e4m3", block_size=16),
  "top-k, 1/64": codecs.TopK(density=1 / 64),
  "top-k, 1/16": codecs.TopK(density=1 / 16),
  "random k, 1/8": codecs.RandomK(density=1 / 8),
}
QUICK = ("QSGD, 4 bits", "QSGD, 1 bit, rms")
RECORD = cli.RESULTS / "codecs" / "distortion.json"


def drawn(size: int, seed: int) -> dict[str, np.ndarray]:
  """Draws a vector of each kind for all workers: ``float32[N, size]``."""
  rng = np.random.default_rng(seed)
  found = {"Gaussian": rng.standard_normal(size), "Laplace": rng.laplace(size=size)}
  return {name: np.tile(np.float32(x), (max(WORKERS), 1)) for name, x in found.items()}


def gradient(net: str, dataset: str, steps: int, size: int) -> np.ndarray:
  """Trains, and returns the middle of each worker's gradient: ``float32[N, size]``."""
  source = tasks.source(net, dataset)
  mesh = jax.make_mesh((1,), (AXIS,))
  task = Task(source.model, source.test, mesh, known=source.arrays[0][: tasks.KNOWN])
  batches, tx = source.batches(BATCH, seed=0), optax.adamw(1e-3)
  of_batch = jax.jit(jax.grad(lambda params, batch: task.loss_fn(params, batch)))
  update, params = jax.jit(tx.update), jax.device_get(task.init_params(0))
  state = tx.init(params)
  for _ in range(steps):
    updates, state = update(of_batch(params, next(batches)), state, params)
    params = optax.apply_updates(params, updates)
  flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
  rows = [flat(of_batch(params, next(batches))) for _ in range(max(WORKERS))]
  start = (rows[0].size - size) // 2
  return np.stack(rows)[:, start : start + size]


def ours(name: str, vectors: dict[str, np.ndarray], size: int) -> dict[str, Any]:
  """Returns a codec's bits an element, and the errors of means of workers."""
  codec = CODECS[name]
  way: Any = {"exchange": "all_gather", "feedback": None, "min_leaf_size": 0}
  tx = gradcomp.compress(codec, axis_name="data", **way)
  like = jax.ShapeDtypeStruct((size,), np.float32)
  # One of two workers sends its message once.
  bits = 8 * float(gradcomp.explain(tx, like, workers=2).bytes_per_step) / size
  mean = lambda x: tx.update(x, tx.init(x))[0]
  means = jax.jit(jax.vmap(mean, axis_name="data"))
  of = lambda x: error(np.asarray(means(x)[0]), x)
  errors = {source: [of(x[:n]) for n in WORKERS] for source, x in vectors.items()}
  found = {"by": "gradcomp", "code": name, "bits": bits}
  return found | {"unbiased": codec.unbiased, "errors": errors}


def error(mean: np.ndarray, x: np.ndarray) -> float:
  """Returns the squared error of a mean of vectors over their mean squared norm."""
  wide = x.astype(np.float64)
  return float(np.sum((mean - wide.mean(0)) ** 2) / np.mean(np.sum(wide**2, 1)))


def plot(found: list[Any], path: pathlib.Path) -> None:
  """Draws the errors of one message over bits, with a panel for each kind of vector."""
  sources = list(found[0]["errors"])
  figure = Figure(figsize=(3.1 * len(sources), 3.6), layout="constrained")
  axes = figure.subplots(1, len(sources), sharey=True, squeeze=False)[0]
  bits = np.linspace(0.5, 8.5)
  handles: list[Any] = []
  for axis, source in zip(axes, sources, strict=True):
    handles = [axis.semilogy(bits, 4.0**-bits, "--", color="0.5", lw=1)[0]]
    for (by, color), unbiased in itertools.product(_COLORS.items(), (True, False)):
      of = [x for x in found if (x["by"], x["unbiased"]) == (by, unbiased)]
      errors = [x["errors"][source][0] for x in of]
      mark, face = ("o", color) if unbiased else ("s", "none")
      places = [x["bits"] for x in of]
      handles += axis.plot(places, errors, mark, color=color, mfc=face, ms=5)
    axis.set_title(source if source in DRAWN else f"gradient, {source}", fontsize=10)
    axis.set_xlabel("bits an element")
  axes[0].set_ylabel("squared error of one message")
  names = ["bound of Gaussian", "gradcomp, unbiased", "gradcomp, biased"]
  names += ["EDEN, unbiased", "EDEN and THC, biased"]
  place: Any = {"loc": "outside lower center", "frameon": False}
  figure.legend(handles, names, ncols=len(names), **place)
  figure.savefig(path, dpi=100, metadata={"Software": None})


def main() -> None:
  options = cli.options(
    __doc__,
    "two codecs, few elements, and gradients of small data sets",
    "folder of the two files",
    size=cli.Option(2**16, 2**13, "elements of a vector, a power of two"),
    steps=cli.Option(30, 2, "of a training"),
  )
  vectors = drawn(options.size, seed=0)
  for net, dataset in ({"lenet": "digits"} if options.quick else NETS).items():
    vectors[net] = gradient(net, dataset, options.steps, options.size)
  found = []
  for name in QUICK if options.quick else CODECS:
    found.append(row := ours(name, vectors, options.size))
    first = {source: errors[0] for source, errors in row["errors"].items()}
    lost = row["bits"] + math.log2(first["Gaussian"]) / 2  # at the error of one message
    tables.show({name: {"bits": row["bits"], "lost": lost, **first}})
  if options.output:
    if not options.quick:
      kept = json.loads(RECORD.read_text())["rows"]
      found += [row for row in kept if row["by"] == "others"]
    about = {"size": options.size, "steps": options.steps, "workers": WORKERS}
    cli.write_json(options.output / "distortion.json", {**about, "rows": found})
    plot(found, options.output / "distortion.png")


if __name__ == "__main__":
  main()
