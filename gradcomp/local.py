"""Local steps: workers train for some steps between two exchanges."""

from gradcomp._src.local_steps.mean_over import mean_state
from gradcomp._src.local_steps.transform import local_params, local_steps

__all__ = ["local_params", "local_steps", "mean_state"]
