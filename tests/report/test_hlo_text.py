"""HLO text is read as XLA prints a compiled program, or it is refused."""

import pytest

from gradcomp._src.report.hlo_text import read_module
from tests.report.texts import unwrapped

# All that the grammar has: values with blanks, strings with brackets, nested types.
TEXT = unwrapped(r"""HloModule jit_step, is_scheduled=true, replica_count=2,
    num_partitions=4

FileNames
1 "a {file}.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}, execution_thread="main"

body {
  s = (s32[], f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  ROOT r = (s32[], f32[8,128]{1,0}) custom-call(s), backend_config="\"all-reduce(x)}\""
}

ENTRY %main.0_spmd (x: f32[8,128], t: (s32[], f32[8,128])) -> f32[8,128]{1,0} {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0), sharding={devices=[4,1]<=[4]}
  %t = (s32[], /*index=1*/f32[8,128]{1,0}) parameter(1),
    metadata={op_name="t = f32[8] f(%x)"}
  %ROOT = (s32[], f32[8,128]{1,0}) while(%t), condition=%add, body=%body,
    backend_config={"known_trip_count":{"n":"5"}, "list":[1,{}]}
  %c = s32[2]{0} constant({1, 2})
  %g = f32[8,128]{1,0} all-reduce(%x), channel_id=1, replica_groups=mesh['a b'=2,'c'=4],
    device_ids=([4,2]T(1,0)) {'a b'}, to_apply=%add, control-predecessors={%ROOT, %c}
  ROOT %z = f32[8,128]{1,0} conditional(%c, %g, f32[8,128]{1,0} %x),
    branch_computations={%add, body}, replica_groups=[4,2]<=[2,4]T(1,0)
}
""")
MODULE = read_module(TEXT)


def test_a_module_has_its_instructions():
  counts = (MODULE.attributes[x] for x in ("replica_count", "num_partitions"))
  assert (*counts, MODULE.entry) == ("2", "4", "main.0_spmd")
  assert list(MODULE.computations) == ["add", "body", "main.0_spmd"]
  x, t, loop, c, reduced, last = found = MODULE.computations[MODULE.entry]
  assert [i.name for i in found] == ["x", "t", "ROOT", "c", "g", "z"]
  assert (x.type, x.opcode) == ("f32[8,128]{1,0:T(8,128)}", "parameter")
  assert t.op_name == "t = f32[8] f(%x)" and x.op_name == ""
  assert loop.calls == {"condition": ("add",), "body": ("body",)}
  assert loop.backend_config == '{"known_trip_count":{"n":"5"},"list":[1,{}]}'
  assert (c.arguments, c.operands) == (("{1,2}",), ())
  assert reduced.attributes["device_ids"] == "([4,2]T(1,0)){'a b'}"
  assert reduced.attributes["replica_groups"] == "mesh['a b'=2,'c'=4]"
  assert last.operands == ("c", "g", "x")
  assert last.arguments[2] == "f32[8,128]{1,0} %x"
  assert [i.is_root for i in found] == [False] * 5 + [True]
  assert last.calls == {"branch_computations": ("add", "body")}


@pytest.mark.parametrize(
  "printed, other",
  [
    (", to_apply=%add", ",\n    to_apply=%add"),
    ("condition=%add", "condition={\n  ROOT %n = pred[] constant(true)\n}"),
    ("constant({1, 2})", "constant({1, 2}) // }"),
    ("conditional(%c,", "conditional(s32[2] constant({1, 2}),"),
    ("%main.0_spmd (", "("),
    ("replica_groups=[4,2]", "[4,2]"),
    ("to_apply=%add,", "to_apply=%add,,"),
    ("%z =", "%x ="),
    ("body {", "add {"),
  ],
)
def test_other_forms_are_refused(printed, other):
  """XLA's own tests wrap lines, put computations in place, and comment."""
  assert printed in TEXT
  with pytest.raises(ValueError, match="`program` must be optimized HLO with"):
    read_module(TEXT.replace(printed, other))


def test_every_cut_is_refused():
  """A log or a full disk may end anywhere."""
  for end in range(len(TEXT.rstrip())):
    with pytest.raises(ValueError, match="`program` must be optimized HLO with"):
      read_module(TEXT[:end])
