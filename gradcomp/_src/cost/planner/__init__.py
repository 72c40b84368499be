"""The planner: chooses a codec and an exchange for a model and a link, or neither."""

from gradcomp._src.cost.planner.candidates import CANDIDATES as CANDIDATES
from gradcomp._src.cost.planner.candidates import Candidate as Candidate
from gradcomp._src.cost.planner.candidates import packaged_speeds as packaged_speeds
from gradcomp._src.cost.planner.choice import Plan as Plan
from gradcomp._src.cost.planner.choice import PlanOptions as PlanOptions
from gradcomp._src.cost.planner.choice import plan as plan
from gradcomp._src.cost.planner.compare import Predicted as Predicted
from gradcomp._src.cost.planner.compare import Refusal as Refusal
from gradcomp._src.cost.planner.errors import mean_error as mean_error
from gradcomp._src.cost.planner.errors import omega as omega
