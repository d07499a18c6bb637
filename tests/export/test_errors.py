from export.errors import CheckpointError, escape_controls, list_some


def test_a_sentence_is_what_expected_got_and_remedy() -> None:
    assert str(CheckpointError("x is\n wrong", expected="a", got="b", remedy="do c")) == (
        "x is wrong: expected a, got b; do c."
    )
    assert str(CheckpointError("x is wrong")) == "x is wrong."


def test_a_reason_that_is_a_sentence_itself_ends_no_sentence() -> None:
    inner = CheckpointError("x is wrong", got="1:1 : no field named 'garbage'.")
    assert str(inner) == "x is wrong: got 1:1 : no field named 'garbage'."
    assert str(CheckpointError("y is wrong", got=str(inner), remedy="do c")) == (
        "y is wrong: got x is wrong: got 1:1 : no field named 'garbage'; do c."
    )
    assert str(CheckpointError("a", expected="one of 1, 2 ...", got=".")) == "a: expected one of 1, 2 ..., got .."
    assert str(CheckpointError("a", got="model.py(5): initialize\n;.", remedy="do c")) == (
        "a: got model.py(5): initialize; do c."
    )


def test_a_sentence_is_bounded_whatever_a_file_says() -> None:
    sentence = str(CheckpointError("w" * 10_000_000, expected="e" * 3_000, got="\x1b" * 3_000, remedy="r" * 1_000))
    assert len(sentence) < 5_000
    assert sentence.startswith("www") and " ... " in sentence
    assert sentence.endswith("r" * 1_000 + ".")


def test_control_characters_and_halves_of_characters_are_escaped() -> None:
    assert escape_controls("Grüße \x1b[2J\x07 \ud800\u202e") == "Grüße \\x1b[2J\\x07 \\ud800\\u202e"
    assert str(CheckpointError("a\x1b]0;b\x07")) == "a\\x1b]0;b\\x07."


def test_listed_names_are_bounded_in_number_and_length() -> None:
    assert list_some(range(12), 3) == "0, 1, 10, +9 more"
    assert list_some(["a" * 300]) == "a" * 97 + " ... " + "a" * 97
    # As text, this key has 60 million characters.
    assert len(list_some([("x" * 1_000_000, b"y" * 1_000_000) * 30])) < 500
