"""The server's refusals: facts first, one sentence out of them."""

from server.errors import ControlError, NotFoundError, RolloutError


def test_a_refusal_keeps_its_facts_apart_and_is_one_sentence() -> None:
    error = NotFoundError("no model was found", expected="one; or more", got="none", remedy="publish one")
    assert error.fault == "no model was found: expected one; or more, got none"
    assert error.remedy == "publish one"
    assert str(error) == "no model was found: expected one; or more, got none; publish one."


def test_a_reason_that_is_a_sentence_itself_ends_no_sentence() -> None:
    inner = ControlError("/load", expected="an answer", got="version 1: Stub process 'a_0' is not healthy.;")
    assert str(inner) == "/load: expected an answer, got version 1: Stub process 'a_0' is not healthy."
    assert str(RolloutError("version 1 cannot be served", got=str(inner), remedy="it is not served.")) == (
        "version 1 cannot be served: got /load: expected an answer, got version 1: Stub process 'a_0' is not healthy; "
        "it is not served."
    )
    assert str(ControlError("a", got="one, two ...")) == "a: got one, two ...."
    # As tritonserver tells Python's exceptions.
    inner = ControlError("/load", got="ValueError: no!\n\nAt:\n  model.py(5): initialize\n;")
    assert str(inner) == "/load: got ValueError: no! At: model.py(5): initialize."
    assert str(RolloutError("a cannot be served", got=f"{inner}\n;.\n", remedy="it is not served")) == (
        "a cannot be served: got /load: got ValueError: no! At: model.py(5): initialize; it is not served."
    )
    assert str(ControlError("a", got="nothing in .", remedy="mend it!;")) == "a: got nothing in .; mend it!."


def test_what_a_server_answered_is_told_on_one_line_and_never_obeyed_by_a_terminal() -> None:
    text = str(ControlError("/v2", expected="an answer", got="HTTP 400:\n\x1b[2J" + "x" * 10_000))
    assert text.startswith(r"/v2: expected an answer, got HTTP 400: \x1b[2Jxxx")
    assert "\n" not in text
    assert len(text) < 1_200
