"""The work of an instruction is that of XLA's own analysis of its cost."""

import random

import jax
import jax.numpy as jnp
import pytest
from jaxlib import _hlo as hlo
from jaxlib._jax import hlo_module_cost_analysis as analyze

from gradcomp._src.report.hlo_text import read_module
from gradcomp._src.report.work import Works
from tests.plugins.slow_cases import one_in


def ours(text):
  module = read_module(text)
  (root,) = (x for x in module.computations[module.entry] if x.is_root)
  found = Works(module).of(module.entry, root)
  return (found.flops, found.bytes)


def xla(text):
  parsed = hlo.hlo_module_from_text(text)
  costs = analyze(jax.devices()[0].client, parsed)
  return int(costs.get("flops", 0)), int(costs["bytes accessed"])


def lowered(function, *shapes):
  structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return jax.jit(function).lower(*structs).as_text("hlo")


@pytest.mark.parametrize("seed", one_in(10, range(200)))
def test_convolutions_count_what_is_not_padding(seed):
  """With strides, dilations of both, padding that is longer than a kernel, and groups.

  A matrix product for a TPU is one without or with spatial axes.
  """
  draw = random.Random(seed).randint
  rank, groups, batches = draw(0, 2), draw(1, 2), draw(1, 2)
  batches = batches if groups == 1 else 1
  several = lambda low, high: [draw(low, high) for _ in range(rank)]
  padding = list(zip(several(0, 3), several(0, 3), strict=True))
  features, outputs = draw(1, 4) * groups, draw(1, 3) * groups * batches
  left = (draw(1, 3) * batches, features, *several(5, 8))
  right = (outputs, features // groups, *several(1, 3))
  order = jax.lax.ConvDimensionNumbers(*[tuple(range(rank + 2))] * 3)
  windows = (several(1, 2), padding, several(1, 2), several(1, 2), order)
  function = lambda x, y: jax.lax.conv_general_dilated(
    x, y, *windows, feature_group_count=groups, batch_group_count=batches
  )
  text = lowered(function, left, right)
  assert " convolution(" in text
  assert ours(text) == xla(text)


@pytest.mark.parametrize(
  ("summed", "shared", "shapes"),
  [
    (((1,), (0,)), ((), ()), [(5, 6), (6, 7)]),
    (((2,), (2,)), ((0,), (0,)), [(2, 3, 4), (2, 5, 4)]),
    (((2, 3), (3, 1)), ((1, 0), (0, 2)), [(2, 3, 4, 5), (3, 5, 2, 4)]),
    (((), ()), ((), ()), [(3,), (4,)]),
  ],
)
def test_dots_count_two_for_each_product(summed, shared, shapes):
  """Whatever axes are summed over, or shared."""
  numbers = (summed, shared)
  text = lowered(lambda x, y: jax.lax.dot_general(x, y, numbers), *shapes)
  assert " dot(" in text
  assert ours(text) == xla(text)


FUSIONS = {
  "product": """
    b = f32[64,64] parameter(1)
    ROOT c = f32[64,64] dot(a, b), SUM""",
  "slice": """
    b = f32[64,64] parameter(1)
    c = f32[8,8] slice(a), slice={[0:8],[0:8]}
    d = f32[8,8] slice(a), slice={[8:16],[0:8]}
    e = f32[8,8] slice(b), slice={[0:8],[0:8]}
    f = f32[8,8] multiply(c, d)
    ROOT g = f32[8,8] dot(f, e), SUM""",
}


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_reads_and_writes_what_crosses_its_border(name):
  """Of an array that it slices, the slices."""
  result = "f32[8,8]" if name == "slice" else "f32[64,64]"
  text = f"""HloModule m
  inside {{
    a = f32[64,64] parameter(0){FUSIONS[name]}
  }}
  ENTRY main {{
    x = f32[64,64] parameter(0)
    ROOT y = {result} fusion(x, x), kind=kOutput, calls=inside
  }}"""
  summed = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
  flops, size = ours(text.replace("SUM", summed))
  assert flops == {"product": 2 * 64**3, "slice": 2 * 8**3}[name]
  # XLA's analysis takes one parameter for both, here each by itself.
  whole, part = 4 * 64 * 64, 4 * 8 * 8
  assert size == {"product": 3 * whole, "slice": 4 * part}[name]
