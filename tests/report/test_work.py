"""The work of an instruction is that of XLA's own analysis of its cost."""

import jax
import jax.numpy as jnp
import pytest
from jaxlib import _hlo as hlo
from jaxlib._jax import hlo_module_cost_analysis as analyze

from gradcomp._src.report.hlo_text import read_module
from gradcomp._src.report.overlap_report import work_of


def ours(text):
  module = read_module(text)
  (root,) = (x for x in module.computations[module.entry] if x.is_root)
  found = work_of(module.computations[module.entry], root, {})
  return (found.flops, found.bytes)


def assert_same_work(opcode, function, *shapes):
  structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  text = jax.jit(function).lower(*structs).as_text("hlo")
  assert f" {opcode}(" in text
  costs = analyze(jax.devices()[0].client, hlo.hlo_module_from_text(text))
  assert ours(text) == (costs.get("flops", 0), costs["bytes accessed"])


# Spatial axes: the lengths of the input and of the kernel, the stride, the padding in
# front and behind, and the dilations of both; features, outputs and batches of a group;
# groups of features and of the batch. Of one axis, any two of its values and of the
# groups occur together.
CONVOLUTIONS = [
  ([], (3, 4, 2), (1, 1)),
  ([], (4, 1, 1), (2, 1)),
  ([], (1, 3, 3), (1, 2)),
  ([(5, 2, 2, (3, 0), 2, 1)], (1, 2, 3), (2, 1)),
  ([(8, 3, 1, (3, 2), 1, 2)], (2, 1, 1), (1, 2)),
  ([(8, 1, 1, (0, 2), 2, 1)], (3, 3, 2), (1, 1)),
  ([(8, 1, 2, (0, 0), 1, 2)], (1, 1, 1), (2, 1)),
  ([(5, 3, 2, (0, 0), 1, 2)], (4, 2, 2), (1, 1)),
  ([(5, 2, 2, (0, 2), 2, 2)], (1, 3, 1), (1, 2)),
  ([(5, 1, 1, (3, 0), 1, 1)], (2, 2, 3), (1, 2)),
  ([(8, 2, 1, (3, 0), 1, 1)], (1, 1, 2), (1, 1)),
  ([(8, 3, 1, (3, 2), 2, 1)], (2, 1, 2), (2, 1)),
  ([(5, 2, 1, (1, 3), 2, 1), (8, 3, 2, (2, 0), 1, 2)], (4, 2, 2), (1, 1)),
]


@pytest.mark.parametrize(("axes", "sizes", "groups"), CONVOLUTIONS)
def test_convolutions_count_what_is_not_padding(axes, sizes, groups):
  """A matrix product for a TPU is one without or with spatial axes."""
  lengths, kernel, *windows = zip(*axes, strict=True) if axes else [()] * 6
  (features, outputs, batch), (shared, batches) = sizes, groups
  left = (batch * batches, features * shared, *lengths)
  right = (outputs * shared * batches, features, *kernel)
  order = jax.lax.ConvDimensionNumbers(*[tuple(range(len(axes) + 2))] * 3)
  grouped = dict(feature_group_count=shared, batch_group_count=batches)
  convolve = jax.lax.conv_general_dilated
  function = lambda x, y: convolve(x, y, *windows, order, **grouped)
  assert_same_work("convolution", function, left, right)


# Whatever axes are summed over, or shared.
DOTS = [
  (((1,), (0,)), ((), ()), [(5, 6), (6, 7)]),
  (((2,), (2,)), ((0,), (0,)), [(2, 3, 4), (2, 5, 4)]),
  (((2, 3), (3, 1)), ((1, 0), (0, 2)), [(2, 3, 4, 5), (3, 5, 2, 4)]),
  (((), ()), ((), ()), [(3,), (4,)]),
]


@pytest.mark.parametrize(("summed", "shared", "shapes"), DOTS)
def test_dots_count_two_for_each_product(summed, shared, shapes):
  function = lambda x, y: jax.lax.dot_general(x, y, (summed, shared))
  assert_same_work("dot", function, *shapes)


SLICED = """c = f32[8,8] slice(a), slice={[0:8],[0:8]}
    d = f32[8,8] slice(a), slice={[8:16],[0:8]}
    e = f32[8,8] slice(b), slice={[0:8],[0:8]}
    f = f32[8,8] multiply(c, d)
    ROOT g = f32[8,8] dot(f, e), SUM"""
# Lines, the size of a matrix, and how many are read and written.
FUSIONS = [("ROOT c = f32[64,64] dot(a, b), SUM", 64, 3), (SLICED, 8, 4)]


@pytest.mark.parametrize(("lines", "size", "arrays"), FUSIONS)
def test_a_fusion_reads_and_writes_what_crosses_its_border(lines, size, arrays):
  """Of an array that it slices, the slices."""
  text = f"""HloModule m
  inside {{
    a = f32[64,64] parameter(0)
    b = f32[64,64] parameter(1)
    {lines}
  }}
  ENTRY main {{
    x = f32[64,64] parameter(0)
    ROOT y = f32[{size},{size}] fusion(x, x), kind=kOutput, calls=inside
  }}"""
  summed = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
  # XLA's analysis takes one parameter for both, here each by itself.
  assert ours(text.replace("SUM", summed)) == (2 * size**3, arrays * 4 * size**2)
