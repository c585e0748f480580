"""The worked examples of all systems by name, which both frameworks run, and the system of each."""

from tests.compat import credit, ksuit, nvsubquadratic, poptorch

SYSTEMS = {"nvsubquadratic": nvsubquadratic, "ksuit": ksuit, "credit": credit, "poptorch": poptorch}
SYSTEM_OF = {w.name: name for name, system in SYSTEMS.items() for w in system.worked()}
WORKED = {w.name: w for system in SYSTEMS.values() for w in system.worked()}
