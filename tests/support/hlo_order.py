"""Reads which instructions of a compiled program must come before which."""

import re

import jax


def entry_instructions(text):
  """Returns, for each name in the ENTRY computation, its operands and its line."""
  body = text[text.index("\nENTRY ") :]
  instructions = {}
  for line in body.splitlines()[1:]:
    if match := re.match(r"\s*(?:ROOT )?%([\w.\-]+) = .*? [a-z][\w\-]*\((.*)$", line):
      operands = re.sub(
        r"metadata=\{.*|calls=%[\w.\-]+|to_apply=%[\w.\-]+", "", match[2]
      )
      instructions[match[1]] = (re.findall(r"%([\w.\-]+)", operands), line)
  return instructions


def ancestors(instructions, name):
  found, waiting = set(), [name]
  while waiting:
    for operand in instructions[waiting.pop()][0]:
      if operand in instructions and operand not in found:
        found.add(operand)
        waiting.append(operand)
  return found


def compiled(function, *arguments):
  return entry_instructions(jax.jit(function).lower(*arguments).compile().as_text())


def first_collectives(instructions):
  """Returns the collectives that no other one comes before."""
  named = [n for n, (_, line) in instructions.items() if " all-to-all(" in line]
  return [n for n in named if not set(named) & ancestors(instructions, n)]


def weight_gradients(instructions, width):
  """Returns the products of the backward pass that have the shape of square weights."""
  product = rf"= f32\[{width},{width}\]\S* (dot|fusion|custom-call)\("
  gradient = re.compile(rf"{product}.*transpose\(jvp\(\)\)")
  return [n for n, (_, line) in instructions.items() if gradient.search(line)]
