"""The names of `xshard`, for type checkers and for the package, which imports them when used."""

from xshard import contractions as contractions
from xshard import errors as errors
from xshard import reference as reference
from xshard import state as state
from xshard import steps as steps
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

__version__: str

__all__ = [
    "ContractionPlan", "Layout", "Link", "Mesh", "Needs", "Op", "Owners", "Plan", "Profile", "Rules",
    "Sharding", "Suggestion", "TrainingStep", "XshardError", "load_profile", "owned", "plan", "reference",
    "show", "suggest", "use_profile",
]  # fmt: skip
