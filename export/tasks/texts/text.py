"""Tasks that an ensemble serves: texts in, answers out, a tokenizer in front."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.generic import ModelOutput

from ...artefacts import LEAN, POSTPROCESS, PREPROCESS, Artefacts
from ...errors import CheckpointError
from ...signature import BATCH, SEQ_LEN, STRING, WINDOWS, Contract, ModelSignature, TensorSignature
from ..base import Task, TaskSource
from ..cases import SIZES, Case, Outputs, Row, Side
from ..comparison import ANSWER_TOLERANCES, LOGIT_TOLERANCES, MAX_LOGIT_ERROR, compare_logits
from ..golden import build_sample
from ..steps import POSTPROCESS_BACKEND, POSTPROCESS_FILE, PREPROCESS_BACKEND, describe_lean
from .encoding import Question, QuestionEncoder, TokenRow

# What clients send; inside the ensemble the graph's own names are used.
TEXT = "TEXT"
TEXT_PAIR = "TEXT_PAIR"

# The file that the preprocess step reads.
TOKENIZER_FILE = "tokenizer.json"

# Output name → the values that one question is answered with, as the ensemble gives them.
Answer = Mapping[str, list[Any]]

# Texts whose expected answers are kept, to ask a running server for.
_GOLDEN_TEXTS = 16

# An export is not verified with fewer. Ids in no order of any text are tried beside them.
_FEWEST_TEXTS = 2

# Rows of one padded batch are tried up to this length: attention takes memory by the square of it, for each of them.
# A single row is tried at the model's maximum.
_LONGEST_IN_BATCH = 512

# Rows of one length in one batch; fewer where the model reads fewer.
_SAME_LENGTH = 7

_SEEDS = (0, 1)
_SIDES: tuple[Side, ...] = ("right", "left")

# Of the example that is traced: neither 1, which may be taken for a constant, nor equal to the batch.
_EXAMPLE_LENGTH = 7


class TextTask(Task):
    """A task about texts.

    Attributes:
        golden_tolerances: Error → bound for what the ensemble answers.
        signature: Tensors of the module, with a contract.
        tokenizer: The checkpoint's own tokenizer, with the added tokens.
        max_length: The longest sequence that is made of a text, in tokens, special tokens included.
    """

    takes_pairs: ClassVar[bool] = False
    tokenizer_use = "required"
    is_ensemble = True
    has_lean = True
    has_lengths = True
    tolerances: ClassVar[Mapping[str, float]] = LOGIT_TOLERANCES
    golden_tolerances: ClassVar[Mapping[str, float]] = ANSWER_TOLERANCES

    signature: ModelSignature

    def __init__(self, source: TaskSource) -> None:
        assert source.tokenizer is not None, "Bug: a task about texts without a tokenizer"
        self.tokenizer: PreTrainedTokenizerBase = source.tokenizer
        # What transformers' own pipelines truncate to.
        self.max_length = self.tokenizer.model_max_length = source.max_length
        self.added_tokens = source.added_tokens
        # On the left, padding moves a text where positions are counted from there; on the right it moves nothing.
        self.tokenizer.padding_side = "right"
        _check_room(self.tokenizer, source, takes_pairs=self.takes_pairs)

    @property
    def padding_values(self) -> Mapping[str, int]:
        """See `Task`."""
        return {"input_ids": self.tokenizer.pad_token_id or 0}

    @property
    def contract(self) -> Contract:
        """What clients see, which every task about texts has."""
        assert self.signature.contract is not None, "Bug: a task about texts without an ensemble"
        return self.signature.contract

    @property
    def encoder(self) -> QuestionEncoder:
        """Makes token ids of questions, as the checkpoint's own tokenizer does."""
        return QuestionEncoder(self.tokenizer, self.max_length)

    @property
    def postprocess(self) -> Mapping[str, Any] | None:
        """What `postprocess.json` tells the step behind the graph; None where there is no such step."""
        return None

    @property
    def step_files(self) -> Mapping[str, Mapping[str, bytes]]:
        """See `Task`."""
        tokenizer = self.encoder.build_server_tokenizer().to_str(pretty=True)
        files = {PREPROCESS: {TOKENIZER_FILE: tokenizer.encode()}}
        if self.postprocess is not None:
            text = json.dumps(self.postprocess, ensure_ascii=False) + "\n"
            files[POSTPROCESS] = {POSTPROCESS_FILE: text.encode()}
        if self.contract.is_lean:
            has_windows = WINDOWS in self.signature.inputs[0].symbols
            files[LEAN] = describe_lean(self.signature, has_windows=has_windows, longest=self.max_length)
        return files

    def build_signature(
        self,
        inputs: tuple[TensorSignature, ...],
        outputs: tuple[TensorSignature, ...],
        answers: tuple[TensorSignature, ...],
        *,
        carried: tuple[TensorSignature, ...] = (),
        has_postprocess: bool = True,
        unknown_id: int | None = None,
    ) -> ModelSignature:
        """Return the signature of the module and of the ensemble around it.

        Args:
            inputs: Of the module.
            outputs: Of the module.
            answers: What clients get.
            carried: Tensors of the tokenizer that only the postprocess step takes.
            has_postprocess: Whether the answers are made of the outputs by `postprocess`, not equal to them.
            unknown_id: See `Contract`.
        """
        names = (TEXT, TEXT_PAIR) if self.takes_pairs else (TEXT,)
        return ModelSignature(
            inputs=inputs,
            outputs=outputs,
            longest={SEQ_LEN: self.max_length},
            contract=Contract(
                inputs=tuple(TensorSignature(name=name, dtype=STRING, dims=(BATCH, 1)) for name in names),
                outputs=answers,
                preprocess=PREPROCESS_BACKEND,
                postprocess=POSTPROCESS_BACKEND if has_postprocess else None,
                carried=carried,
                unknown_id=unknown_id,
            ),
        )

    def build_questions(self, texts: Sequence[str]) -> list[Question]:
        """Return a question for each of `texts`, such as this task is asked."""
        if not self.takes_pairs:
            return [Question(text=text) for text in texts]
        return [Question(text=text, pair=pair) for text, pair in zip(texts, [*texts[1:], texts[0]], strict=True)]

    @abstractmethod
    def answer(self, question: Question) -> Answer:
        """Return what the checkpoint answers, by transformers' own code wherever it has any for this task."""

    def compare(
        self, expected: Sequence[Outputs], got: Sequence[Outputs], bounds: Mapping[str, float]
    ) -> dict[str, float]:
        """See `Task`."""
        wanted, had = [outputs[0] for outputs in expected], [outputs[0] for outputs in got]
        return compare_logits(wanted, had, bounds.get("max_abs_error", MAX_LOGIT_ERROR))

    def check_files(self, files: Artefacts) -> int:
        """See `Task`."""
        questions = [*self._build_all_questions(), *self._build_literal_questions()]
        self.encoder.check_agrees(Tokenizer.from_file(str(files.find(TOKENIZER_FILE))), questions)
        return len(questions)

    def build_golden(self) -> dict[str, Any]:
        """See `Task`. Answers to the first questions and the last two.

        A server asks the first one when it starts; an answer of nothing but zeros would prove little, so one with
        numbers stands first.
        """
        questions, answers = self._build_all_questions(), []
        for question in [*questions[:-2][: _GOLDEN_TEXTS - 2], *questions[-2:]]:
            asked = {TEXT: question.text, TEXT_PAIR: question.pair}
            answers.append((asked, self.answer(question)))
        scores = next(tensor.name for tensor in self.contract.outputs if tensor.dtype == torch.float32)
        answers.sort(key=lambda answer: not any(answer[1][scores]))
        samples = [build_sample(self.contract, *answer) for answer in answers]
        return {"tolerances": dict(self.golden_tolerances), "samples": samples}

    def build_cases(self) -> Iterator[Case]:
        """See `Task`. Real texts, then ids that no text has, at every length and on both sides of the padding."""
        windows = [self.encoder.encode(question) for question in self._build_all_questions()]
        sentences = [self._to_row([window]) for rows in windows for window in rows]
        ids = self._collect_ids()
        flows = self._build_flows(ids)
        for length, row in flows.items():
            yield Case(name=f"{length} tokens" if length > 1 else "1 token", rows=[row], batch_size=1)
        short = [row for length, row in flows.items() if length <= _LONGEST_IN_BATCH]
        yield Case(name="mixed lengths in one batch", rows=short, batch_size=len(short))
        yield Case(name="sentences one by one", rows=sentences, batch_size=1, is_real=True)
        name, whole = "sentences in one batch", len(sentences)
        yield Case(name=name, rows=sentences, batch_size=whole, is_real=True)
        # Neighbours and padding of another batch must change nothing: the same rows in another order, eight at a time.
        name = "sentences in batches of 8"
        yield Case(name=name, rows=sentences[::-1], batch_size=8, is_real=True)
        if WINDOWS in self.signature.inputs[0].dims:
            row = self._to_row(max(windows, key=len))
            yield Case(name="windows of one text", rows=[row], batch_size=1, is_real=True)
        yield from self._build_random_cases(ids)
        rows = [self._to_row(self.encoder.encode(question)) for question in self._build_literal_questions()]
        yield Case(name="special tokens in texts", rows=rows, batch_size=len(rows))
        for token in self.added_tokens:
            texts = [token, f"{token} at the start", f"in the {token} middle, in a longer one"]
            rows = [self._to_row(self.encoder.encode(question)) for question in self._build_with_tokens(texts)]
            yield Case(name=f"new token {token}", rows=rows, batch_size=len(rows), is_real=True)

    def build_example(self) -> tuple[torch.Tensor, ...]:
        """See `Task`. Two rows of 7 tokens; where there are windows, two in three of them."""
        sizes = {BATCH: 2, WINDOWS: 3}
        flows = self._build_flows(self._collect_ids())
        sizes[SEQ_LEN] = max(length for length in flows if length <= _EXAMPLE_LENGTH)
        row = flows[sizes[SEQ_LEN]]
        return tuple(
            torch.from_numpy(np.broadcast_to(row[tensor.name], tensor.resolve_dims(sizes)).copy())
            for tensor in self.signature.inputs
        )

    def _collect_ids(self) -> list[int]:
        """Return the ids of all texts one after another, without those that begin, part or end a sequence."""
        tokenizer = self.tokenizer
        ends = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
        ends.add(tokenizer.pad_token_id)
        windows = [window for question in self._build_all_questions() for window in self.encoder.encode(question)]
        return [token_id for window in windows for token_id in window["input_ids"] if token_id not in ends]

    def _build_random_cases(self, ids: Sequence[int]) -> Iterator[Case]:
        """Yield ids in no order of any text, of which a model knows less what to expect.

        Where padding stands on the left, positions that are counted from there move: a row alone is then no reference,
            and the module is given the padded batch itself.
        """
        for seed in _SEEDS:
            shuffled = np.random.default_rng(seed).permutation(np.array(ids)).tolist()
            flows = self._build_flows(shuffled)
            rows = [row for length, row in flows.items() if length <= _LONGEST_IN_BATCH]
            size = min(_SAME_LENGTH, self.max_length)
            # Where the texts have fewer tokens, they come again.
            parts = np.resize(shuffled, (5, size)).tolist()
            same = [self._to_row([self._build_window(part)]) for part in parts]
            yield Case(name=f"5 of {size} tokens, seed {seed}", rows=same, batch_size=5)
            for padding in _SIDES:
                yield Case(
                    name=f"padded {padding}, seed {seed}",
                    rows=rows,
                    batch_size=len(rows),
                    padding_side=padding,
                    padded_reference=padding == "left",
                )

    def _build_flows(self, ids: Sequence[int]) -> dict[int, Row]:
        """Return length in tokens → a row of that length, cut from `ids`, that ends as the tokenizer ends a text."""
        longest = self.max_length
        flow = list(ids) * -(-longest // len(ids))
        lengths = sorted({length for length in SIZES if length < longest} | {longest})
        return {length: self._to_row([self._build_window(flow[:length])]) for length in lengths}

    def _build_window(self, ids: list[int]) -> TokenRow:
        # Some heads look for the token that ends a sequence, and there must be one of them (transformers,
        # modeling_bart.py, BartForSequenceClassification). mBART puts a language behind it.
        whole = self.encoder.encode(self.build_questions(["a"])[0])[0]["input_ids"]
        ends = (self.tokenizer.sep_token_id, self.tokenizer.eos_token_id)
        place = max((index for index, token_id in enumerate(whole) if token_id in ends), default=0)
        # One in front of the text ends none.
        tail = whole[place:][: len(ids)] if place else []
        ids = [*ids[: len(ids) - len(tail)], *tail]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}

    def _to_row(self, windows: Sequence[TokenRow]) -> Row:
        """Return tokens as the signature wants them: [windows, seq_len] where it has windows, else [seq_len]."""
        longest = max(len(window["input_ids"]) for window in windows)
        row = {}
        for tensor in self.signature.inputs:
            padding = self.padding_values.get(tensor.name, 0)
            values = np.full((len(windows), longest), padding, dtype=np.int64)
            for index, window in enumerate(windows):
                values[index, : len(window[tensor.name])] = window[tensor.name]
            row[tensor.name] = values if WINDOWS in tensor.dims else values[0]
        return row

    def _build_literal_questions(self) -> list[Question]:
        """Return questions whose texts hold the tokenizer's own tokens, among others without.

        A head that looks for one of them finds more than one in some rows; nowhere as many as in all rows together
        would make equal parts.
        """
        tokenizer = self.tokenizer
        around = (tokenizer.bos_token, tokenizer.cls_token, tokenizer.sep_token, tokenizer.eos_token)
        own = (*around, tokenizer.mask_token, tokenizer.unk_token, tokenizer.pad_token)
        first, second = (question.text for question in self._build_all_questions()[:2])
        end = tokenizer.eos_token or tokenizer.sep_token or ""
        every = " ".join(dict.fromkeys(token for token in own if token))
        return self._build_with_tokens([first, f"ended {end} too early", f"all of {every} and again {every}", second])

    def _build_all_questions(self) -> list[Question]:
        """Return the questions that an export is verified with.

        Raises:
            CheckpointError: The tokenizer makes tokens of too few of them.
        """
        texts = [f"{token} between words {token}" for token in self.added_tokens]
        questions = self._build_with_tokens(read_verification_texts() + texts)
        if len(questions) < _FEWEST_TEXTS:
            raise CheckpointError(
                f"the tokenizer makes no token of {len(read_verification_texts()) - len(questions)} of the "
                f"{len(read_verification_texts())} texts that an export is verified with",
                expected=f"tokens of {_FEWEST_TEXTS} texts or more, which are of several languages",
                got=f"of {len(questions)}",
                remedy="correct the normalizer and pre_tokenizer in tokenizer.json, which leave nothing of a text",
            )
        return questions

    def _build_with_tokens(self, texts: Sequence[str]) -> list[Question]:
        """Return the questions that are one or more tokens.

        A tokenizer that puts none of its own around a text makes nothing of one whose letters it leaves out; the
        server refuses that text.
        """
        questions = self.build_questions(texts)
        return [question for question in questions if self.encoder.encode(question)[0]["input_ids"]]


@contextmanager
def replace_model(
    model: PreTrainedModel,
    module: nn.Module,
    signature: ModelSignature,
    read_logits: Callable[[Any], Tensor] = lambda outputs: outputs,
) -> Iterator[None]:
    """Have transformers' own pipeline take its logits from another module, while the context lasts.

    Args:
        model: The pipeline's.
        module: What is asked in its place, of tensors in the order of the signature.
        signature: Tensors of the module.
        read_logits: Makes the logits of a text of what the module returns.
    """

    def forward(input_ids: Tensor, **others: Any) -> ModelOutput:
        given = {"attention_mask": torch.ones_like(input_ids), **others, "input_ids": input_ids}
        return ModelOutput(logits=read_logits(module(*(given[tensor.name] for tensor in signature.inputs))))

    # Beside the class's own, which is back as soon as this one is gone.
    vars(model)["forward"] = forward
    try:
        yield
    finally:
        del vars(model)["forward"]


def _check_room(tokenizer: PreTrainedTokenizerBase, source: TaskSource, *, takes_pairs: bool) -> None:
    """Refuse a longest sequence that has no room for a text.

    Raises:
        CheckpointError: The tokenizer's own tokens fill it.
    """
    least = tokenizer.num_special_tokens_to_add(pair=takes_pairs) + 1
    if source.max_length < least:
        raise CheckpointError(
            f"sequences of the model in {source.directory} have no room for a text",
            expected=f"{least} tokens or more, {least - 1} of them the tokenizer's own",
            got=f"{source.max_length} at most",
            remedy="correct model_max_length in tokenizer_config.json",
        )


def read_verification_texts() -> list[str]:
    """Return the sentences that every export is checked on: several languages and scripts, short to long."""
    return resources.files(__package__).joinpath("verification_texts.txt").read_text(encoding="utf-8").splitlines()
