"""The networks that the examples and the benchmarks train.

Those for images take any size from 8 x 8 on. All but the transformer, which is of flax
linen, are of flax nnx. Those with dropout take its ``rngs`` while they train.

Large leaves hold a multiple of 4096 elements where it costs nothing. A row of a 4-bit
payload holds as many, so few bytes are padding.
"""

import functools
from typing import Any

from flax import linen

from examples.lib.networks.images import MLP, VGG, AlexNet, Cropped, LeNet, ResNet
from examples.lib.networks.texts import GRU as GRU
from examples.lib.networks.texts import LSTM as LSTM
from examples.lib.networks.texts import Block as Block
from examples.lib.networks.texts import Transformer as Transformer
from examples.lib.networks.texts import turned as turned

IMAGES = {"lenet": LeNet, "resnet": ResNet, "mlp": MLP, "vgg": VGG, "alexnet": AlexNet}
TEXTS = {"gru": GRU, "lstm": LSTM, "transformer": Transformer}
DROPPING = ("mlp", "vgg", "alexnet", "lstm", "transformer")  # those with dropout


def for_images(
  name: str, shape: Any, classes: int, dropout: float | None = None
) -> Any:
  """Returns a function that makes a network from ``rngs``; None is its own dropout.

  Color images are cropped and mirrored.
  """
  options: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
  model = IMAGES[name]
  if shape[-1] == 3:
    model = functools.partial(Cropped, model, drops=name in DROPPING)
  return functools.partial(model, shape, classes, **options)


def for_text(
  name: str, symbols: int, dropout: float | None = None, *, stacked: bool = False
) -> Any:
  """Returns a network of flax linen, or a function from ``rngs`` to one of flax nnx."""
  options: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
  if stacked:
    options["stacked"] = True
  if issubclass(TEXTS[name], linen.Module):
    return TEXTS[name](symbols, **options)
  return functools.partial(TEXTS[name], symbols, **options)
