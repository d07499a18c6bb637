"""The launcher's own reading of `config.pbtxt`, held against protobuf's."""

import pytest
from google.protobuf import text_format
from harness import CHECKOUT
from tritonclient.grpc import model_config_pb2 as pb

from server.following.model_text import (
    read_fields,
    read_inputs,
    read_parameter,
    read_steps,
    read_versions,
    rename,
    replace_field,
    serve_versions,
    set_parameter,
)

BY_HAND = """
# A model as people write it: comments with "quotes" and } in them, commas, lists, one line or many.
name: "by_hand", platform: 'ensemble'
max_batch_size: 8
version_policy: { specific: { versions: [1, 3] } }
input [ { name: "A" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "B # no comment } \\" {" data_type: TYPE_FP32 dims: [ -1, 3 ] } ]
output { name: "C" data_type: TYPE_FP32 dims: -1 }
parameters { key: "x" value { string_value: "name: \\"other\\"" } } ;
ensemble_scheduling {
  step [ { model_name: "a" model_version: -1 input_map { key: "A" value: "A" } output_map { key: "t" value: "t" } },
         { model_name: "b" model_version: 3 } ]
}
"""
PUBLISHED = sorted(CHECKOUT.glob("model_repository/*/config.pbtxt"))


def parse(text: str) -> pb.ModelConfig:
    return text_format.Parse(text, pb.ModelConfig())


@pytest.mark.parametrize("text", [BY_HAND, *(path.read_text() for path in PUBLISHED)])
def test_a_configuration_taken_apart_and_joined_again_says_the_same(text: str) -> None:
    assert parse("\n".join(field for _, field in read_fields(text))) == parse(text)


def test_a_field_is_replaced_wherever_it_stands_and_nothing_else() -> None:
    wanted = parse(BY_HAND)
    wanted.name = "another"
    wanted.version_policy.specific.versions[:] = [2, 7]
    del wanted.input[:]
    changed = replace_field(serve_versions(rename(BY_HAND, "another"), {7, 2}), "input")
    assert parse(changed) == wanted


def test_versions_and_steps_are_read() -> None:
    assert read_versions(BY_HAND) == [1, 3]
    assert read_steps(BY_HAND) == [("a", -1), ("b", 3)]
    assert read_inputs(BY_HAND) == ["A", 'B # no comment } \\" {']
    assert read_versions('name: "x" version_policy { latest { num_versions: 2 } }') == []
    assert read_versions('name: "x"') == read_steps('name: "x"') == []


@pytest.mark.parametrize("text", ['input { name: "a"', "input [ { }", "name", "}", "input } {"])
def test_what_is_not_whole_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        read_fields(text)


def test_a_parameter_is_read_and_set() -> None:
    changed = set_parameter(set_parameter(BY_HAND, "y", "1"), "y", "2")
    wanted = parse(BY_HAND)
    wanted.parameters["y"].string_value = "2"
    assert parse(changed) == wanted
    assert read_parameter(changed, "y") == "2"
    assert read_parameter(changed, "z") is None
