"""Says which codec and exchange fit a model and a link, and whether any does."""

from gradcomp.planner._candidates import CANDIDATES as CANDIDATES
from gradcomp.planner._candidates import Candidate as Candidate
from gradcomp.planner._errors import omega as omega
from gradcomp.planner._mean_error import mean_error as mean_error
from gradcomp.planner._plan import Plan as Plan
from gradcomp.planner._plan import plan as plan
from gradcomp.planner._rows import Predicted as Predicted
from gradcomp.planner._rows import Refusal as Refusal
from gradcomp.planner._speeds import packaged_speeds as packaged_speeds
