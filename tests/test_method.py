import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.config import make_config
from oelm.errors import UserError
from oelm.method import ALIASES, PRESETS, Method, get_method, select_layers


def test_the_reports_names_are_known():
    reported = {
        "baseline": "baseline",
        "GPT": "baseline",
        "oelm_v2": "oelm",
        "oelm_freeze": "oelm",
        "OELM-Freeze": "oelm",
        "OELM-QK": "oelm",
        "oelm_random": "oelm-random",
        "OELM-Random": "oelm-random",
        "OELM (old)": "oelm-global",
        "OELM-QK-FFN": "oelm-qk-ffn",
        "OELM-FFN-only": "oelm-ffn-only",
    }
    assert {name: get_method(name).name for name in reported} == reported


def test_aliases_point_to_presets_and_hide_none():
    assert set(ALIASES.values()) <= set(PRESETS)
    assert not set(ALIASES) & set(PRESETS)


def test_unknown_method_lists_the_known_ones():
    with pytest.raises(UserError) as error:
        get_method("olem")
    assert all(name in str(error.value) for name in PRESETS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda m: m.name)
def test_round_trip_through_json(preset):
    assert Method.from_dict(json.loads(json.dumps(preset.to_dict()))) == preset


def test_a_preset_can_be_overridden_field_by_field():
    method = Method.from_dict({"name": "oelm", "freeze": {"q": ":-2", "k": ":-2"}, "init": "fresh"})
    assert method.start == PRESETS["oelm"].start
    assert method.freeze == {"q": ":-2", "k": ":-2"}
    assert method.init == "fresh"
    assert method.name == "oelm (freeze=q::-2 k::-2, init=fresh)"
    assert Method.from_dict(method.to_dict()) == method


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": {"p": "orthogonal"}}, "role that can be initialised 'p'"),
        ({"start": {"q": "othogonal"}}, "kind of block 'othogonal'"),
        ({"start": {"ffn_in": "hadamard"}}, "'orthogonal' only"),
        ({"start": {"q": "polar"}, "init": "fresh"}, "contradicts"),
        ({"freeze": {"qk": "all"}}, "role 'qk'"),
        ({"freeze": {"q": "most"}}, "does not select layers"),
        ({"freeze": {"embeddings": "0,1"}}, "belong to no layer"),
        ({"freeze": {"blocks": "some"}}, "does not select layers"),
        ({"start": {"blocks": "orthogonal"}}, "role that can be initialised 'blocks'"),
        ({"init": "old"}, "init 'old'"),
        ({"freeze": {"q": "-:"}}, "does not select layers"),
        ({"freeze": {"q": "first:-2"}}, "does not select layers; use 'all', 'first:4'"),
        ({"freeze": {"q": "last"}}, "does not select layers"),
        ({"freeze": {"q": 0}}, "maps roles to words"),
        ({"freeze": ["q"]}, "maps roles to words"),
        ({"start": None}, "maps roles to words"),
        ({"gain": 0}, "positive number"),
        ({"gain": True}, "positive number"),
        ({"gain": "mine"}, "positive number"),
    ],
)
def test_nonsense_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Method(**fields)


def test_blocks_stands_for_what_a_layer_has():
    method = Method.from_dict({"name": "oelm", "freeze": {"blocks": ":-2", "q": "all"}})
    rest = dict.fromkeys(("k", "v", "o", "ffn_in", "ffn_out", "norms"), ":-2")
    assert method.freeze == {"q": "all"} | rest
    assert method.name == "oelm (freeze=blocks::-2 q:all)"
    assert Method.from_dict(method.to_dict()) == method


def test_an_unknown_field_is_refused():
    with pytest.raises(UserError, match="unknown field of a method 'frozen'"):
        Method.from_dict({"name": "oelm", "frozen": {}})


@given(
    st.integers(1, 50), st.one_of(st.none(), st.integers(-60, 60)), st.one_of(st.none(), st.integers(-60, 60))
)
def test_layers_are_selected_as_python_slices(layers, start, stop):
    if start is None and stop is None:
        return
    text = f"{'' if start is None else start}:{'' if stop is None else stop}"
    assert select_layers(text, layers) == set(list(range(layers))[start:stop])


def test_layers_by_number():
    assert select_layers("all", 3) == {0, 1, 2}
    assert select_layers("0,2,-1", 4) == {0, 2, 3}
    assert select_layers("7", 4) == set()
    assert select_layers("0, 2", 4) == {0, 2}


@given(st.integers(1, 50), st.integers(0, 60))
def test_layers_by_words(layers, count):
    every = list(range(layers))
    assert select_layers(f"first:{count}", layers) == set(every[:count])
    assert select_layers(f"last: {count}", layers) == set(every[::-1][:count])
    assert select_layers("even", layers) == {layer for layer in every if layer % 2 == 0}
    assert select_layers("odd", layers) == set(every) - select_layers("even", layers)


def test_layers_as_a_list_are_those_as_words():
    listed = Method.from_dict({"name": "oelm", "freeze": {"q": [0, 3], "k": "all"}})
    assert listed == Method.from_dict({"name": "oelm", "freeze": {"q": "0,3", "k": "all"}})
    config = make_config({"method": {"name": "oelm", "freeze": {"q": [0, 3], "k": "all"}}})
    assert config == make_config({"method": {"name": "oelm", "freeze": {"q": "0,3", "k": "all"}}})
    assert Method.from_dict(config.method.overrides()) == listed
    for wrong in ([], ["x"], [0.5]):
        with pytest.raises(UserError):
            Method("x", freeze={"q": wrong})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"freeze_schedule": [0.8]}, "freeze_schedule is a table"),
        ({"freeze_schedule": {"unfreeze_at": 0.8}}, "names nothing to freeze"),
        (
            {"freeze_schedule": {"unfreeze_at": 0.8}, "freeze": {"q": "all"}, "qk_scale": "head"},
            "does not go with lora, qk_scale",
        ),
        (
            {"freeze_schedule": {"freeze_at": 0.2, "polar": True}, "freeze": {"ffn_in": "all"}},
            "polar makes q and k orthonormal: freeze one of them",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_the_method_is_refused(fields, problem):
    with pytest.raises(UserError, match=problem):
        Method("x", **fields)


def test_a_method_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["oelm"].init = "own"
