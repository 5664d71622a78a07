import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.config import (
    FLAGS,
    INCIDENTAL,
    RunConfig,
    from_assignment,
    make_config,
    merge,
    nest,
    read_toml,
    rebuild_config,
    to_toml,
)
from oelm.errors import UserError

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "task": st.fixed_dictionaries(
                {}, optional={"name": words, "text": words, "max_length": st.integers(1, 9999)}
            ),
            "method": st.fixed_dictionaries(
                {"name": words}, optional={"freeze": st.dictionaries(words, words, max_size=3)}
            ),
            "training": st.fixed_dictionaries(
                {},
                optional={
                    "lr": st.floats(1e-9, 10),
                    "steps": st.integers(1, 10**9),
                    "trackers": st.lists(words, max_size=3),
                    "seed": st.integers(0, 2**40),
                },
            ),
        },
    )
)
def test_toml_round_trip(values):
    """What is written to a run's folder is read back as the same configuration, whatever the strings hold."""
    config = make_config(values)
    read = make_config(tomllib.loads(to_toml(config.to_dict())))
    assert read == config == rebuild_config(config.to_dict())


def test_defaults():
    training = make_config({}).training
    assert (training.epochs, training.batch_size, training.steps, training.batch_tokens) == (
        3,
        16,
        None,
        None,
    )
    training = make_config({"training": {"steps": 5, "batch_tokens": 100}}).training
    assert (training.epochs, training.batch_size, training.steps, training.batch_tokens) == (
        None,
        None,
        5,
        100,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"trainning": {}},
            "unknown key 'trainning'; the file has: experiment, plugins, task, model, method, training",
        ),
        (
            {"training": {"learning_rate": 1}},
            r"unknown key 'training.learning_rate'; \[training\] has: lr, epochs",
        ),
        ({"training": {"lr": "fast"}}, 'training.lr = "fast" does not fit: input should be a valid number'),
        ({"training": {"lr": 0}}, "training.lr must be positive, got 0"),
        ({"training": {"lr": float("nan")}}, "training.lr must be positive"),
        ({"training": {"steps": 1, "epochs": 1}}, "both given; keep one"),
        ({"training": {"batch_size": 1, "batch_tokens": 1}}, "both given; keep one"),
        ({"training": {"batch_size": 2.5}}, "training.batch_size = 2.5 does not fit"),
        ({"training": {"schedule": "step"}}, "'cosine', 'linear' or 'constant'"),
        ({"training": {"label_smoothing": 2}}, "between 0 and 1"),
        ({"training": {"warmup": -1}}, "training.warmup must be 0 or more, got -1"),
        ({"training": {"betas": [0.9, 1.0]}}, "betas must be at least 0 and below 1"),
        ({"training": {"lr": True}}, "training.lr must be a number, got true"),
        ({"training": {"lr_scale": {"q": True}}}, "training.lr_scale.q must be a number, got true"),
        ({"training": {"steps": 10**30}}, "training.steps has 31 digits"),
        ({"task": {"data": "a\0b"}}, "task.data = .* is not text in UTF-8"),
        ({"task": {"max_length": 10**12}}, "task.max_length must be between 1 and 1,048,576"),
        ({"task": {"train_size": 0}}, "task.train_size must be positive"),
        ({"task": "imdb"}, r"task must be a table, \[task\], got"),
        ({"method": {"freeze": {"q": 1}}}, "method.freeze.q = 1 does not fit"),
    ],
)
def test_mistakes_are_told_in_one_line(values, message):
    with pytest.raises(UserError, match=message) as error:
        make_config(values, "run.toml")
    assert str(error.value).startswith("run.toml: ")
    assert "\n" not in str(error.value)


def test_files_that_are_no_toml(tmp_path):
    path = tmp_path / "a.toml"
    with pytest.raises(UserError, match="no such file"):
        read_toml(path)
    path.write_text("lr = = 3")
    with pytest.raises(UserError, match=r"is not a TOML file: .*line 1"):
        read_toml(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not a TOML file"):
        read_toml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("training.lr=3e-4", {"training": {"lr": 3e-4}}),
        ("model.name=gpt-tiny", {"model": {"name": "gpt-tiny"}}),
        ("method.freeze={q = ':-2'}", {"method": {"freeze": {"q": ":-2"}}}),
        ("training.gradient_checkpointing=true", {"training": {"gradient_checkpointing": True}}),
        ("task.data=C=1.csv", {"task": {"data": "C=1.csv"}}),
    ],
)
def test_assignments(text, value):
    assert from_assignment(text) == value


@pytest.mark.parametrize("text", ["training.lr", "=3", "a b=1", ".x=1"])
def test_no_assignment(text):
    with pytest.raises(UserError, match=r"section\.key=value"):
        from_assignment(text)


def test_naming_one_length_replaces_the_other():
    base = {"training": {"epochs": 3, "batch_size": 16, "lr": 1e-3}}
    merged = merge(base, {"training": {"steps": 10, "batch_tokens": 99}})
    assert merged == {"training": {"steps": 10, "batch_tokens": 99, "lr": 1e-3}}


def test_flags_are_keys():
    for path in FLAGS.values():
        section, key = path.split(".")
        assert hasattr(getattr(RunConfig(), section), key)
        assert nest(path, 1) == {section: {key: 1}}


def test_identity_leaves_out_what_does_not_change_the_result():
    one = make_config({"task": {"data_dir": "a"}, "training": {"save_every": 1, "keep": 5, "log_every": 3}})
    other = make_config({})
    assert one != other
    assert one.identity() == other.identity()
    assert make_config({"training": {"seed": 1}}).identity() != other.identity()
    for section, names in INCIDENTAL.items():
        assert all(hasattr(getattr(other, section), name) for name in names)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Tiny", "gpt-tiny"), ("Medium-512", "gpt-medium-512"), ("GPT Medium_512", "gpt-medium-512"),
        ("Large", "gpt-large"), ("GPT-XL", "gpt2-xl"), ("GPT2-XL", "gpt2-xl"), ("gpt2", "gpt2"),
        ("bert-base-uncased", "bert-base-uncased"), ("someone/Large", "someone/Large"),
    ],
)  # fmt: skip
def test_the_reports_names_of_sizes_are_understood(name, size, tmp_path, monkeypatch):
    assert make_config({"model": {"name": name}}).model.name == size
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Tiny").mkdir()
    assert make_config({"model": {"name": "Tiny"}}).model.name == "Tiny"  # a folder of that name
