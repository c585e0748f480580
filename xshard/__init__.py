"""xshard: write a sharding down, plan the cheapest way to another, derive the gradient."""

from xshard import reference
from xshard.contractions import einsum_type
from xshard.contractions.plan import ContractionPlan
from xshard.cost.machine import use_profile
from xshard.cost.model import Link, Profile, ProfileError
from xshard.cost.profile_files import load_profile
from xshard.errors import (
    DtypeError,
    LinearityError,
    MeshError,
    NotationError,
    PlanError,
    ShapeError,
    XshardError,
)
from xshard.layout import Layout, Mesh, Sharding
from xshard.layout.block_rows import output_dim
from xshard.layout.layout import parse_expression
from xshard.pictures.show import show
from xshard.planner import plan
from xshard.plans.plan import Plan, Stage
from xshard.plans.transfer import Transfer
from xshard.replicas import ReplicaError
from xshard.rules import Rules

__version__ = "0.1.0"

TransferPlan = Plan  # a plan between two meshes had a class of its own, whose name stays importable

__all__ = [
    "ContractionPlan",
    "DtypeError",
    "Layout",
    "LinearityError",
    "Link",
    "Mesh",
    "MeshError",
    "NotationError",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "ReplicaError",
    "Rules",
    "ShapeError",
    "Sharding",
    "Stage",
    "Transfer",
    "TransferPlan",
    "XshardError",
    "einsum_type",
    "load_profile",
    "output_dim",
    "parse_expression",
    "plan",
    "reference",
    "show",
    "use_profile",
]
