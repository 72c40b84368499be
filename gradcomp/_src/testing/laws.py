"""The laws, one function each; ``check_codec`` tries them all.

A law raises :class:`gradcomp.testing.BrokenLaw`, or returns. These are its arguments:

* ``codec``: the codec, as users make it.
* ``x``: the leaf to try, or a leaf of the shape to try. By default it is Gaussian, of
  two rows and a part of a third.
* ``run``: steps of an optax transformation with one of gradcomp's in it, by
  :func:`gradcomp.testing.modes.run`.
"""

from gradcomp._src.testing import codec, noise, steps
from gradcomp._src.testing.codec import *  # noqa: F403 - each file lists its laws
from gradcomp._src.testing.kit import gradients_like
from gradcomp._src.testing.noise import *  # noqa: F403
from gradcomp._src.testing.steps import *  # noqa: F403

__all__ = ["gradients_like"]
__all__ += codec.__all__ + noise.__all__ + steps.__all__
