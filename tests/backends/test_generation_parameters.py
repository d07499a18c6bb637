"""What a request to a model that writes text may ask for, and in which words the rest is refused."""

import json
from typing import Any

import pytest
from harness import load_backend

parameters = load_backend("openvino_generate", "generation_parameters")


def test_a_request_says_it_in_json_or_beside_it_and_numbers_may_be_texts() -> None:
    read = parameters.read_parameters(json.dumps({"temperature": "0.5", "stop": ["a", "b"]}), {"seed": 3}, {"top_k": 7})
    assert (read.temperature, read.stop, read.seed, read.top_k) == (0.5, ("a", "b"), 3, 7)


def test_what_a_version_has_for_the_least_gives_way_to_the_most_that_is_asked_for() -> None:
    defaults = {"min_tokens": 20, "max_tokens": 16}
    assert parameters.read_parameters(None, {}, defaults).min_tokens == 16
    assert parameters.read_parameters(None, {"max_tokens": 3, "min_tokens": None}, defaults).min_tokens == 3
    assert parameters.read_parameters(None, {"max_tokens": 30}, defaults).min_tokens == 20
    with pytest.raises(parameters.RequestError, match="min_tokens 20 has no effect: expected at most max_tokens, 16"):
        parameters.read_parameters(None, {"min_tokens": 20}, defaults)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"temperature": 1e-300}, "temperature is too small: expected 0, which takes the likeliest token, or at least"),
        ({"temperature": float("nan")}, "temperature cannot be used: expected a number from 0 to 100, got 'nan'"),
        ({"min_p": 1, "temperature": 1}, "min_p cannot be used: expected a number from 0 to 0.999, got '1'"),
        ({"min_tokens": 10, "max_tokens": 3}, "min_tokens 10 has no effect: expected at most max_tokens, 3"),
        ({"n": 2}, "n 2 has no effect: expected a temperature above 0 beside it, got 0"),
        ({"max_tokens": 1 << 40}, "expected a whole number from 1 to 1073741824, got '1099511627776'"),
        ({"best_of": 2}, "the parameter 'best_of' is unknown: expected one of max_tokens, "),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(parameters.RequestError) as caught:
        parameters.read_parameters(None, asked, {})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "sampling_parameters is not JSON: expected an object such as {}, got '{'; write each parameter by"),
        ("[]", "sampling_parameters is not a JSON object: expected an object such as {}, got '[]'; write each"),
        ("null", "sampling_parameters is not a JSON object: expected an object such as {}, got 'null';"),
        ("5", "sampling_parameters is not a JSON object: expected an object such as {}, got '5';"),
        (
            f'{{"max_tokens": {"9" * 5000}}}',
            f"expected a whole number from 1 to 1073741824, got '{'9' * 40}'; pass such",
        ),
        ('{"max_tokens":1,"max_tokens":2}', "max_tokens is given twice: expected it once, got it 2 times in sampling_"),
        ('{"stop": ""}', "stop cannot be used: expected a text or up to 16 in a list, each of one character or more"),
        ('{"stop": ["a", ""]}', """got '["a", ""]'; pass such a value, or leave it out"""),
        (r'{"stop": "\ud800"}', r"stop cannot be used: expected a text or up to 16 in a list, each of one character"),
    ],
)
def test_what_sampling_parameters_say_is_refused_for_what_is_wrong_with_it(text: str, sentence: str) -> None:
    with pytest.raises(parameters.RequestError) as caught:
        parameters.read_parameters(text, {}, {})
    assert sentence in str(caught.value)
    assert str(caught.value).encode()
