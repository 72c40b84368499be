"""The laws, one function each; ``check_codec`` tries them all.

A law raises :class:`gradcomp.testing.BrokenLaw`, or returns. These are its arguments:

* ``codec``: the codec, as users make it.
* ``x``: the leaf to try, or a leaf of the shape to try. By default it is Gaussian, of
  two rows and a part of a third.
* ``run``: steps of an optax transformation with one of gradcomp's in it, by
  :func:`gradcomp.testing.modes.run`.
"""

from gradcomp._src.testing import noise, payloads, states, steps, values
from gradcomp._src.testing.leaves import gradients_like
from gradcomp._src.testing.noise import *  # noqa: F403 - each file lists its laws
from gradcomp._src.testing.payloads import *  # noqa: F403
from gradcomp._src.testing.states import *  # noqa: F403
from gradcomp._src.testing.steps import *  # noqa: F403
from gradcomp._src.testing.values import *  # noqa: F403

__all__ = ["gradients_like"]
__all__ += noise.__all__ + payloads.__all__ + states.__all__
__all__ += steps.__all__ + values.__all__
