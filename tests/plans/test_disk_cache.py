"""Plans kept between runs: what is read is what was written, by the same code, for the same request."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import xshard as xs
from xshard.notation.maps import empty_caches
from xshard.plans import disk_cache
from xshard.search.a_star import Search

MESH = xs.Mesh(x=2, y=3)
SIZES = {"i": 12, "k": 30, "j": 24}


def program():
    """The plans of a small program, gradients included."""
    plans = [
        xs.plan("n/sizes(x,2,4) d/y -> d n/y | copy(x)", MESH, (6, 9)),
        xs.plan("n/x d -> n d/x", MESH, (6, 8), memory_limit="1KiB", objective="forward+backward"),
        xs.plan("n | mean(x) -> n/x", MESH, (6,), profile="a100:4"),
        xs.plan("n/x -> n/z", src_mesh=MESH, dst_mesh=xs.Mesh(z=3, w=2), shape=(12,)),
        xs.plan(
            "n/x -> n/z", src_mesh=MESH, dst_mesh=xs.Mesh(z=4), dst_devices=range(2, 6), shape=(8,)
        ),
    ]
    products = [
        xs.plan("i/x k, k/y j -> i/x j/y", MESH, sizes=SIZES, overlap="always"),
        xs.plan("i/x k/zigzag(y), k j, j i/y -> i", MESH, sizes=SIZES, dtype="bfloat16"),
    ]
    moves = [move for p in products for part in p.parts for move in (*part.moves, part.result)]
    return *plans, *products, *(plan.backward for plan in (*plans, *moves))


@pytest.fixture
def again(tmp_path, monkeypatch):
    """Starts the program again, and tells its plans and how many searches they took."""
    searches = []
    search = Search.path
    monkeypatch.setattr(Search, "path", lambda self: searches.append(1) or search(self))
    monkeypatch.setenv("XSHARD_CACHE", str(tmp_path))

    def start(plans=program):
        empty_caches()
        searches.clear()
        return plans(), len(searches)

    return start


def test_the_second_start_plans_nothing(again, monkeypatch):
    first, searches = again()
    assert searches > 10
    assert again() == (first, 0)
    monkeypatch.setattr(disk_cache, "_code_digest", lambda: "other code")
    assert again() == (first, searches)
    monkeypatch.delenv("XSHARD_CACHE")
    assert again() == (first, searches)


def move(profile="h100"):
    return xs.plan("n/x d -> n d/x", MESH, (6, 8), profile=profile)


def test_wrong_files_are_planned_afresh(again, tmp_path):
    plan, _ = again(move)
    [file] = tmp_path.iterdir()
    whole = file.read_text()
    assert again(lambda: move("a100"))[1] == 1, "a plan for another machine"
    foreign = next(other for other in tmp_path.iterdir() if other != file).read_text()
    wrong = json.loads(whole)
    wrong["plan"] = wrong["plan"].replace("float32", "float64")
    no_plan = json.loads(whole) | {"plan": "{}"}
    no_plan["digest"] = disk_cache._digest(no_plan["request"] + "{}")
    for text in (
        foreign,
        json.dumps(wrong),
        json.dumps(no_plan),
        "[]",
        "",
        whole[:-9],
        "[" * 10**5,
        "\0",
    ):
        file.write_text(text)
        assert again(move) == (plan, 1)
        assert file.read_text() == whole


@pytest.mark.filterwarnings("error")
def test_threads_share_a_folder_that_is_bounded(again, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("stays")
    monkeypatch.setattr(disk_cache, "MAX_FILES", 8)
    monkeypatch.setattr(disk_cache, "WRITES_PER_COUNT", 1)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: xs.plan("n/x -> n", MESH, (n // 2,)), range(60)))
    names = os.listdir(tmp_path)
    assert "notes.txt" in names
    assert 4 <= len(names) <= 9 + 4
    assert all(name.endswith((".json", ".txt")) for name in names)


@pytest.mark.filterwarnings("error")
def test_a_folder_that_fails_is_warned_of(again, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("stays")
    monkeypatch.setenv("XSHARD_CACHE", str(tmp_path / "notes.txt"))
    with pytest.warns(UserWarning, match="keeps no plans"):
        again(move)
