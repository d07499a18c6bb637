import json
from pathlib import Path

import pytest
import torch

from export.checkpoints import open_checkpoint
from export.errors import ModelError
from export.tasks import PoolingSettings, SentenceEmbedding, read_pooling
from export.torch_model import load_config, load_model
from export.transforms import CastToFloat32
from export.vocabulary import load_tokenizer

MODULES = "sentence_transformers.models"


def write_modules(directory: Path, kinds: list[str], **modes: bool) -> None:
    modules = [{"idx": i, "path": f"{i}_{kind}", "type": f"{MODULES}.{kind}"} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))


def test_pooling_is_read_as_sentence_transformers_recorded_it(checkpoint: Path, tmp_path: Path) -> None:
    assert read_pooling(checkpoint) == PoolingSettings(mode="mean", normalize=True, source="modules.json")
    write_modules(tmp_path, ["Transformer", "Pooling"], pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    assert read_pooling(tmp_path) == PoolingSettings(mode="cls", normalize=False, source="modules.json")


def test_without_a_record_the_mean_is_taken_and_said_to_be_the_default(tmp_path: Path) -> None:
    pooling = read_pooling(tmp_path)
    assert (pooling.mode, pooling.normalize) == ("mean", True)
    assert "default" in pooling.source


def test_modules_and_modes_that_are_not_exported_are_refused(tmp_path: Path) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling", "Dense"], pooling_mode_mean_tokens=True)
    with pytest.raises(ModelError, match="got Transformer, Pooling, Dense"):
        read_pooling(tmp_path)
    write_modules_again = tmp_path / "again"
    write_modules_again.mkdir()
    write_modules(write_modules_again, ["Transformer", "Pooling"], pooling_mode_max_tokens=True)
    with pytest.raises(ModelError, match="expected one of mean_tokens, cls_token, got max_tokens"):
        read_pooling(write_modules_again)


# From sentence-transformers 6.2.0: SentenceTransformer(the same folder).encode(text)[:5], fp32.
SENTENCE_TRANSFORMERS = {
    "This is an example sentence": [0.06765695, 0.06349596, 0.04871309, 0.07930495, 0.03744801],
    "A cat sleeps on the warm windowsill.": [0.09800734, -0.01233978, -0.03948401, 0.14238003, -0.05486293],
}


@pytest.mark.parametrize("text", SENTENCE_TRANSFORMERS)
def test_the_module_gives_what_sentence_transformers_gives(text: str, checkpoint: Path) -> None:
    model, left_out = load_model(load_config(checkpoint), CastToFloat32(source=open_checkpoint(checkpoint)))
    assert left_out == []
    names = ("input_ids", "attention_mask", "token_type_ids")
    module = SentenceEmbedding(model, read_pooling(checkpoint), names)
    inputs = load_tokenizer(checkpoint)([text], return_tensors="pt")
    got = module(*(inputs[name] for name in names))[0, :5]
    assert torch.allclose(got, torch.tensor(SENTENCE_TRANSFORMERS[text]), atol=1e-6)
