"""xshard: write a sharding down, plan the cheapest way to another, derive the gradient.

Rooms beside the names below:
`errors` the classes of all errors; `contractions` `einsum_type`; `steps` what plans are made of;
`state` names and transfers of trees; and, imported by name, `state.files` checkpoints and
`testing` equivalence tests.
"""

from xshard import errors as errors
from xshard import reference
from xshard import state as state
from xshard.contractions.plan import ContractionPlan
from xshard.cost.machine import load_profile, use_profile
from xshard.cost.model import Link, Profile
from xshard.cost.model import ProfileLike as ProfileLike
from xshard.errors import XshardError
from xshard.layout import Layout, Mesh, Sharding
from xshard.notation.maps import Needs, Owners
from xshard.pictures.show import show
from xshard.planner import plan
from xshard.plans.plan import Plan
from xshard.rules import Rules, owned
from xshard.step.record.op import Op
from xshard.step.record.training_step import TrainingStep
from xshard.step.say.suggestion import Suggestion
from xshard.step.suggest import suggest

__version__ = "0.1.0"

__all__ = [
    "ContractionPlan", "Layout", "Link", "Mesh", "Needs", "Op", "Owners", "Plan", "Profile", "Rules",
    "Sharding", "Suggestion", "TrainingStep", "XshardError", "load_profile", "owned", "plan", "reference",
    "show", "suggest", "use_profile",
]  # fmt: skip
