"""Which names a pattern fits, which rule decides, and what is said when none does."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace as Fake
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xshard as xs
from xshard import Rules, XshardError
from xshard.errors import NotationError
from xshard.state import Names, rename

FITS = [
    ("**", ["", "a", "a.b.c", "a\nb"], []),
    ("**.weight", ["weight", "a.weight", "a.b.weight"], ["aweight", "a.weight.b", "x.aweight"]),
    ("model.**", ["model", "model.a", "model.a.b"], ["models", "modela.b", "x.model"]),
    ("a.**.c", ["a.c", "a.b.c", "a.x.y.c"], ["ac", "a.bc", "a.c.d"]),
    ("**.**.a", ["a", "x.a", "x.y.a"], ["b", "xa"]),
    ("*", ["a", "ab"], ["", "a.b"]),
    ("layers.*", ["layers.0", "layers.12"], ["layers", "layers.0.mlp", "layers."]),
    ("l*r.*_x", ["layer.a_x", "lr._x"], ["l.r.a_x", "layer.a_y"]),
    ("a*b*c", ["abc", "aXbYc", "abbcc"], ["acb", "ab.c"]),
    (
        "**.{q,k}_proj.w|head.w",
        ["x.q_proj.w", "k_proj.w", "head.w"],
        ["v_proj.w", "x.head.w", "q_proj.w|head.w"],
    ),
    ("{a.b,c{1,2}}.**", ["a.b", "c1", "c2.x.y"], ["b", "c", "c3", "a.c1"]),
    ("a,b", ["a,b"], ["a", "b"]),
    ("a[0].w", ["a[0].w"], ["a0.w"]),
    ("", [""], ["a"]),
    (re.compile(r"layers\.[0-3]\..*"), ["layers.3.w"], ["layers.4.w", "x.layers.3.w"]),
]


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"), FITS, ids=[str(pattern) for pattern, *_ in FITS]
)
def test_a_pattern_fits_whole_names(pattern: str, fitting: list[str], others: list[str]) -> None:
    rules = Rules({pattern: "..."})
    assert [rules.find(name) for name in fitting] == ["..."] * len(fitting)
    assert [rules.find(name) for name in others] == [None] * len(others)


def test_the_first_pattern_that_fits_decides() -> None:
    rules = Rules({"**.up.weight": "o/tp i", "**.weight": "o i -> o/dp i", "**": "..."})
    names = ["a.up.weight", "a.down.weight", "a.bias"]
    assert rules.match(names) == dict(zip(names, rules.values(), strict=True))
    assert list(rules.match(names)) == names
    assert Rules({"*.w": "n"}).match(["a.w", "b"], partial=True) == {"a.w": "n"}
    assert Rules(rules) == rules and eval(repr(rules), {"Rules": Rules}) == rules
    assert Rules({"**": "..."}).match([]) == {}


def test_a_mismatch_of_names_with_rules_is_listed() -> None:
    rules = {"*.weigth": "o/tp i", "*.bias": "o"}
    with pytest.raises(XshardError) as error:
        Rules(rules).match(["a.weight", "a.bias"], what="parameter")
    assert str(error.value) == (
        "no rule for 1 of 2 parameters: a.weight; rule '*.weigth' fits no parameter\n"
        "  the rules are for: '*.weigth', '*.bias'; '**' is for all others, '...' for whole arrays\n"
        "  '*.weigth': did you mean 'weight'?\n"
        "  the parameters are: a.weight, a.bias"
    )


def test_a_rule_that_fits_no_name_is_listed() -> None:
    rules = {"*.weigth": "o/tp i", "*.bias": "o"}
    with pytest.raises(XshardError, match=r"^rule '\*.weigth' fits no name"):
        Rules(rules).match(["a.bias"], partial=True)


def test_a_long_list_of_names_is_cut() -> None:
    with pytest.raises(XshardError, match=r"for 30 of 30 names: a0, .*a7 and 22 more\n"):
        Rules({}).match([f"a{i}" for i in range(30)])


@pytest.mark.parametrize(("pattern", "idle", "near"), [
    ("**.{q,k,upp}_proj.weight", ["**.upp_proj.weight"], "up_proj"),
    ("model.layers.*|model.nrom", ["model.nrom"], "norm"),
    ("*.{layers,heads}.**|model.**", ["*.heads.**"], ""),
])  # fmt: skip
def test_each_alternative_has_to_fit(pattern: str, idle: list[str], near: str) -> None:
    names = [f"model.layers.{i}.{x}_proj.weight" for i in (0, 1) for x in ("q", "k", "up")]
    names += ["model.layers.0", "model.norm"]
    with pytest.raises(XshardError) as error:
        Rules({pattern: "...", "**": "..."}).match(names)
    said = str(error.value)
    assert said.startswith("; ".join(f"'{each}' in rule '{pattern}' fits no name" for each in idle))
    assert (f"did you mean '{near}'?" in said) == bool(near)
    assert Rules({pattern: "...", "**": "..."}).match([]) == {}


def test_a_rule_that_comes_too_late_is_an_error() -> None:
    names = ["a.weight", "a.bias"]
    with pytest.raises(XshardError, match=r"'\*\*.weight' comes too late: '\*\*' decides a.weight"):
        Rules({"**": "...", "**.weight": "o/tp i"}).match(names)
    assert Rules({"*.weight": "n", "*.bias": "n", "**": "..."}).match(
        names
    )  # `**` is left with nothing


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a.{b,c", "'{' is not closed in\n    'a.{b,c'\n       ^\n"),
        ("a.b}.c", "'}' closes nothing in\n    'a.b}.c'\n        ^\n"),
        ("a**.b", "'**' stands for whole parts in\n    'a**.b'\n      ^^\n"),
        ("**.a**", "'**' stands for whole parts in\n    '**.a**'\n         ^^\n"),
        ("*{b,*c}", "'**' stands for whole parts in\n    '*{b,*c}'\n     ^^^^^^^\n"),
        ("{a,b,c,d,e,f,g,h,i,j}" * 40, "a pattern of more than 1000 spellings in\n"),
        ("{" * 10_000, "braces inside more than 8 others in\n"),
    ],
)
def test_a_malformed_pattern_is_marked(pattern: str, reason: str) -> None:
    with pytest.raises(NotationError) as error:
        Rules({pattern: "..."})
    assert str(error.value).startswith(reason)


def test_a_malformed_layout_is_found_before_any_name_is_seen() -> None:
    with pytest.raises(NotationError, match=r"rule '\*\*.weight': .* in\n    'o/\(tp i'"):
        Rules({"**.weight": "o/(tp i"})
    with pytest.raises(NotationError, match="are not rules"):
        Rules(["o/tp i"])  # type: ignore[arg-type]
    with pytest.raises(NotationError, match="5 is not a pattern"):
        Rules({5: "..."})  # type: ignore[dict-item]


def test_many_stars_do_not_take_for_ever() -> None:
    # An expression that goes back over its choices would not end.
    assert Rules({"*a" * 50 + "b": "..."}).find("a" * 5000) is None


PART = st.lists(st.sampled_from(["a", "b", "*", "{a,b}", "{b*,*ab}"]), min_size=1, max_size=3).map(
    "".join
)
PATTERN = st.lists(PART | st.just("**"), min_size=1, max_size=5).map(".".join)
NAME = st.lists(st.text("ab", min_size=1, max_size=3), max_size=5).map(".".join)


@given(PATTERN, NAME)
def test_rules_have_the_patterns_of_names(pattern: str, name: str) -> None:
    try:
        fits = Rules({pattern: "..."}).find(name) is not None
    except NotationError:  # two stars beside each other in a part
        with pytest.raises(NotationError):
            Names(rename(pattern, pattern))
        return
    names = Names(rename(pattern, f"x.{pattern}", optional=True))
    if not fits:
        with pytest.raises(XshardError, match="no relation for 1 names"):
            names.resolve({name: (2,)})
        return
    there = names.resolve({name: (2,)})
    assert list(there) == [f"x.{name}" if name else "x"]
    assert list(names.inverse.resolve({next(iter(there)): (2,)})) == [name]


def test_rules_are_public() -> None:
    assert xs.Rules is Rules


def test_plans_of_transformers() -> None:
    """Each style as rules; numbers in names are stars, unless layers differ."""
    norm = "replicated_with_grad_allreduce"
    cut = {"weight": (8, 4), "bias": (8,)}
    modules: dict[str, Any] = {
        "a.0.q": ("colwise", cut), "a.1.q": ("colwise", cut), "a.0.o": ("rowwise", cut),
        "e.0": ("moe_tp_experts", {"up": (2, 8, 4), "down": (2, 4, 4)}),
        "e.1": ("moe_tp_experts", {"up": (2, 6, 4)}), "mla": (None, {}), "a.0.norm": (norm, {}),
        "mla.kv_a": ("mla_kv_a_proj", {"weight": (4, 4)}), "mla.kv_b": ("colwise", {"weight": (8, 4)}),
        "head": ("colwise_rep", {"weight": (9, 4)}), "plain": (None, {"weight": (4,)}),
    }  # fmt: skip
    starred = {re.sub(r"\.\d+", ".*", name): style for name, (style, _) in modules.items() if style}

    def model(**more: str) -> Any:
        rows = [
            (f"{m}.{own}", Fake(shape=s)) for m, (_, xs) in modules.items() for own, s in xs.items()
        ]
        plan = (
            {**starred, "e.*.up": "packed_colwise", "e.*.down": "rowwise", **more}
            if starred
            else {}
        )
        return Fake(
            tp_plan=plan,
            named_modules=lambda **_: modules.items(),
            named_parameters=lambda **_: rows,
        )

    rules = Rules.from_transformers(model(), "tp")
    copied = "... -> ... | copy(tp)"
    added = "... | sum(tp) -> ..."
    assert rules == {
        "parameters": {
            "a.*.q.weight": "d0/tp d1", "a.*.q.bias": "d0/tp",
            "a.*.o.weight": "d0 d1/tp", "a.*.o.bias": "d0 -> d0 | sum(tp)",
            "e.*.up": "d0 d1/block(tp,4,4) d2", "e.1.up": "d0 d1/block(tp,3,3) d2", "e.*.down": "d0 d1 d2/tp",
            "mla.kv_b.weight": "d0/tp d1", "head.weight": "o/tp ...", "**": "...",
        },
        "inputs": {
            "": "...", "a.*.q": copied, "a.*.o": "... i/tp", "a.*.norm": "... | copy(tp)",
            "e.*": (copied, None, copied), "mla": copied, "head": copied,
            "mla.kv_a": "... | copy(tp)", "mla.kv_b": "... | copy(tp)",
        },
        "outputs": {"a.*.o": added, "e.*": added, "head": "... o/tp -> ... o"},
    }  # fmt: skip
    assert rules["parameters"].find("e.1.up") != rules["parameters"].find("e.0.up")
    with pytest.raises(
        XshardError,
        match="unknown style 'diagonal' of 'plain' in the model's plan\n  the styles are: ",
    ):
        Rules.from_transformers(model(plain="diagonal"), "tp")
    starred.clear()
    with pytest.raises(XshardError, match="declares no tensor parallel plan\n  write rules for it"):
        Rules.from_transformers(model(), "tp")


def test_plans_cut_projections_by_heads() -> None:
    """A head of keys stays with the queries that read it; compressed keys are no such heads."""
    rows = {"q_proj": 24, "k_proj": 6, "v_proj": 6, "o_proj": 24}
    attention = Fake(head_dim=2, num_key_value_groups=4, **dict.fromkeys(rows))
    shapes = {
        f"{name}.{layer}": (4, n) if layer == "o_proj" else (n, 4)
        for name in ("attn", "compressed")
        for layer, n in rows.items()
    }
    model = Fake(
        tp_plan={name: "rowwise" if "o_proj" in name else "colwise" for name in shapes},
        named_modules=lambda **_: [
            ("attn", attention),
            ("attn.o_proj", None),
            ("compressed", Fake(head_dim=2)),
        ],
        named_parameters=lambda **_: [(f"{n}.weight", Fake(shape=s)) for n, s in shapes.items()],
    )
    rules = Rules.from_transformers(model, "tp")["parameters"]
    assert rules.find("attn.q_proj.weight") == "(d0 8)/balanced(tp) d1"
    assert rules.find("attn.k_proj.weight") == "(d0 2)/balanced(tp) d1"
    assert rules.find("attn.o_proj.weight") == "d0 (d1 8)/balanced(tp)"
    assert rules.find("compressed.q_proj.weight") == "d0/tp d1"
    # 3 heads of keys, each read by 4 of queries, are shared by pairs; 9 processes are no such groups.
    pairs = Rules.from_transformers(model, "tp", xs.Mesh(tp=6))
    assert pairs["counts"] == {"attn.num_key_value_groups": "(g 2)/spread(tp)"}
    assert pairs["parameters"].find("attn.q_proj.weight") == "(d0 2)/balanced(tp) d1"
    assert pairs["parameters"].find("attn.k_proj.weight") == "(d0 2)/spread(tp) d1"
    assert pairs["parameters"].find("attn.o_proj.weight") == "d0 (d1 2)/balanced(tp)"
    for n in (2, 3, 4, 9):
        plan = Rules.from_transformers(model, "tp", xs.Mesh(tp=n))
        assert "counts" not in plan and plan["parameters"] == rules
    shared = Rules.from_transformers(model, ("kv", "rep"))
    assert shared["counts"] == {"attn.num_key_value_groups": "g/rep"}
    assert shared["parameters"].find("attn.q_proj.weight") == "(d0 2)/balanced(kv,rep) d1"
    assert shared["parameters"].find("attn.k_proj.weight") == "(d0 2)/sizes(kv,1,1,1) d1"
    assert shared["parameters"].find("attn.o_proj.weight") == "d0 (d1 2)/balanced(kv,rep)"
    assert shared["parameters"].find("compressed.k_proj.weight") == "d0/(kv,rep) d1"
    assert shared["outputs"]["attn.o_proj"] == "... | sum(kv,rep) -> ..."


def test_a_layer_that_shares_heads_says_nothing_of_others() -> None:
    """One layer has 2 heads of keys and one has 4, each read by 4 heads of queries, on 4 processes."""
    layers = {"a.0": 2, "a.1": 4}
    attention = Fake(head_dim=2, num_key_value_groups=4, k_proj=None)
    model = Fake(
        tp_plan={"a.*.k_proj": "colwise"},
        named_modules=lambda **_: [(name, attention) for name in layers],
        named_parameters=lambda **_: [
            (f"{name}.k_proj.weight", Fake(shape=(2 * n, 4))) for name, n in layers.items()
        ],
    )
    rules = Rules.from_transformers(model, "tp", xs.Mesh(tp=4))
    assert rules["counts"] == {"a.0.num_key_value_groups": "(g 2)/spread(tp)"}
    assert rules["parameters"].find("a.0.k_proj.weight") == "(d0 2)/spread(tp) d1"
    assert rules["parameters"].find("a.1.k_proj.weight") == "(d0 2)/balanced(tp) d1"


def test_plans_shard_an_embedding_with_the_rows_of_its_head() -> None:
    """A tied weight is stored in one way; a style that the plan has for the embedding stays."""
    weight = Fake(shape=(8, 4))
    modules = {
        "embed": Fake(weight=weight, num_embeddings=8), "named": Fake(weight=weight, num_embeddings=8),
        "other": Fake(weight=Fake(shape=(8, 4)), num_embeddings=8), "head": Fake(weight=weight),
    }  # fmt: skip
    model = Fake(
        tp_plan={"head": "colwise_gather_output", "named": "replicate"},
        named_modules=lambda **_: modules.items(),
        named_parameters=lambda **_: [(f"{name}.weight", m.weight) for name, m in modules.items()],
    )
    rules = Rules.from_transformers(model, "tp")
    sharded = {name: rules["parameters"].find(f"{name}.weight") for name in modules}
    assert sharded == {"embed": "d0/tp d1", "other": "...", "named": "...", "head": "o/tp ..."}
    assert rules["outputs"] == {"embed": "... | sum(tp) -> ...", "head": "... o/tp -> ... o"}


def test_a_plan_for_experts_alone_is_named() -> None:
    """It is not read: where the other plan has the experts too, nothing is said."""
    expert_plan = {"experts": "ep_dispatch_experts", "experts.up": "grouped_gemm"}
    plan = {"head": "colwise"}
    model = Fake(
        tp_plan=plan,
        ep_plan=expert_plan,
        named_modules=lambda **_: [],
        named_parameters=lambda **_: [],
    )
    with pytest.warns(
        UserWarning, match=r"ep_plan of the model shards 'experts', .*: 't/ep c"
    ) as said:
        Rules.from_transformers(model, "tp")
    assert said[0].filename == __file__
    plan |= {"experts": "moe_tp_experts", "experts.up": "packed_colwise"}
    with warnings.catch_warnings(action="error"):
        Rules.from_transformers(model, "tp")
