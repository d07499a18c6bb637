"""How many positions there are, and those scaled by how long a text is: nothing is served that would change others."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer, EsmConfig, LlamaConfig, LlamaModel, Phi3Config, Phi3Model

from export.errors import ModelError
from export.tasks.building import must_read_text, writes_text
from export.weights.positions import find_unscaled_length, refuse_scaled
from export.weights.tokenizer import read_max_length
from export.weights.torch_model import load_config

SIZES = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
LIKE_ROBERTA = [
    *("CamembertModel", "Data2VecTextModel", "EsmModel", "IBertModel", "LukeModel", "MPNetModel", "RobertaModel"),
    *("RobertaPreLayerNormModel", "XLMRobertaModel", "XLMRobertaXLModel", "XmodModel", "ClapTextModel"),
]


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("name", LIKE_ROBERTA)
def test_as_many_tokens_are_read_as_there_are_positions_behind_the_padding(
    name: str, padding: int, tmp_path: Path
) -> None:
    class_ = getattr(transformers, name)
    config = class_.config_class(**{**SIZES, "pad_token_id": padding}, max_position_embeddings=30)
    if name == "XmodModel":
        config.default_language = "en_XX"
    model = class_(config).eval()
    longest = read_max_length(tmp_path, None, config)
    ids = torch.full((1, longest), 7)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    more = torch.full((1, longest + 1), 7)
    with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
        model(input_ids=more, attention_mask=torch.ones_like(more))


def test_a_model_that_turns_its_positions_has_all_of_them(tmp_path: Path) -> None:
    config = EsmConfig(**SIZES, pad_token_id=1, max_position_embeddings=30, position_embedding_type="rotary")
    assert read_max_length(tmp_path, None, config) == 30


def save_longrope(folder: Path) -> Path:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 24}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    Phi3Model(
        Phi3Config(
            **SIZES, **ENDS, max_position_embeddings=96, original_max_position_embeddings=24, rope_parameters=rope
        )
    ).save_pretrained(folder)
    return folder


def test_texts_are_cut_where_longrope_would_turn_what_is_beside_them(checkpoint: Path, tmp_path: Path) -> None:
    config = load_config(save_longrope(tmp_path))
    assert read_max_length(tmp_path, AutoTokenizer.from_pretrained(checkpoint), config) == 24
    # What makes it needful: the first row has another answer beside a longer one.
    model = Phi3Model.from_pretrained(tmp_path).eval()
    ids = torch.randint(3, 99, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask).last_hidden_state[0, :20]
        alone = model(input_ids=ids[:1, :20]).last_hidden_state[0]
        beside = model(input_ids=ids[:, :24], attention_mask=mask[:, :24]).last_hidden_state[0, :20]
    assert (together - alone).abs().max() > 1e-3
    torch.testing.assert_close(beside, alone)


@pytest.mark.parametrize("task", ["text-generation-logits", "text-generation-logits-with-past"])
def test_rows_of_tokens_that_nothing_cuts_are_refused(task: str, tmp_path: Path) -> None:
    config = load_config(save_longrope(tmp_path))
    with pytest.raises(ModelError, match=f"not served for {task}: expected nothing longer than 24 tokens"):
        refuse_scaled(config, task, reads_text=must_read_text(task), writes=writes_text(task))


def test_dynamic_positions_are_refused_but_for_the_engine_that_writes_and_the_remedy_changes_no_answer(
    tmp_path: Path,
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    LlamaModel(LlamaConfig(**SIZES, **ENDS, max_position_embeddings=32, rope_parameters=rope)).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert find_unscaled_length(config) == 0
    refuse_scaled(config, "text-generation", reads_text=True, writes=True)
    with pytest.raises(ModelError, match=r'write "default" in its place .*: up to 32 tokens the two are the same'):
        refuse_scaled(config, "feature-extraction", reads_text=True, writes=False)
    ids = torch.randint(3, 99, (3, 32))
    with torch.no_grad():
        want = LlamaModel.from_pretrained(tmp_path).eval()(input_ids=ids).last_hidden_state
        content = json.loads((tmp_path / "config.json").read_text())
        content["rope_parameters"]["rope_type"] = "default"
        (tmp_path / "config.json").write_text(json.dumps(content))
        got = LlamaModel.from_pretrained(tmp_path).eval()(input_ids=ids).last_hidden_state
    assert torch.equal(got, want)
    refuse_scaled(load_config(tmp_path), "feature-extraction", reads_text=True, writes=False)
