"""Scheduled programs with an asynchronous collective, written in each of its forms."""

import re
from typing import NamedTuple

from gradcomp import overlap_report
from tests.report.texts import unwrapped

GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"
DEVICES = ",".join(f"{slice_}0000{chip}" for slice_ in (1, 2) for chip in range(4))
MEGASCALE = f"""is_host_transfer=true, frontend_attributes={{
    _xla_host_transfer_rendezvous="NAME",_xla_megascale_target={{{{{DEVICES}}}}},
    _xla_megascale_transfer_type="ALL_TO_ALL"}}"""
PAIRS = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,0}}}"
FLOPS = 2 * 512**3
PRODUCT = "m = W dot(w, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


class Form(NamedTuple):
  """An asynchronous collective of ``x``: NAME is its own in all its parts."""

  kind: str
  start: str
  done: str
  inside: str = ""  # the computations that it calls


WRAPPED = f"""NAME.inside {{
  NAME.y = X parameter(0)
  ROOT NAME.z = X all-to-all(NAME.y), {GROUPS}
}}"""
# U is the type of what an all-gather returns, S that of a send.
plain = lambda kind, type_, result, groups=GROUPS: Form(
  *(kind, f"NAME = {type_} {kind}-start(x), {groups}"),
  f"NAME.end = {result} {kind}-done(NAME)",
)
wrapped = lambda start, done: Form("all-to-all", start, done, WRAPPED)
RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}"
FORMS = {
  "all-gather": plain("all-gather", "(X, U)", "U"),
  "all-to-all": plain("all-to-all", "((X), X)", "X"),
  "collective-permute": plain("collective-permute", "(X, X, u32[], u32[])", "X", RING),
  "wrapped": wrapped(
    "NAME = ((X), X) async-start(x), calls=NAME.inside", "NAME.end = X async-done(NAME)"
  ),
  "wrapped_send": Form(
    "collective-permute",
    """NAME.t = token[] after-all()
  NAME = ((X, token[]), (S, S), s32[]) async-start(x, NAME.t), calls=NAME.inside""",
    "NAME.end = (S, S) async-done(NAME)",
    f"""NAME.inside {{
  NAME.y = X parameter(0)
  NAME.k = token[] parameter(1)
  NAME.s = S send(NAME.y, NAME.k), channel_id=1, {PAIRS}
  NAME.r = S recv(NAME.k), channel_id=1, {PAIRS}
  ROOT NAME.z = (S, S) tuple(NAME.s, NAME.r)
}}""",
  ),
  "updated": wrapped(
    # In the text of some XLA versions all three name the computation.
    "NAME = ((X), X) async-start(x), calls=NAME.inside\n"
    "  NAME.next = ((X), X) async-update(NAME), calls=NAME.inside",
    "NAME.end = X async-done(NAME.next), calls=NAME.inside",
  ),
  "SparseCore": wrapped(
    'NAME = ((X), X) call-start(x), to_apply=NAME.inside, async_execution_thread="s"',
    "NAME.end = X call-done(NAME)",
  ),
  "slices": Form(
    "all-to-all",
    f"""NAME.token = token[] after-all()
  NAME = S send(x, NAME.token), channel_id=1, {MEGASCALE}
  NAME.in = S recv(NAME.token), channel_id=2, {MEGASCALE}
  NAME.out = token[] send-done(NAME), channel_id=1, is_host_transfer=true""",
    "NAME.end = (X, token[]) recv-done(NAME.in), channel_id=2, is_host_transfer=true",
  ),
  "chain": Form(
    "all-gather",
    "NAME = (X, U, u32[]) fusion(x), kind=kCustom, calls=NAME.Start",
    "NAME.end = U fusion(x), kind=kCustom, calls=NAME.Done",
    "\n".join(
      f"""NAME.{part} {{
  NAME.{part}.y = X parameter(0)
  NAME.{part}.g = U all-gather(NAME.{part}.y), channel_id=1, {GROUPS},
    frontend_attributes={{chain_id="CHAIN"}}
  ROOT NAME.{part}.r = {result} custom-call(NAME.{part}.g),
    custom_call_target="AsyncCollective{part}"
}}"""
      for part, result in (("Start", "(X, U, u32[])"), ("Done", "U"))
    ),
  ),
}


def form(name, own="a"):
  """A form whose names begin with a letter of its own."""
  fill = lambda text: text.replace("NAME", own).replace("CHAIN", str(ord(own)))
  return Form(*map(fill, FORMS[name]))


def program(*lines, inside=""):
  """A module of eight devices; X, W, U and S stand for types."""
  text = "\n  ".join(["x = X parameter(0)", "w = W parameter(1)", *lines])
  text = f"{inside}\nENTRY main {{\n  s = f32[] parameter(2)\n  {text}\n}}"
  types = {"S": "(X, u32[], token[])", "W": "f32[512,512]", "U": "u32[64,64]"}
  for letter, type_ in [*types.items(), ("X", "u32[8,64]")]:
    text = re.sub(rf"\b{letter}\b", type_, text)
  return f"HloModule jit_step, is_scheduled=true, replica_count=8\n{unwrapped(text)}"


def names(overlap):
  return [work.name for work in overlap.beside]


def the_one(*lines, inside=""):
  (found,) = overlap_report(program(*lines, inside=inside)).collectives
  return found


_, START, DONE, _ = form("all-to-all")
STARTED = "((X), X)"  # the type of what is on its way
