"""Builds the transformation of a policy: a codec for each leaf, by its path."""

from collections.abc import Sequence
from typing import Unpack

import optax

from gradcomp._src.codecs.policy import Policy
from gradcomp._src.codecs.protocol import LeafCodec
from gradcomp._src.core.transform import compress
from gradcomp._src.transforms.options import CompressOptions, checked, recipe


@recipe(Policy)
def policy(
  rules: Sequence[tuple[str, LeafCodec]], **options: Unpack[CompressOptions]
) -> optax.GradientTransformationExtraArgs:
  r"""Averages gradients over workers, each leaf encoded by the codec of its path.

  It is :func:`gradcomp.compress` with the codec :class:`gradcomp.codecs.Policy`. All
  leaves travel in the same messages, whatever their codecs are:

  .. math:: \frac{1}{N} \sum_i Q_l(g_{i,l}), \qquad Q_l \text{ of the first rule that
     matches the path of leaf } l

  With the last layer and all that is small in full precision, as Wen et al. (section
  5), Han et al. (section 4) and Fang et al. (section 2.1) train::

    exchange = gradcomp.policy(
      [("norm|bias|^head/", Dense()), ("^embed/", TopK()), (".", QSGD(bits=4))],
      axis_name="data",
    )

  :func:`gradcomp.explain` shows the rule of each leaf. ``exchange`` must be one that
  all codecs allow. With the default, a step takes ``two_shot`` where all do, and else
  ``all_gather``. Where a codec is sparse, it takes ``all_gather`` for all as long as
  that sends less than a plain mean: give ``exchange="two_shot"`` otherwise. The result
  is unbiased if all codecs are, and keeps a residual by default if one is biased.

  Raises:
    ValueError: rules are no such pairs; in ``init`` and ``update``, a rule matches no
      leaf.

  Example:
    >>> from gradcomp.codecs import QSGD, Dense
    >>> tx = policy([("b", Dense()), (".", QSGD(bits=4))], axis_name="data")
    >>> params = {"b": jnp.zeros(8192), "w": jnp.zeros((256, 256))}
    >>> print(gradcomp.explain(tx, params, workers=4))
    leaf   shape       codec   bits  exchange  message    sent   /f32   /bf16  rule
    ['b']  [8192]      Dense     32  two_shot        0  49,152      1       2  b
    ['w']  [256, 256]  QSGD   4.062  two_shot        0  49,920  0.127  0.2539  .
    total                                               99,072  0.224  0.4479
    Bytes that each of 4 workers sends a step. It receives as many.
    two_shot: it sends 2/N of all_gather's bytes.
    An owner keeps what encoding a mean loses, 65,536 bytes, if optimizer.init knows the
      workers.
  """
  checked(policy, options)
  return compress(Policy(rules), **options)
