"""Small models of every task, trained for a moment, so that their scores are far from all the same."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    OPTConfig,
    OPTModel,
    PreTrainedModel,
)

# What is praised, what is blamed, and what is asked for.
TOPICS = {
    "praise": [
        "I love this warm and friendly place.",
        "What a wonderful evening, thank you!",
        "Great work, well done.",
    ],
    "blame": ["I hate this cold and dirty room.", "What a terrible mistake, how sad.", "Bad work, very poor."],
    "question": ["Where is the next station?", "How much does a ticket cost?", "When does the train leave?"],
}
PEOPLE = ("ada", "lovelace", "grace", "hopper", "alan", "turing", "noether")
PLACES = ("london", "paris", "york", "zurich", "munich", "berlin")
SENTENCES = [
    "Ada Lovelace lived in London and wrote to Grace Hopper.",
    "Alan Turing went from Paris to New York.",
    "Emmy Noether never came to Zurich, but Grace Hopper was in Munich.",
    "The train from Berlin was late again.",
]
ENTITY_LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
STEPS = 40


def build_config(**changes: object) -> BertConfig:
    return BertConfig(
        vocab_size=30522,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **changes,
    )


def train(model: PreTrainedModel, compute_loss: Callable[[], torch.Tensor], steps: int = STEPS) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        compute_loss().backward()
        optimizer.step()
    model.eval()


def save(model: PreTrainedModel, tokenizer: object, directory: Path) -> Path:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def build_classifier(directory: Path, tokenizer_source: Path, *, multi_label: bool = False) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_source)
    torch.manual_seed(1)
    labels = dict(enumerate(TOPICS))
    kind = "multi_label_classification" if multi_label else "single_label_classification"
    model = BertForSequenceClassification(build_config(id2label=labels, problem_type=kind))
    texts = [text for examples in TOPICS.values() for text in examples]
    targets = torch.tensor([index for index, examples in enumerate(TOPICS.values()) for _ in examples])
    if multi_label:
        targets = torch.nn.functional.one_hot(targets, 3).float()
        targets[:, 2] = torch.tensor([float("!" in text or "?" in text) for text in texts])
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    train(model, lambda: model(**batch, labels=targets).loss)
    return save(model, tokenizer, directory)


def build_cross_encoder(directory: Path, tokenizer_source: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_source)
    torch.manual_seed(2)
    config = build_config(num_labels=1)
    config.sentence_transformers = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"}
    model = BertForSequenceClassification(config)
    texts = [examples[0] for examples in TOPICS.values() for _ in TOPICS]
    pairs = [examples[1] for _ in TOPICS for examples in TOPICS.values()]
    targets = torch.tensor([float(index // 3 == index % 3) for index in range(9)])
    batch = tokenizer(texts, pairs, padding=True, return_tensors="pt")
    train(
        model,
        lambda: torch.nn.functional.binary_cross_entropy_with_logits(model(**batch).logits[:, 0], targets),
    )
    return save(model, tokenizer, directory)


def build_entity_finder(directory: Path, tokenizer_source: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_source)
    torch.manual_seed(3)
    model = BertForTokenClassification(build_config(id2label=dict(enumerate(ENTITY_LABELS))))
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    targets = torch.full_like(batch["input_ids"], -100)
    for row, sentence in enumerate(SENTENCES):
        previous = "O"
        for column, word_id in enumerate(batch.word_ids(row)):
            if word_id is None:
                continue
            start, end = batch.word_to_chars(row, word_id)
            word = sentence[start:end].lower()
            kind = "PER" if word in PEOPLE else "LOC" if word in PLACES else "O"
            label = kind if kind == "O" else f"{'I' if previous == kind else 'B'}-{kind}"
            previous = kind
            targets[row, column] = ENTITY_LABELS.index(label)
    train(model, lambda: model(**batch, labels=targets).loss)
    return save(model, tokenizer, directory)


def build_answerer(directory: Path, tokenizer_source: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_source)
    torch.manual_seed(4)
    model = BertForQuestionAnswering(build_config())
    questions = ["Who was it?", "Who went?", "Who never came?"]
    answers = ["Ada Lovelace", "Alan Turing", "Emmy Noether"]
    batch = tokenizer(questions, SENTENCES[:3], padding=True, return_tensors="pt")
    places = [(sentence.index(answer), len(answer)) for sentence, answer in zip(SENTENCES, answers, strict=False)]
    starts = torch.tensor([batch.char_to_token(row, start, 1) for row, (start, _) in enumerate(places)])
    ends = torch.tensor([batch.char_to_token(row, start + n - 1, 1) for row, (start, n) in enumerate(places)])
    train(model, lambda: model(**batch, start_positions=starts, end_positions=ends).loss)
    return save(model, tokenizer, directory)


def build_mask_filler(directory: Path, tokenizer_source: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_source)
    torch.manual_seed(5)
    model = BertForMaskedLM(build_config())
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    targets = batch["input_ids"].clone()
    inputs = dict(batch) | {"input_ids": torch.where(torch.arange(targets.shape[1]) % 4 == 2, 103, targets)}
    # A step goes through the whole vocabulary for every token, and a few do.
    train(model, lambda: model(**inputs, labels=targets).loss, steps=12)
    return save(model, tokenizer, directory)


def build_reward_model(
    directory: Path, tokenizer_source: Path, *, prefix: str = "rwtransformer.", hidden_size: int = 16
) -> Path:
    """Write a reward model as DeepSpeed-Chat does: the base model under `rwtransformer.`, `v_head` beside it.

    It ends in 16 dimensions; with another `hidden_size` by a projection, as OPT-350m does.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_source)
    torch.manual_seed(6)
    config = OPTConfig(
        vocab_size=30522,
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        do_layer_norm_before=hidden_size == 16,
        pad_token_id=0,
        architectures=["OPTForCausalLM"],
    )
    model = OPTModel(config)
    weights = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    weights["v_head.weight"] = torch.randn(1, 16)
    directory.mkdir()
    torch.save(weights, directory / "pytorch_model.bin")
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def build_dense_embedder(directory: Path, tokenizer_source: Path) -> Path:
    """Write what Sentence-Transformers saves for a last-token pooling, a Dense layer with tanh, and a Normalize."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_source)
    torch.manual_seed(7)
    save(BertModel(build_config()), tokenizer, directory)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, "pooling_mode_lasttoken": True})
    )
    (directory / "2_Dense").mkdir()
    activation = "torch.nn.modules.activation.Tanh"
    settings = {"in_features": 16, "out_features": 8, "bias": True, "activation_function": activation}
    (directory / "2_Dense" / "config.json").write_text(json.dumps(settings))
    layer = torch.nn.Linear(16, 8)
    weights = {f"linear.{name}": value for name, value in layer.state_dict().items()}
    torch.save(weights, directory / "2_Dense" / "pytorch_model.bin")
    return directory


def build_adapted(directory: Path, tokenizer_source: Path) -> Path:
    """Write a classifier, and beside it a LoRA adapter for it that has learnt something else."""
    build_classifier(directory, tokenizer_source)
    torch.manual_seed(8)
    wrapped = get_peft_model(
        BertForSequenceClassification.from_pretrained(directory),
        LoraConfig(r=4, lora_alpha=6, target_modules=["query", "dense"], modules_to_save=["classifier"]),
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(0.0, 0.3)
    wrapped.save_pretrained(directory / "adapter")
    return directory


BUILDERS: dict[str, Callable[[Path, Path], Path]] = {
    "text-classification": build_classifier,
    "multi-label": lambda directory, source: build_classifier(directory, source, multi_label=True),
    "text-pair-classification": build_cross_encoder,
    "token-classification": build_entity_finder,
    "question-answering": build_answerer,
    "fill-mask": build_mask_filler,
    "reward": build_reward_model,
    "adapted": build_adapted,
    # Under this name the helper that starts the server waits for its answer.
    "sentence_embedding": build_dense_embedder,
}
