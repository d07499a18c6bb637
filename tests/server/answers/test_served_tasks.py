"""Every task through the whole line: exported, verified, served by the real tritonserver, and compared with
transformers' own pipelines on the checkpoint."""

import asyncio
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc.aio
from harness import CHECKOUT, run
from peft import PeftModel
from trainers.task_checkpoints import BUILDERS, SENTENCES, TOPICS
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    pipeline,
)

from client import AsyncClient, Client, ClientError, ModelError, Ranked, RefusedError, UsageError
from client.command.connection import Connection
from demo.serving import Addresses, serve
from export.__main__ import main as run_export_cli
from server.announcement import announce
from server.endpoints import Endpoints
from server.following.published import Published, read_repository
from server.following.sums import FileSums

# Scores are probabilities in fp32; what is seen is about 1e-6.
TOLERANCE = 1e-4

TEXTS = [
    *[text for examples in TOPICS.values() for text in examples],
    *SENTENCES,
    "",
    "Grüße aus Köln, sagt Ada Lovelace: 😀 London!",
    "ALAN TURING saw Alan Turing. " * 20,
    "unaffable Noetherian Londoners",
    "a\x00b \u202eada\u202c مرحبا 今日は Ada",
]


@dataclass(frozen=True)
class Served:
    """The checkpoints of every task, and the server that answers for them."""

    checkpoints: Path
    repository: Path
    addresses: Addresses
    results: dict[str, dict[str, Any]]

    def ask(self, name: str, texts: list[str], pairs: list[str] | None = None, protocol: str = "http") -> dict:
        server = Connection(getattr(self.addresses, protocol), protocol, 60.0)
        encoded = [text.encode() for text in pairs] if pairs else None
        return server.infer(server.find_model(name), [text.encode() for text in texts], pairs=encoded)


@pytest.fixture(scope="module")
def served(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("tasks")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    results = {}
    for name, build in BUILDERS.items():
        source = build(directory / name, checkpoint)
        capture.read_global_capture()
        arguments = ["run", str(source), "--name", name, "--repository", str(directory / "models"), "--json"]
        if name == "adapted":
            settings = {"add_special_tokens": {"[LOVE]": "copy:love"}, "pad_vocab_to_multiple_of": 64}
            (source / "export.json").write_text(json.dumps(settings))
            arguments += ["--adapter", str(source / "adapter"), "--config", str(source / "export.json")]
        code = run_export_cli(arguments)
        output = capture.read_global_capture()
        assert code == 0, output.err
        results[name] = json.loads(output.out)
    with serve(directory / "models") as addresses:
        yield Served(directory, directory / "models", addresses, results)


def decode(values: np.ndarray) -> list[Any]:
    return [value.decode() if isinstance(value, bytes) else value for value in values.reshape(-1).tolist()]


def truncated(task: str, directory: Path, **options: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(directory, model_max_length=64)
    return pipeline(task, model=str(directory), tokenizer=tokenizer, device="cpu", **options)


def test_the_task_is_found_from_the_checkpoint(served: Served) -> None:
    found = {name: result["task"] for name, result in served.results.items()}
    assert found == {name: name for name in BUILDERS} | {
        "multi-label": "text-classification",
        "adapted": "text-classification",
        "sentence_embedding": "feature-extraction",
    }


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", ["text-classification", "multi-label"])
def test_labels_are_the_pipelines(served: Served, name: str, protocol: str) -> None:
    answers = served.ask(name, TEXTS, protocol=protocol)
    expected = truncated("text-classification", served.checkpoints / name)(TEXTS, top_k=None, truncation=True)
    assert answers["LABEL"].shape == answers["SCORE"].shape == (len(TEXTS), 3)
    for row, wanted in enumerate(expected):
        assert decode(answers["LABEL"][row]) == [item["label"] for item in wanted]
        assert np.abs(answers["SCORE"][row] - [item["score"] for item in wanted]).max() < TOLERANCE
    assert np.ptp(answers["SCORE"][:, 0]) > 0.05, "the model has learnt something"


def test_a_burst_of_requests_is_answered_whole(served: Served) -> None:
    async def ask_at_once() -> None:
        async with tritonclient.grpc.aio.InferenceServerClient(served.addresses.grpc) as client:
            tensor = tritonclient.grpc.InferInput("TEXT", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[b"quickly"]], dtype=np.object_))
            # Nobody asks after them. With a bound on its queue, the last step had answered two a second of most.
            asked = (client.infer("text-classification", [tensor], client_timeout=20) for _ in range(200))
            await asyncio.gather(*asked)

    for _ in range(2):
        asyncio.run(ask_at_once())


def test_an_adapter_and_a_new_token_arrive_as_peft_and_transformers_make_them(served: Served) -> None:
    directory = served.checkpoints / "adapted"
    base = BertForSequenceClassification.from_pretrained(directory)
    model = PeftModel.from_pretrained(base, directory / "adapter").merge_and_unload()
    tokenizer = AutoTokenizer.from_pretrained(directory, model_max_length=64)
    tokenizer.add_tokens(["[LOVE]"], special_tokens=True)
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[len(tokenizer) - 1] = table[tokenizer.convert_tokens_to_ids("love")]
    vocabulary = served.results["adapted"]["vocabulary"]
    assert (vocabulary["rows_after"], vocabulary["tokens"], len(table)) == (30528, 30523, 30528)
    texts = [*TEXTS, "I[LOVE]this place.", "I [love] this place."]
    classify = pipeline("text-classification", model=model.eval(), tokenizer=tokenizer, device="cpu")
    answers = served.ask("adapted", texts)
    for row, wanted in enumerate(classify(texts, top_k=None, truncation=True)):
        assert decode(answers["LABEL"][row]) == [item["label"] for item in wanted]
        assert np.abs(answers["SCORE"][row] - [item["score"] for item in wanted]).max() < TOLERANCE
    same = served.ask("adapted", ["I[LOVE]this place.", "I love this place."])["SCORE"]
    assert np.abs(same[0] - same[1]).max() < TOLERANCE, "the copy is read as what it was copied from"
    unadapted = served.ask("text-classification", TEXTS)["SCORE"]
    assert np.abs(unadapted - answers["SCORE"][: len(TEXTS)]).max() > 0.05


def test_a_pair_is_scored_as_the_pipeline_scores_it(served: Served) -> None:
    # transformers takes an empty second text for none where it is alone, and for a text in a batch.
    pairs = [text or "nothing" for text in reversed(TEXTS)]
    answers = served.ask("text-pair-classification", TEXTS, pairs)
    asked = [{"text": text, "text_pair": pair} for text, pair in zip(TEXTS, pairs, strict=True)]
    classify = truncated("text-classification", served.checkpoints / "text-pair-classification")
    expected = [classify([item], top_k=None, truncation=True)[0][0]["score"] for item in asked]
    assert np.abs(answers["SCORE"][:, 0] - expected).max() < TOLERANCE
    assert np.ptp(answers["SCORE"]) > 0.05


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_entities_are_the_pipelines(served: Served, protocol: str) -> None:
    directory = served.checkpoints / "token-classification"
    find = truncated("token-classification", directory, aggregation_strategy="simple")
    answers = served.ask("token-classification", TEXTS, protocol=protocol)
    total = 0
    for row, text in enumerate(TEXTS):
        wanted = find(text) if text else []
        total += len(wanted)
        count = len(wanted)
        assert decode(answers["LABEL"][row]) == [item["entity_group"] for item in wanted] + [""] * (
            answers["LABEL"].shape[1] - count
        )
        assert answers["START"][row, :count].tolist() == [item["start"] for item in wanted]
        assert answers["END"][row, :count].tolist() == [item["end"] for item in wanted]
        assert (answers["START"][row, count:] == -1).all()
        assert np.allclose(answers["SCORE"][row, :count], [item["score"] for item in wanted], atol=TOLERANCE)
    assert total > 10


def test_masked_tokens_are_the_pipelines(served: Served) -> None:
    texts = [
        "Ada [MASK] lived in London.",
        "The train from [MASK] was [MASK] again.",
        "[MASK]",
        "😀 [MASK] " + "x " * 99,
    ]
    fill = truncated("fill-mask", served.checkpoints / "fill-mask")
    answers = served.ask("fill-mask", texts)
    assert answers["TOKEN"].shape == (4, 2, 5)
    for row, text in enumerate(texts):
        found = fill(text, tokenizer_kwargs={"truncation": True})
        masks = found if isinstance(found[0], list) else [found]
        for index, mask in enumerate(masks):
            assert decode(answers["TOKEN"][row, index]) == [item["token_str"] for item in mask]
            assert np.allclose(answers["SCORE"][row, index], [item["score"] for item in mask], atol=TOLERANCE)
        assert (answers["SCORE"][row, len(masks) :] == 0).all()


def test_a_text_without_a_mask_is_refused_with_its_row(served: Served) -> None:
    with pytest.raises(ClientError, match=r"TEXT row 1 has no mask: expected \[MASK\] in it, .*, got none; write it"):
        served.ask("fill-mask", ["a [MASK]", "none"])


def test_rewards_are_the_checkpoints_value_at_the_last_token(served: Served) -> None:
    directory = served.checkpoints / "reward"
    weights = torch.load(directory / "pytorch_model.bin")
    model = AutoModel.from_config(AutoConfig.from_pretrained(directory)).eval()
    model.load_state_dict(
        {name.removeprefix("rwtransformer."): value for name, value in weights.items() if name.startswith("rw")}
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    expected = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=64, return_token_type_ids=False)
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state[0, -1]
        expected.append(float(hidden @ weights["v_head.weight"][0]))
    answers = served.ask("reward", TEXTS)
    assert np.abs(answers["REWARD"][:, 0] - expected).max() < TOLERANCE
    assert np.ptp(expected) > 0.05


def test_a_dense_layer_and_last_token_pooling_are_honoured(served: Served) -> None:
    directory = served.checkpoints / "sentence_embedding"
    model, tokenizer = AutoModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    weights = torch.load(directory / "2_Dense" / "pytorch_model.bin")
    answers = served.ask("sentence_embedding", TEXTS)["EMBEDDING"]
    assert answers.shape == (len(TEXTS), 8)
    for row, text in enumerate(TEXTS):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=64)
        with torch.no_grad():
            pooled = model(**inputs).last_hidden_state[0, -1]
            vector = torch.tanh(weights["linear.weight"] @ pooled + weights["linear.bias"])
        assert np.abs(answers[row] - (vector / vector.norm()).numpy()).max() < 1e-5


QUESTIONS = [
    ("Who was it?", SENTENCES[0]),
    ("Who went?", SENTENCES[1]),
    ("Who never came?", " ".join(SENTENCES * 5)),
    ("Where?", "مرحبا 😀 " + SENTENCES[3]),
    ("When?", "x"),
]


def test_answers_are_spans_of_the_context_and_long_ones_are_read_in_windows(served: Served) -> None:

    directory = served.checkpoints / "question-answering"
    model, tokenizer = (
        BertForQuestionAnswering.from_pretrained(directory).eval(),
        AutoTokenizer.from_pretrained(directory),
    )
    answers = served.ask("question-answering", [q for q, _ in QUESTIONS], [c for _, c in QUESTIONS])
    for row, (question, context) in enumerate(QUESTIONS):
        wanted = answer_as_transformers_4(model, tokenizer, question, context)
        start, end = int(answers["START"][row, 0]), int(answers["END"][row, 0])
        assert (start, end) == (wanted["start"], wanted["end"])
        assert decode(answers["ANSWER"][row]) == [context[start:end]]
        assert abs(answers["SCORE"][row, 0] - wanted["score"]) < TOLERANCE


def answer_as_transformers_4(model: Any, tokenizer: Any, question: str, context: str) -> dict[str, Any]:
    """Return the best answer, step by step as the question-answering pipeline of transformers 4.57 finds it."""
    made = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=64,
        stride=32,
        return_overflowing_tokens=True,
    )
    answers: list[dict[str, Any]] = []
    for index in range(len(made["input_ids"])):
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs = {name: torch.tensor([made[name][index]]) for name in names}
        with torch.no_grad():
            output = model(**inputs)
        sequence = made.sequence_ids(index)
        allowed = np.array([s == 1 for s in sequence])
        allowed[0] = True  # [CLS]
        ends = []
        for logits in (output.start_logits[0].numpy(), output.end_logits[0].numpy()):
            powers = np.exp(np.where(allowed, logits, -10000.0) - logits[allowed].max())
            ends.append(powers / powers.sum())
            ends[-1][0] = 0.0
        spans = [
            (ends[0][i] * ends[1][j], i, j)
            for i in range(len(sequence))
            for j in range(i, min(i + 15, len(sequence)))
            if sequence[i] == 1 and sequence[j] == 1
        ]
        for score, i, j in sorted(spans, reverse=True)[:12]:
            start = made.word_to_chars(index, made.token_to_word(index, i), 1).start
            end = made.word_to_chars(index, made.token_to_word(index, j), 1).end
            same = [item for item in answers if item["answer"].lower() == context[start:end].lower()]
            if same:
                same[0]["score"] += score
            else:
                answers.append({"answer": context[start:end], "start": start, "end": end, "score": score})
    return max(answers, key=lambda item: item["score"])


def test_a_question_that_leaves_no_room_for_its_context_is_refused_alone(served: Served) -> None:
    with pytest.raises(ClientError, match="TEXT leaves no room for TEXT_PAIR: expected fewer than 64 tokens"):
        served.ask("question-answering", ["why " * 100], ["because"])


@pytest.mark.parametrize(
    ("context", "spans", "fault"),
    [(b"\xff", [[0, 1], [2, 3]], "'utf-8' codec"), (b"abcd", [[0, 1]], "could not be broadcast|longer|out of bounds")],
)
def test_a_step_that_is_asked_with_tensors_of_several_requests_says_so(
    served: Served, context: bytes, spans: list[list[int]], fault: str
) -> None:
    values = {
        "span_logits": np.zeros((1, 1, 2, 2), dtype=np.float32),
        "answer_spans": np.array([[spans]], dtype=np.int64),
        "TEXT": np.array([[b"who"]], dtype=object),
        "TEXT_PAIR": np.array([[context]], dtype=object),
    }
    with (
        Client(served.addresses.http, model="question-answering_postprocess") as client,
        pytest.raises(RefusedError, match=f"the tensors do not belong together: expected .*({fault})"),
    ):
        client.infer(values)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_library_gives_each_task_its_own_rows(served: Served, protocol: str) -> None:
    with Client(getattr(served.addresses, protocol), protocol=protocol, model="sentence_embedding") as client:
        vectors = client.embed(TEXTS)
        assert vectors.dtype == np.float32
        assert np.array_equal(vectors, served.ask("sentence_embedding", TEXTS, protocol=protocol)["EMBEDDING"])
        classify = truncated("text-classification", served.checkpoints / "text-classification")
        for labels, wanted in zip(
            client.classify(TEXTS, model="text-classification"),
            classify(TEXTS, top_k=None, truncation=True),
            strict=True,
        ):
            assert [label.label for label in labels] == [item["label"] for item in wanted]
            assert np.allclose([label.score for label in labels], [item["score"] for item in wanted], atol=TOLERANCE)
        find = truncated(
            "token-classification", served.checkpoints / "token-classification", aggregation_strategy="simple"
        )
        for text, entities in zip(TEXTS, client.entities(TEXTS, model="token-classification"), strict=True):
            wanted = find(text) if text else []
            names = ("entity_group", "start", "end")
            assert [(e.label, e.start, e.end) for e in entities] == [tuple(map(item.get, names)) for item in wanted]
        questions, contexts = map(list, zip(*QUESTIONS, strict=True))
        rows = client.answer(questions, contexts, model="question-answering")
        assert len(rows) == len(QUESTIONS) and rows[1][0].answer == "Alan Turing"
        for context, answers in zip(contexts, rows, strict=True):
            assert all(context[found.start : found.end] == found.answer for found in answers)
            assert [found.score for found in answers] == sorted((found.score for found in answers), reverse=True)


def test_documents_are_ranked_as_the_pipeline_scores_them(served: Served) -> None:
    query, documents = TEXTS[0], [text or "nothing" for text in TEXTS[1:]] * 4
    judge = truncated("text-classification", served.checkpoints / "text-pair-classification")
    asked = [{"text": query, "text_pair": document} for document in documents[: len(TEXTS) - 1]]
    expected = [judge([item], top_k=None, truncation=True)[0][0]["score"] for item in asked] * 4

    async def ask() -> tuple[list[Ranked], list[Ranked]]:
        async with AsyncClient(served.addresses.grpc, protocol="grpc") as client:
            by_pair = client.rerank(query, documents, model="text-pair-classification")
            return await asyncio.gather(by_pair, client.rerank(query, [], model="text-pair-classification"))

    ranked, none = asyncio.run(ask())
    assert none == []
    assert sorted(row.position for row in ranked) == list(range(len(documents)))
    assert np.allclose([row.score for row in ranked], [expected[row.position] for row in ranked], atol=TOLERANCE)
    assert [row.score for row in ranked] == sorted((row.score for row in ranked), reverse=True)


def test_the_library_refuses_another_tasks_model_and_pairs_that_do_not_fit(served: Served) -> None:
    with Client(served.addresses.http) as client:
        with pytest.raises(ModelError, match="fill-mask is of another task: expected a model that answers with LABEL,"):
            client.classify(["x"], model="fill-mask")
        with pytest.raises(
            ModelError, match="choose with model, or ask this one by `infer`, which returns all of these"
        ):
            client.classify(["x"], model="fill-mask")
        with pytest.raises(
            ModelError, match="takes no pictures: expected the input IMAGE, got TEXT; choose with model"
        ):
            client.image([b"x"], model="text-classification")
        with pytest.raises(UsageError, match="takes pairs: expected a second text for each of 2, got 1; pass as many"):
            client.answer(["a", "b"], ["c"], model="question-answering")
        with pytest.raises(UsageError, match="text-classification takes single texts: expected no pairs, got 1"):
            client.rerank("a", ["b"], model="text-classification")
        with pytest.raises(ModelError, match="there is not exactly one ensemble at .*: expected one, got adapted, "):
            client.embed(["x"])


@pytest.mark.parametrize("name", BUILDERS)
def test_parity_holds_for_every_task_over_every_transport(served: Served, name: str) -> None:
    golden = served.repository / name / "1" / "golden.json"
    urls = ["--url", served.addresses.http, "--grpc-url", served.addresses.grpc]
    done = run("-m", "client.parity", "--golden", str(golden), *urls, "--json")
    assert done.code == 0, done.out + done.err
    assert all(result["passed"] and not result["different"] for result in json.loads(done.out))


def test_parity_fails_on_another_label_and_another_place(served: Served, tmp_path: Path) -> None:
    for name, output in (("text-classification", "LABEL"), ("token-classification", "START")):
        content = json.loads((served.repository / name / "1" / "golden.json").read_text())
        (tensor,) = (tensor for tensor in content["samples"][0]["outputs"] if tensor["name"] == output)
        value = tensor["data"][0]
        tensor["data"][0] = value + 1 if isinstance(value, int) else "other"
        (tmp_path / "golden.json").write_text(json.dumps(content))
        urls = ["--url", served.addresses.http, "--grpc-url", served.addresses.grpc]
        done = run("-m", "client.parity", "--golden", str(tmp_path / "golden.json"), "--model", name, *urls)
        assert done.code == 1, done.err
        assert done.out.count("FAILED") == 3


def test_each_command_that_the_server_names_next_is_answered(served: Served) -> None:
    host, port = served.addresses.http.split(":")
    endpoints = Endpoints(host=host, http_port=int(port), grpc_port=1, metrics_port=2, status_port=3)
    models = list(read_repository(served.repository, FileSums()).values())
    assert {model.name for model in models} == set(BUILDERS)

    def name_next(*chosen: Published) -> list[str]:
        line = announce(endpoints, served.repository, chosen).splitlines()[1]
        return shlex.split(line.removeprefix("Next: python ").removesuffix("    (Ctrl-C here stops the server)"))

    asked = {}
    for model in models:
        # Beside another one of the kind it is named.
        words = name_next(model, model)
        done = run(*words)
        assert done.code == 0, (words, done.err)
        asked[model.name] = words[words.index("--text") :]
    assert asked["text-classification"] == ["--text", "Hello"]
    assert "[MASK]" in asked["fill-mask"][1]
    assert asked["question-answering"][2] == asked["text-pair-classification"][2] == "--pair"
    # Of all of them one that takes any text.
    assert name_next(*models)[-2:] == ["--text", "Hello"]
    assert "fill-mask" not in name_next(*models)


def test_the_client_shows_a_table_and_json_of_every_task(served: Served) -> None:
    infer = [str(CHECKOUT / "client" / "infer.py"), "--url", served.addresses.http]
    entities = [*infer, "--model", "token-classification", "--text", SENTENCES[0], "Nothing here."]
    lines = run(*entities).out.splitlines()
    assert lines[2].split() == ["SCORE", "START", "END", "LABEL"]
    assert lines[4].split(maxsplit=1) == ["1", SENTENCES[0]]
    assert lines[5].split()[1:] == ["0", "12", "PER"]
    pair = [*infer, "--model", "question-answering", "--text", "Who went?", "--pair", SENTENCES[1]]
    row = json.loads(run(*pair, "--json").out)["results"][0]
    assert row["pair"] == SENTENCES[1]
    assert row["ANSWER"] == [SENTENCES[1][row["START"][0] : row["END"][0]]]
    missing = run(*infer, "--model", "question-answering", "--text", "Who?")
    assert missing.code == 1
    assert "takes pairs: expected a second text for each of 1, got 0; pass as many --pair as --text." in missing.err
