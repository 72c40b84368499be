"""The laws, one function each; :func:`gradcomp.testing.check_codec` tries them all.

A law raises :class:`gradcomp.testing.BrokenLaw`. Laws share the compiled programs of a
codec for leaves of one shape.
"""

from gradcomp._src.testing.conservation import nothing_is_lost as nothing_is_lost
from gradcomp._src.testing.leaves import gradients_like as gradients_like
from gradcomp._src.testing.noise import elements_draw_apart as elements_draw_apart
from gradcomp._src.testing.noise import (
  errors_of_workers_cancel as errors_of_workers_cancel,
)
from gradcomp._src.testing.noise import key_decides_the_bits as key_decides_the_bits
from gradcomp._src.testing.noise import mean_is_the_leaf as mean_is_the_leaf
from gradcomp._src.testing.noise import workers_choose_alike as workers_choose_alike
from gradcomp._src.testing.payloads import bytes_are_the_claim as bytes_are_the_claim
from gradcomp._src.testing.payloads import (
  half_precision_is_computed_in_float32 as half_precision_is_computed_in_float32,
)
from gradcomp._src.testing.payloads import (
  payload_is_rows_of_words as payload_is_rows_of_words,
)
from gradcomp._src.testing.payloads import rows_stand_alone as rows_stand_alone
from gradcomp._src.testing.payloads import (
  shapes_and_dtypes_return as shapes_and_dtypes_return,
)
from gradcomp._src.testing.payloads import (
  zeros_behind_change_nothing as zeros_behind_change_nothing,
)
from gradcomp._src.testing.pure import (
  batches_are_independent as batches_are_independent,
)
from gradcomp._src.testing.pure import facts_are_plain as facts_are_plain
from gradcomp._src.testing.pure import is_a_value as is_a_value
from gradcomp._src.testing.pure import is_pure as is_pure
from gradcomp._src.testing.pure import same_bits_without_jit as same_bits_without_jit
from gradcomp._src.testing.pure import (
  sent_and_unsent_are_the_leaf as sent_and_unsent_are_the_leaf,
)
from gradcomp._src.testing.range import (
  half_precision_keeps_its_range as half_precision_keeps_its_range,
)
from gradcomp._src.testing.range import (
  large_numbers_keep_their_size as large_numbers_keep_their_size,
)
from gradcomp._src.testing.scan import state_is_stable as state_is_stable
from gradcomp._src.testing.steps import bytes_are_explained as bytes_are_explained
from gradcomp._src.testing.steps import (
  non_finite_gradients_are_seen as non_finite_gradients_are_seen,
)
from gradcomp._src.testing.steps import (
  same_bits_in_every_mode as same_bits_in_every_mode,
)
from gradcomp._src.testing.steps import workers_agree as workers_agree
from gradcomp._src.testing.values import constants_are_exact as constants_are_exact
from gradcomp._src.testing.values import (
  non_finite_elements_are_seen as non_finite_elements_are_seen,
)
from gradcomp._src.testing.values import odd_sizes_work as odd_sizes_work
from gradcomp._src.testing.values import padding_never_leaks as padding_never_leaks
from gradcomp._src.testing.values import (
  tiny_numbers_stay_finite as tiny_numbers_stay_finite,
)
from gradcomp._src.testing.values import zeros_decode_to_zeros as zeros_decode_to_zeros
