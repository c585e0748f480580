"""The benchmark of models: what was recorded, and that its claims follow from it."""

from benchmarks.models.__main__ import claims, shown
from tests.benchmarks.helpers import as_recorded, failing, recorded


def test_the_claims_follow_from_what_was_recorded() -> None:
    data = recorded("models")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in data["steps"]:
        figures = {key: row[key] for key in ("collectives", "bytes", "step_s")}
        found.setdefault(row["parameters"], {})[row["way"]] = figures
    judged = claims(found)
    assert as_recorded(judged) == data["claims"] and failing(judged) == []
    assert shown(found).row_count == 4
