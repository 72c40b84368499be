"""Texts of programs: a module around a few lines, and those of compilers in ``hlo``.

``hlo/compiled`` has train steps that XLA compiled for TPUs and GPUs, ``hlo/scheduled``
those of a net of four layers. They are cut to lines that a report reads: collectives,
products and names, with no more layers than it takes to see a construct; what
``benchmarks.compilers.cut`` writes has more of the latter.
"""

import pathlib
import re

from gradcomp import wire_report

FOLDER = pathlib.Path(__file__).parent / "hlo"
ADD = """
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(f32[] a, f32[] b)
}
"""
G8 = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"
NBYTES = 8 * 128 * 4  # of x


def read(folder):
  """The texts of a folder by their names."""
  return {path.stem: path.read_text() for path in sorted((FOLDER / folder).iterdir())}


def unwrapped(text):
  """Instructions on one line each, as XLA prints them; ours go on behind blanks."""
  return re.sub(r"\n {4,}", " ", text)


def hlo(entry, computations="", sizes="replica_count=8"):
  """A module with the lines as its entry computation, after parameters x and y.

  ``X`` in the lines is the type of x.
  """
  text = f"""HloModule jit_step, is_scheduled=true, {sizes}
{ADD}{computations}
ENTRY %main.0_spmd (x: X, y: u8[3]) -> X {{
  x = X{{1,0:T(8,128)S(1)}} parameter(0), metadata={{op_name="x"}}
  y = u8[3]{{0:T(1024)(128)(4,1)}} parameter(1)
  {entry}
  ROOT %result = X copy(%x)
}}
"""
  return re.sub(r"\bX\b", "f32[8,128]", unwrapped(text))


def fields(text):
  """The rows of a text, and the fields of each, which a bar stands between or ends."""
  lines = [line for line in text.strip().splitlines() if not line.startswith("#")]
  return [re.split(r" \|(?: |$)", line) for line in lines]


def only(report):
  (collective,) = report.collectives
  return collective


def rows(text):
  """The kind, the workers and the bytes of each collective."""
  found = wire_report(text).collectives
  return [(x.kind, x.workers, x.bytes_sent) for x in found]


def named(scope):
  """The end of a line with a name."""
  return f', metadata={{op_name="{scope}"}}'


def gather(scope, nbytes=NBYTES):
  """A gather of that many bytes in a scope."""
  return f"all-gather(u8[{nbytes}] x), {G8}{named(f'{scope}/all_gather')}"
