"""xshard: write a sharding down, plan the cheapest way to another, derive the gradient.

Rooms beside the names below:
`errors` the classes of all errors; `contractions` `einsum_type`; `steps` what plans are made of;
`state` names and transfers of trees; and, imported by name, `state.files` checkpoints and
`testing` equivalence tests.
"""

from xshard.modules import import_later

__version__ = "0.1.0"

# Its names are in `__init__.pyi`.
__all__, __getattr__, __dir__ = import_later(__name__, __file__)
