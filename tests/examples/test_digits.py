"""The two small trainers learn, with a few bits and with the mean that they replace."""

import re

import pytest

from examples import digits_pmap, digits_shard_map
from tests.support.pages import ROOT


@pytest.mark.parametrize("example", [digits_pmap, digits_shard_map])
def test_small_trainers_learn_by_few_bits_and_by_pmean(example, capsys):
  for plain, share in ((True, 1.0), (False, 0.14)):
    example.main(steps=21, plain=plain)
    out = capsys.readouterr().out
    first, *_, last = map(float, re.findall(r"^step \d+: loss (\S+)$", out, re.M))
    assert last < 0.7 * first
    (sent,) = re.findall(r"^Sends (\S+) x the bytes of a plain f32 mean", out, re.M)
    assert float(sent) == pytest.approx(share, abs=0.01)


def test_small_trainers_are_read_in_a_minute():
  for name in ("digits_pmap", "digits_shard_map"):
    source = (ROOT / "examples" / f"{name}.py").read_text()
    assert source.count("\n") <= 60
    assert "gradcomp.qsgd(bits=4" in source and "lax.pmean(grads" in source
