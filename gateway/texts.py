"""Operations on texts: vectors, scores, labels and tokens, as OpenAI, Jina and TEI spell them."""

import asyncio
import base64
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer

from .bodies import Embeddings, Rerank, TeiEmbed, TeiPredict, TeiRerank, TeiTokenize, read_texts
from .call import Call
from .errors import ApiError, refuse
from .published import Row
from .tokens import measure, weigh
from .turns import Turns
from .upstream import GENERATION, Served, Upstream

# Of which tokens are told, and how many of these.
_MAX_CHARACTERS = _MAX_TOKENS = 131_072

# Bytes of JSON that a token becomes beside its text, and how many tokens are written at once, which takes a fraction of
# a millisecond.
_A_TOKEN, _AT_ONCE = 72, 1024

# What is tokenized at a time, beside what the server does, in characters of ASCII. A token that is told of takes as
# much as two of them, so that the longest answers are written one by one.
_AT_A_TIME, _TOLD = 256 * 1024, 2

# Bytes of a query that one request has the server read, which reads it anew beside each document: half of a minute's
# work for one of its cores, beyond which the last documents would not have their turn in time.
_MAX_REPEATED = 16 * 1024 * 1024

_EMBEDDING, _LABELS, _PAIRS = ("embedding",), ("classification",), ("pair classification",)

Vectors = npt.NDArray[np.float32]


def dump(content: Any) -> bytes:
    """Return JSON; arrays of numpy are lists there."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


class Texts:
    """The operations.

    Args:
        upstream: Who is asked.
        matryoshka: Models whose vectors may be cut: they were trained so that their first values are vectors as well.
    """

    def __init__(self, upstream: Upstream, matryoshka: Collection[str]) -> None:
        self._upstream, self._matryoshka = upstream, frozenset(matryoshka)
        self._turns = Turns(_AT_A_TIME, upstream.timeout_s)

    async def embeddings(self, call: Call, asked: Embeddings) -> bytes:
        """Return one vector a text (OpenAI)."""
        texts = read_texts("input", asked.input)
        served = self._upstream.find_of(asked.model, _EMBEDDING)
        vectors, tokens = await self._embed(
            call, served, "input", texts, may_cut=asked.truncate_prompt_tokens is not None, dimensions=asked.dimensions
        )
        shown: Sequence[Any] = [*vectors]
        if asked.encoding_format == "base64":
            shown = [base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode() for vector in vectors]
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return dump({"object": "list", "data": data, "model": served.name, "usage": usage})

    async def rerank(self, call: Call, asked: Rerank) -> bytes:
        """Return documents by their scores, best first (Jina, Cohere)."""
        documents = [each if isinstance(each, str) else each.text for each in asked.documents]
        served = self._upstream.find_of(asked.model, _PAIRS)
        may_cut = asked.truncate_prompt_tokens is not None
        scores, tokens = await self._rank(call, served, "documents", asked.query, documents, may_cut=may_cut)
        results: list[dict[str, Any]] = []
        for index in sort_best_first(scores)[: asked.top_n]:
            results.append({"index": index, "relevance_score": scores[index]})
            if asked.return_documents:
                results[-1]["document"] = {"text": documents[index]}
        return dump({"model": served.name, "results": results, "usage": {"total_tokens": tokens}})

    async def tei_embed(self, call: Call, asked: TeiEmbed) -> bytes:
        """Return one vector a text (TEI)."""
        texts = read_texts("inputs", asked.inputs)
        served = self._upstream.find_of(asked.model, _EMBEDDING)
        if asked.normalize is False and served.files.has_unit_vectors:
            raise refuse(
                "normalize",
                "normalize has no effect",
                expected="true, for the model itself makes vectors of length 1",
                got="false",
                remedy="leave it out, or export the model with --no-normalize",
            )
        vectors, _ = await self._embed(
            call, served, "inputs", texts, may_cut=bool(asked.truncate), dimensions=asked.dimensions
        )
        return dump(list(vectors if asked.normalize is False else normalize(vectors)))

    async def tei_rerank(self, call: Call, asked: TeiRerank) -> bytes:
        """Return texts by their scores, best first (TEI)."""
        served = self._upstream.find_of(asked.model, _PAIRS)
        scores, _ = await self._rank(call, served, "texts", asked.query, asked.texts, may_cut=bool(asked.truncate))
        return dump(
            [
                {"index": index, "score": scores[index]} | ({"text": asked.texts[index]} if asked.return_text else {})
                for index in sort_best_first(scores)
            ]
        )

    async def tei_predict(self, call: Call, asked: TeiPredict) -> bytes:
        """Return the labels of a text or a pair, best first, or those of each of a list (TEI)."""
        given = asked.inputs
        is_batch = isinstance(given, list) and bool(given) and isinstance(given[0], list)
        rows: list[Any] = list(given) if is_batch else [[given] if isinstance(given, str) else given]
        sizes = {len(row) for row in rows}
        if len(sizes) != 1 or not sizes <= {1, 2}:
            raise refuse("inputs", "inputs cannot be used", expected="one text a row, or two in each", got=str(sizes))
        served = self._upstream.find_of(asked.model, _LABELS if sizes == {1} else _PAIRS)
        columns = [[row[place] for row in rows] for place in range(sizes.pop())]
        arrays, _ = await self._score(call, served, "inputs", *columns, may_cut=bool(asked.truncate))
        found = [
            [{"label": label.decode(), "score": score} for label, score in zip(labels, scores, strict=True)]
            for labels, scores in zip(arrays["LABEL"].tolist(), arrays["SCORE"].tolist(), strict=True)
        ]
        return dump(found if is_batch else found[0])

    async def tei_tokenize(self, call: Call, asked: TeiTokenize) -> bytes:
        """Return the tokens of each text, uncut (TEI)."""
        texts = read_texts("inputs", asked.inputs)
        kinds = (*_EMBEDDING, *_LABELS, *_PAIRS, GENERATION)
        served = self._upstream.find_of(asked.model, kinds)
        adds = asked.add_special_tokens is not False
        tokenizer = served.files.tokenizer
        characters = sum(map(len, texts))
        if characters > _MAX_CHARACTERS:
            raise _refuse_tokens("characters", _MAX_CHARACTERS, str(characters))
        size = sum(map(weigh, texts))
        tokens = await self._turns.run(
            call.caller, 0, size, partial(asyncio.to_thread, _count_tokens, tokenizer, texts, adds=adds)
        )
        # Every character of a text is in a token of it, and is six bytes at most where it is escaped.
        call.hold(_A_TOKEN * tokens + 6 * characters)
        write = partial(asyncio.to_thread, _write_tokens, tokenizer, texts, adds=adds)
        return await self._turns.run(call.caller, size, _TOLD * tokens, write)

    async def _embed(
        self, call: Call, served: Served, param: str, texts: list[str], *, may_cut: bool, dimensions: int | None
    ) -> tuple[Vectors, int]:
        width = served.model.makes[0].shape[-1]
        if dimensions is not None and dimensions != width:
            self._check_dimensions(served.name, width, dimensions)
        arrays, tokens = await self._score(call, served, param, texts, may_cut=may_cut)
        vectors: Vectors = arrays["EMBEDDING"]
        if dimensions is not None and dimensions != width:
            vectors = normalize(np.ascontiguousarray(vectors[:, :dimensions]))
        return vectors, tokens

    def _check_dimensions(self, name: str, width: int, dimensions: int) -> None:
        if dimensions > width or name not in self._matryoshka:
            what = f"{name} makes vectors of {width} values"
            expected = (
                f"at most {width}" if dimensions > width else f"{width}, for it is not known to be made to be cut"
            )
            remedy = "" if dimensions > width else "start the gateway with --matryoshka if it was trained so"
            raise refuse("dimensions", what, expected=expected, got=str(dimensions), remedy=remedy)

    async def _rank(
        self, call: Call, served: Served, param: str, query: str, documents: list[str], *, may_cut: bool
    ) -> tuple[list[float], int]:
        """Return the score of each document; of a model with several labels none of which is the score."""
        if not documents:
            raise refuse(param, f"{param} is empty", expected="at least one", got="none")
        width = served.model.makes[0].shape[-1]
        if width != 1:
            raise ApiError(
                400,
                f"{served.name} gives a pair {width} labels: expected a model with one score to rank by; pass another.",
                param="model",
            )
        repeated = len(documents) * len(query.encode(errors="surrogatepass"))
        if repeated > _MAX_REPEATED:
            raise refuse(
                "query",
                f"the query is read beside each of {len(documents)} {param}",
                expected=f"at most {_MAX_REPEATED} bytes of it in all",
                got=str(repeated),
                remedy="ask several times, or shorten it",
            )
        arrays, tokens = await self._score(call, served, param, [query] * len(documents), documents, may_cut=may_cut)
        return arrays["SCORE"][:, 0].tolist(), tokens

    async def _score(
        self, call: Call, served: Served, param: str, texts: list[str], pairs: Sequence[str] = (), *, may_cut: bool
    ) -> tuple[dict[str, npt.NDArray[Any]], int]:
        """Return what the model makes of texts or pairs, and how many tokens it read."""
        rows: list[Row] = list(zip(texts, pairs, strict=True) if pairs else zip(texts, strict=True))
        asking = asyncio.ensure_future(
            self._upstream.ask(served, texts, pairs, caller=call.caller, headers=call.tracing)
        )
        tokens = 0
        try:
            # The request is on its way meanwhile; a step of the loop sends it.
            await asyncio.sleep(0)
            tokens = await served.files.count(param, rows, may_cut=may_cut, turns=self._turns, caller=call.caller)
            arrays = await asking
        except asyncio.CancelledError:
            # Who leaves pays for what the model may have read by then.
            call.use(served.name, "prompt", tokens)
            raise
        finally:
            asking.cancel()
        call.use(served.name, "prompt", tokens)
        return arrays, tokens


def _refuse_tokens(unit: str, most: int, got: str) -> ApiError:
    what = f"inputs is too long: expected at most {most} {unit}, got {got}; ask in parts."
    return ApiError(400, what, param="inputs")


def _count_tokens(tokenizer: Tokenizer, texts: list[str], *, adds: bool) -> int:
    """Return how many tokens texts have together.

    Raises:
        ApiError: They have more than are told of.
    """
    around = tokenizer.num_special_tokens_to_add(False) if adds else 0
    tokens = around * len(texts)
    times = Counter(texts)
    for text, length in measure(tokenizer, times, _MAX_TOKENS):
        tokens += length.tokens * times[text]
        if tokens > _MAX_TOKENS:
            raise _refuse_tokens("tokens", _MAX_TOKENS, "more")
    return tokens


def _write_tokens(tokenizer: Tokenizer, texts: list[str], *, adds: bool) -> bytes:
    """Return the tokens of texts as JSON, which is written in pieces: it holds up whoever is answered meanwhile."""
    rows = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=adds):
        parts = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
        pieces = []
        while some := [
            {
                "id": number,
                "text": text,
                "special": bool(special),
                "start": None if special else start,
                "stop": None if special else stop,
            }
            for number, text, special, (start, stop) in islice(parts, _AT_ONCE)
        ]:
            pieces.append(dump(some)[1:-1])
        rows.append(b",".join(pieces))
    return b"[[" + b"],[".join(rows) + b"]]"


def normalize(vectors: Vectors) -> Vectors:
    """Return vectors of length 1; one of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = vectors / np.where(lengths > 0, lengths, 1)
    return scaled


def sort_best_first(scores: Sequence[float]) -> list[int]:
    """Return places, of the best score first; equal ones in their order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])
