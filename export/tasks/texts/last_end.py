"""Classifiers that read the state at a text's last end token: BART, T5 and their relatives."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...errors import VocabularyError
from ..base import HeadModule


class LastEndModule(HeadModule):
    """A classifier whose graph finds the last end token of each row by its place.

    transformers cuts the states at all end tokens of a batch into equal parts, one for each row, and checks before that
    every row has as many (5.23, modeling_bart.py, `BartForSequenceClassification`). A graph has the cut without the
    check, and a text that contains the token would move the answers of its neighbours. Outside of an export it is
    transformers' own code that runs, which is asked for one row alone: the graph is compared with that.
    """

    def forward(self, *inputs: Tensor) -> Tensor:
        """See `HeadModule`."""
        if not torch.compiler.is_exporting():
            return super().forward(*inputs)
        named = dict(zip(self.input_names, inputs, strict=True))
        ids = named["input_ids"]
        model: Any = self.model
        states = model.base_model(**named, **_shift(model, ids)).last_hidden_state  # [batch, seq_len, hidden]
        is_end = (ids == model.config.eos_token_id).to(torch.int64)
        last = (is_end * torch.arange(ids.shape[1], device=ids.device)).amax(dim=1)
        state = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)
        logits: Tensor = model.classification_head(state)
        return logits


def _shift(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return what the decoder is given, where the base model does not make it of the ids by itself, as BART's does.

    MBart and PLBart do (transformers 5.23, modeling_mbart.py, `shift_tokens_right`), but by a squeeze that leaves a
    batch of one without a batch, of which no graph for any number of rows is made.
    """
    if model.config.model_type in ("mbart", "plbart"):
        # The last token of a text names its language, and comes first.
        last = ids.ne(model.config.pad_token_id).sum(dim=1, keepdim=True) - 1
        return {"decoder_input_ids": torch.cat([ids.gather(1, last), ids[:, :-1]], dim=1)}
    # T5 and its relatives shift them in front of their base model.
    shift = getattr(model, "_shift_right", None)
    return {} if shift is None else {"decoder_input_ids": shift(ids)}


def reads_last_end(model: PreTrainedModel) -> bool:
    """Tell whether a classifier reads the state at the last end token; others of an encoder and a decoder have `score`.

    The proof tells as well: the graph is compared with transformers' own code.
    """
    return bool(model.config.is_encoder_decoder) and hasattr(model, "classification_head")


def check_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that ends no text with the token that the classifier reads.

    Raises:
        VocabularyError: It ends texts with another, or with none.
    """
    wanted, got = model.config.eos_token_id, tokenizer("a")["input_ids"]
    if wanted not in got:
        raise VocabularyError(
            "the classifier reads the token that ends a text, which its tokenizer does not put there",
            expected=f"eos_token_id {wanted}, as config.json says",
            got=f"{got} for the text 'a'",
            remedy="write the one that it was trained with into both: eos_token_id of config.json, and tokenizer.json",
        )
