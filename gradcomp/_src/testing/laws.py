"""The laws, one function each; :func:`gradcomp.testing.check_codec` tries them all.

A law raises :class:`gradcomp.testing.BrokenLaw`, or returns. These are its arguments:

* ``codec``: the codec, as users make it.
* ``x``: the leaf to try, or a leaf of the shape to try. By default it is Gaussian, of
  two rows and a part of a third.
* ``transformation``: an optax transformation with one of gradcomp's in it, over the
  axis ``axis_name``.
* ``gradients``: trees with leaves ``[N, ...]``, of ``workers`` N, one tree a step.
"""

from gradcomp._src.testing.leaves import gradients_like
from gradcomp._src.testing.noise import (
  decoded_leaves_do_not_grow,
  elements_draw_apart,
  errors_are_contractions,
  errors_of_workers_cancel,
  key_decides_the_bits,
  mean_is_the_leaf,
  residuals_are_bounded,
  workers_choose_alike,
)
from gradcomp._src.testing.payloads import (
  batches_are_independent,
  bytes_are_the_claim,
  facts_are_plain,
  half_precision_is_computed_in_float32,
  is_a_value,
  is_pure,
  payload_is_rows_of_words,
  rows_stand_alone,
  same_bits_without_jit,
  sent_and_unsent_are_the_leaf,
  shapes_and_dtypes_return,
  zeros_behind_change_nothing,
)
from gradcomp._src.testing.steps import (
  bytes_are_explained,
  non_finite_gradients_are_seen,
  nothing_is_lost,
  same_bits_in_every_mode,
  state_is_stable,
  workers_agree,
)
from gradcomp._src.testing.values import (
  constants_are_exact,
  half_precision_keeps_its_range,
  large_numbers_keep_their_size,
  non_finite_elements_are_seen,
  odd_sizes_work,
  padding_never_leaks,
  tiny_numbers_stay_finite,
  zeros_decode_to_zeros,
)

__all__ = ["nothing_is_lost", "gradients_like"]
__all__ += ["decoded_leaves_do_not_grow", "errors_are_contractions"]
__all__ += ["residuals_are_bounded"]
__all__ += ["elements_draw_apart", "errors_of_workers_cancel", "key_decides_the_bits"]
__all__ += ["mean_is_the_leaf", "workers_choose_alike"]
__all__ += ["bytes_are_the_claim", "half_precision_is_computed_in_float32"]
__all__ += ["payload_is_rows_of_words", "rows_stand_alone", "shapes_and_dtypes_return"]
__all__ += ["zeros_behind_change_nothing"]
__all__ += ["batches_are_independent", "facts_are_plain", "is_a_value", "is_pure"]
__all__ += ["same_bits_without_jit", "sent_and_unsent_are_the_leaf"]
__all__ += ["bytes_are_explained", "non_finite_gradients_are_seen"]
__all__ += ["same_bits_in_every_mode", "state_is_stable", "workers_agree"]
__all__ += ["constants_are_exact", "half_precision_keeps_its_range"]
__all__ += ["large_numbers_keep_their_size", "non_finite_elements_are_seen"]
__all__ += ["odd_sizes_work", "padding_never_leaks", "tiny_numbers_stay_finite"]
__all__ += ["zeros_decode_to_zeros"]
