"""The worked examples of all systems by name, which both frameworks run."""

from tests.compat import credit, ksuit, nvsubquadratic, poptorch

WORKED = {w.name: w for system in (nvsubquadratic, ksuit, credit, poptorch) for w in system.worked()}
