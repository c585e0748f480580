"""The page of `xshard explore` in a real browser, its answers, and who may ask."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import uvicorn
from typer.testing import CliRunner

import xshard as xs
from tests.documents.forking import printed
from xshard.cli.app import app
from xshard.cli.explore import page, server, views

CHROMIUM = shutil.which("chromium") and shutil.which("chromedriver")
MISSING = "no browser is here: apt-get install chromium chromium-driver"
needs_browser = pytest.mark.skipif(not CHROMIUM, reason=MISSING)


@pytest.mark.parametrize("example", page.EXAMPLES, ids=lambda example: str(example[0]))
def test_every_example_is_shown_in_full(example: tuple[str, str, str, str]) -> None:
    _, expression, mesh, lengths = example
    found = views.view({"expression": expression, "mesh": mesh, "lengths": lengths})
    assert "error" not in found, found
    shown = ElementTree.fromstring(f"<div>{found['html']}</div>")
    heads = [head.text for head in shown.iter("h2")]
    assert heads == (["Forward", "Backward", "Code"] if "->" in expression else ["Layout"])
    assert f'"{expression}"' in found["torch"] and f'"{expression}"' in found["jax"]
    assert found["html"].count("<svg") >= len(heads[:2])


@pytest.mark.parametrize(("fields", "field", "reason"), [
    ({"expression": "b s/cq -> b s", "lengths": "2,64"}, "expression",
        "unknown mesh axis 'cq' in\n    'b s/cq -> b s'\n         ^^"),
    ({"expression": "b s/cq", "lengths": "2,64"}, "expression", "unknown mesh axis 'cq'"),
    ({"lengths": "n=64"}, "lengths", "no length for d in 'n=64'"),
    ({"lengths": "sixty,32"}, "lengths", "a length is a whole number >= 0"),
    ({"lengths": "2,64,32"}, "lengths", "dims"),
    ({"mesh": "dp=2000"}, "mesh", "2000 devices, the page shows up to 1024 in 'dp=2000'"),
    ({"mesh": "dp:2"}, "mesh", "dp:2"),
    ({"lengths": "n=99999999,d=32"}, "lengths", "the page shows 12 dims up to 1048576"),
    ({"expression": "b" * 401}, "expression", "is unknown, or longer than 400 letters"),
    ({"path": "/"}, "expression", "field 'path' is unknown"),
    ({"profile": "/etc/passwd"}, "profile", "profile '/etc/passwd' is not shipped"),
    ({"memory_limit": "1"}, "memory_limit", "PlanError"),
    ({"memory_limit": "much"}, "memory_limit", "much"),
    ({"dtype": "float31"}, "dtype", "DtypeError"),
])  # fmt: skip
def test_errors_stand_beside_their_field(fields: dict[str, str], field: str, reason: str) -> None:
    found = views.view(fields)
    assert list(found) == ["error", "field"] and reason in found["error"]
    assert found["field"] == field and f'id="error-{field}"' in page.live_page()


def test_the_page_has_choices() -> None:
    text = page.live_page()
    assert text.count("<select") == 2 and "<option selected>h100</option>" in text


def test_the_page_has_the_notation() -> None:
    text = page.live_page()
    assert all(escape(sign) in text for sign, _ in page.NOTATION)


def test_the_page_begins_with_several_steps() -> None:
    for _, expression, mesh, lengths in page.EXAMPLES[:2]:
        plan = xs.plan(expression, xs.Mesh.parse(mesh), **views.lengths_for(expression, lengths))
        assert len(plan.steps) > 1


def test_no_button_is_disabled() -> None:
    text = page.live_page()
    assert "disabled =" not in text  # a button that is disabled loses the focus


def test_programs_run_as_they_are_copied(tmp_path: Path) -> None:
    """All in one launch of the ranks, and in one process with as many devices."""
    from tests.documents.test_documents import printed_there
    from tests.torch_bridge.helpers import on_ranks

    asked = [
        dict(zip(("expression", "mesh", "lengths"), fields, strict=True))
        for _, *fields in page.EXAMPLES
    ]
    found = [views.view(fields) for fields in asked if "->" in fields["expression"]]
    for name in ("torch", "jax"):
        (tmp_path / f"{name}.py").write_text("\n".join(answer[name] for answer in found))
    on_ranks(4, printed, str(tmp_path / "torch.py"))
    assert printed_there(4, str(tmp_path / "jax.py")).count("NamedSharding(") == len(found)


def test_uneven_blocks_bring_their_shape_along() -> None:
    lines = views.view({"expression": "n/a -> n", "mesh": "a=3", "lengths": "8"})["torch"]
    assert 'xt.redistribute(x, "n/a -> n", mesh=mesh, shape=(8,))' in lines
    assert 'xs.Sharding("n/a", xs.Mesh(a=3), (8,)).local_shape(rank)' in lines


def test_a_plan_is_written_as_a_page_that_needs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    arguments = ["plan", "n/a d -> n d/a", "--mesh", "a=4", "--shape", "8,8", "--html", str(file)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    text = file.read_text()
    assert text.count("<svg") == 2 and "all_to_all" in text
    assert not re.search(r'(?<![-\w])(?:src|href)="(?!data:)|@import|url\((?!#)|fetch\(', text)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    at = server.listening(0)
    served = server.Server(uvicorn.Config(server.application(), log_level="warning"))
    thread = threading.Thread(target=served.run, kwargs={"sockets": [at]}, daemon=True)
    thread.start()
    yield f"http://{server.HOST}:{at.getsockname()[1]}/"
    served.should_exit = True
    thread.join()


def get(url: str, host: str | None = None) -> tuple[int, Any, bytes]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_only_the_loopback_is_answered(url: str) -> None:
    status, headers, _ = get(url)
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert [get(url, host)[0] for host in ("elsewhere.example", "127.0.0.1.elsewhere.example")] == [
        400,
        400,
    ]
    assert get(url + "view", "elsewhere.example")[0] == 400
    assert get(url + "nowhere")[0] == 404
    closed = http.client.HTTPException, ConnectionError, urllib.error.URLError
    with pytest.raises(closed):
        get(url + "view?expression=" + "b" * 1_000_000)


def test_an_answer_that_takes_too_long_is_given_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processor seconds, by the process itself, which others do not wait for."""
    monkeypatch.setattr(server, "LIMIT_S", 0.5)
    slow = (
        "view?expression="
        + "b%20s/zigzag(x)%20-%3E%20b/(x,y)%20s&mesh=x=32,y=32&lengths=1048576,1048576"
    )
    with ThreadPoolExecutor() as at_once:
        late = at_once.submit(get, url + slow)
        quick = at_once.submit(get, url + "view")
        assert "html" in json.loads(quick.result()[2]) and not late.done()
        assert json.loads(late.result()[2])["error"].startswith("this takes over 0 seconds")
    monkeypatch.undo()
    assert "html" in json.loads(get(url + "view")[2])  # by a new process


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    yield made
    made.quit()


def wait(browser: Any, until: Callable[[Any], Any]) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60).until(until)


def shows(text: str) -> Callable[[Any], bool]:
    return lambda browser: (
        text in browser.find_element("id", "shown").text
        and "stale" not in browser.find_element("id", "shown").get_attribute("class")
    )


@needs_browser
def test_the_page_follows_what_one_types(url: str, browser: Any) -> None:
    browser.get(url)
    wait(browser, shows("all_gather n/tp"))
    browser.get(url + "#expression=b+s/cp+c+-%3E+b+s+c/cp&mesh=cp%3D4&lengths=2,64,32")
    wait(browser, shows("all_to_all s/cp -> c/cp"))
    field = browser.find_element("name", "expression")
    field.clear()
    field.send_keys("b s/cq c -> b s c")
    error = browser.find_element("id", "error-expression")
    wait(browser, lambda _: "unknown mesh axis 'cq'" in error.text)
    assert "^^" in error.text
    field.clear()
    field.send_keys("b s/cp c -> b s c")
    wait(browser, shows("all_gather s/cp"))
    assert not error.is_displayed()
    # The address holds the state, and brings it back.
    state = browser.current_url
    browser.get("about:blank")
    browser.get(state)
    wait(browser, shows("all_gather s/cp"))
    assert browser.find_element("name", "expression").get_attribute("value") == "b s/cp c -> b s c"


@needs_browser
def test_steps_are_stepped_through_by_keyboard_alone(url: str, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get(url + "#expression=n+%7C+sum(a)+-%3E+n/b&mesh=a%3D2,b%3D2&lengths=8")
    wait(browser, shows("Forward"))
    n_steps = len(browser.find_elements("css selector", "section:first-of-type g[data-step]"))
    assert n_steps == len(xs.plan("n | sum(a) -> n/b", xs.Mesh(a=2, b=2), (8,)).steps) > 0
    for _ in range(60):
        if browser.switch_to.active_element.text == "Step back":
            break
        browser.switch_to.active_element.send_keys(Keys.TAB)
    for _ in range(n_steps + 1):
        browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.switch_to.active_element.text == "Step back"  # at the first step too
    browser.find_element("xpath", "//button[.='All steps']").click()
    browser.find_element("xpath", "//button[.='Step back']").click()
    later = "section:first-of-type g.later"
    assert len(browser.find_elements("css selector", later)) == 1
    select = browser.find_element("css selector", "section select")
    select.send_keys("device 1")
    lines = browser.find_elements("css selector", "section:first-of-type line")
    own = [
        line
        for line in lines
        if "1" in (line.get_attribute("data-src"), line.get_attribute("data-dst"))
    ]
    faded = [line for line in lines if "aside" in (line.get_attribute("class") or "")]
    assert own and len(faded) == len(lines) - len(own) > 0


@needs_browser
def test_every_button_works(url: str, browser: Any) -> None:
    browser.get(url)
    for example in page.EXAMPLES:
        button = next(
            b for b in browser.find_elements("css selector", "nav button") if b.text == example[0]
        )
        button.click()
        wait(browser, shows(example[1].split(" ->")[0]))
    browser.find_element("css selector", "[data-copy=jax]").click()
    wait(browser, lambda b: b.find_element("id", "copied").text)
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1100])
def test_everybody_can_read_it(url: str, browser: Any, scheme: str, width: int) -> None:
    from axe_core_python.selenium import Axe

    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url + "#expression=b+h/sp+-%3E+b+h/sp:halo(1,1)&mesh=sp%3D4&lengths=2,16")
    wait(browser, shows("exchange"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    found = Axe().run(browser)["violations"]
    assert not found, [(each["id"], each["nodes"][0]["html"]) for each in found]
