"""Finds the recipes, and makes one of them."""

import gradcomp

RECIPES = {
  name: make
  for name, make in vars(gradcomp).items()
  if "__signature__" in getattr(make, "__dict__", {})  # set by `recipe`
}
# What its name does not say: a factor or rules are needed.
NEEDED = {
  "loss_scaling_cast": {"factor": 2.0},
  "policy": {"rules": [("w", gradcomp.codecs.QSGD())]},
}


def make(name, **options):
  return RECIPES[name](**NEEDED.get(name, {}), **options)
