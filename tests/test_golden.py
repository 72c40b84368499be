"""Nothing changes a bit of any result or state, unless it means to."""

import golden
import pytest

HASHES = golden.read()
# Of a plain run: a case for each kind of sum and exchange.
PLAIN = {
  (codec, exchange, 4) for codec, chosen in golden.KINDS for exchange in (chosen,)
}


def parameters():
  for case in golden.cases():
    plain = case.mode == "vmap" and (case.codec, case.exchange) in golden.KINDS
    yield pytest.param(case, id=case.name, marks=() if plain else pytest.mark.slow)


@pytest.mark.parametrize("case", parameters())
def test_outputs_and_states_have_the_bits_that_they_had(case):
  assert golden.digest(case) == HASHES[case.name]


def test_every_hash_has_its_case():
  assert [case.name for case in golden.cases()] == list(HASHES)
