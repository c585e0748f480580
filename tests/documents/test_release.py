"""Workflows, issue forms and the citation say what the package says; nothing of them is run here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import xshard as xs

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path: Path) -> dict[str, Any]:
    # YAML takes the key `on` for a boolean.
    return {str(key): value for key, value in yaml.safe_load(path.read_text()).items()}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(path: Path) -> None:
    workflow = read(path)
    targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
            continue
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            for target in re.findall(r"make ([\w-]+)", step.get("run", "")):
                assert target in targets


def test_tests_run_on_each_python_that_the_package_names() -> None:
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    jobs = read(GITHUB / "workflows/tests.yml")["jobs"]
    matrix = jobs["tests"]["strategy"]["matrix"]["include"]
    assert [each["python"] for each in matrix] == named
    assert f">={named[0]}" == PROJECT["requires-python"]
    assert all((ROOT / each["constraints"]).exists() for each in matrix)
    assert jobs.keys() == {"tests", "lint", "docs", "packages"}


def test_a_release_is_by_tag_and_keeps_no_password() -> None:
    text = (GITHUB / "workflows/release.yml").read_text()
    release = read(GITHUB / "workflows/release.yml")
    assert release["True"] == {"push": {"tags": ["v*"]}}
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert release["jobs"]["publish"]["needs"] == "packages"
    assert not re.search("password|secrets", text.partition("jobs:")[2])


def test_version_is_one_everywhere() -> None:
    """What the workflow asks of a tag, before there is one."""
    assert (
        f'__version__ = "{xs.__version__}"'
        in (ROOT / "xshard/__init__.py").read_text().splitlines()
    )
    assert f"## [{xs.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (xs.__version__, PROJECT["license"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_a_form_asks_for_a_plan_where_there_is_one() -> None:
    needs = {}
    for path in FORMS:
        form = read(path)
        if path.stem == "config":
            continue
        assert {"name", "description", "labels", "body"} == form.keys()
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids)
        assert {field["type"] for field in form["body"]} <= {"input", "textarea"}
        needs[path.stem] = {
            field["id"] for field in form["body"] if field.get("validations") == {"required": True}
        }
    assert needs.keys() == {"wrong_result", "error", "slow_plan", "request"}
    assert {name for name in needs if "plan" in needs[name]} == {"slow_plan"}
    assert {name for name in needs if "versions" in needs[name]} == needs.keys() - {"request"}
