"""The networks that the examples and the benchmarks train.

Those for images are made from an image's shape and a number of classes, and take images
of any size from 8 x 8 on. Those for text are made from a number of symbols. All but the
transformer, which is of flax linen, are of flax nnx. Networks with dropout take its
``rngs`` beside their input while they train.

Large leaves hold a multiple of 4096 elements where it costs nothing. A row of a 4-bit
payload holds as many, so few bytes are padding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import linen

from examples.lib.networks.alexnet import AlexNet as AlexNet
from examples.lib.networks.lenet import LeNet as LeNet
from examples.lib.networks.mlp import MLP as MLP
from examples.lib.networks.recurrent import GRU as GRU
from examples.lib.networks.recurrent import LSTM as LSTM
from examples.lib.networks.resnet import ResNet as ResNet
from examples.lib.networks.transformer import Block as Block
from examples.lib.networks.transformer import Transformer as Transformer
from examples.lib.networks.transformer import attention as attention
from examples.lib.networks.transformer import turned as turned
from examples.lib.networks.vgg import VGG as VGG

IMAGES = {
  "lenet": LeNet,
  "resnet": ResNet,
  "mlp": MLP,
  "vgg": VGG,
  "alexnet": AlexNet,
}
TEXTS = {"gru": GRU, "lstm": LSTM, "transformer": Transformer}
DROPPING = ("mlp", "vgg", "alexnet", "lstm", "transformer")  # those with dropout


def for_images(
  name: str, image_shape: Sequence[int], classes: int, dropout: float | None = None
) -> Callable[..., Any]:
  """Returns a function that makes a network from ``rngs``; None is its own dropout."""
  options = {} if dropout is None else {"dropout": dropout}
  return functools.partial(IMAGES[name], image_shape, classes, **options)


def for_text(
  name: str, symbols: int, dropout: float | None = None, *, stacked: bool = False
) -> Any:
  """Returns a network of flax linen, or a function from ``rngs`` to one of flax nnx.

  With ``stacked``, the blocks of a transformer are one loop.
  """
  options: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
  if stacked:
    options["stacked"] = True
  if issubclass(TEXTS[name], linen.Module):
    return TEXTS[name](symbols, **options)
  return functools.partial(TEXTS[name], symbols, **options)
