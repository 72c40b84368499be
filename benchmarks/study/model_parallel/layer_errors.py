"""Measures how far data types round the arrays of each layer, in nets of float32."""

import functools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.study.model_parallel import ways
from examples.lib import cut_layers
from gradcomp.codecs import Codec, EightBit

# Mean relative errors in percent of three layers, from table 2 of the paper.
PAPER = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
Net = Callable[..., jax.Array]


def errors_of(
  net: Net, layers: cut_layers.Layers, images: ways.Images, key: jax.Array
) -> dict[str, dict[str, list[float]]]:
  """Returns the mean relative errors in percent of one trained net's batch, by layers.

  They are by kinds and types, without zeros. Activations begin with the inputs and end
  with the logits; gradients are those of weights; errors are those of activations.
  Types that end in ``_paper`` are scaled by 10, as in the paper's table, and the others
  by the largest element.
  """
  codecs = {name: EightBit(dtype=name) for name in ways.TYPES} | ways.with_offset(1)
  found = lambda codec, each: [float(_percent(codec, x)) for x in each]
  return {
    kind: {name: found(codec, each) for name, codec in codecs.items()}
    for kind, each in _arrays(net, layers, images, key).items()
  }


@functools.partial(jax.jit, static_argnums=0)
def _arrays(
  net: Net, layers: cut_layers.Layers, images: ways.Images, key: jax.Array
) -> dict[str, list[jax.Array]]:
  """Returns what workers would send of a batch, layer by layer."""

  def with_sums(layers: Any, added: Any) -> Any:
    seen = []

    def gather(y: jax.Array, layer: int) -> jax.Array:
      seen.append(y)
      return y + added[layer]  # its gradient is the error of these activations

    keys = {"key": key, "own_key": key}
    return ways.loss(layers, net, images, gather=gather, **keys), seen

  zeros = [jnp.zeros((len(images.x), layer["b"].size)) for layer in layers]
  (grads, errors), seen = jax.grad(with_sums, (0, 1), has_aux=True)(layers, zeros)
  inputs = cut_layers.dropped(images.x, cut_layers.DROPOUT[0], key)
  weights = [layer["w"] for layer in grads]
  return {"activations": [inputs, *seen], "gradients": weights, "errors": errors}


@functools.partial(jax.jit, static_argnums=0)
def _percent(codec: Codec, x: jax.Array) -> jax.Array:
  distance = jnp.abs(codec.decode(codec.encode(x), like=x) - x)
  ratio = jnp.where(x == 0, 0.0, distance / jnp.where(x == 0, 1.0, jnp.abs(x)))
  return 100 * ratio.sum() / (x != 0).sum()
