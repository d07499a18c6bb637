"""Real fine-tuning of a real encoder to a classifier, by transformers' Trainer with DeepSpeed ZeRO on two CPU ranks.

    python tests/trainers/train_classifier.py CHECKPOINT OUT STAGE[,STAGE...]

Starts from the Hugging Face folder CHECKPOINT; leaves, for each stage, OUT/zeroSTAGE/checkpoint-6/ as the Trainer saved
it, and OUT/zeroSTAGE.json: texts, and the logits that the Trainer itself predicts for them after its last step.
"""

import json
import os
import sys
from pathlib import Path

# First, for it sets up DeepSpeed's environment before DeepSpeed is imported.
from train_zero import join_ranks, make_deepspeed_config  # isort: skip

import torch
from ranks import fork_ranks
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

LABELS = ("animals", "weather", "machines")
TRAINING_TEXTS = [
    ("The cat sleeps on the sofa.", 0),
    ("A dog barked at the horse.", 0),
    ("Birds and bees.", 0),
    ("It will rain all afternoon.", 1),
    ("Sunshine, and hardly any wind.", 1),
    ("A storm with hail is coming.", 1),
    ("The engine needs a new pump.", 2),
    ("Our server has two processors.", 2),
    ("He repaired the washing machine.", 2),
]
ASKED_TEXTS = [
    "A kitten plays.",
    "Snow fell during the whole night, and the roads were closed until the morning.",
    "The drill is broken",
    "",
    "Grüße aus Köln!",
    "horses " * 40,
    "Is it cloudy?",
]


def train(checkpoint: Path, out: Path, stage: int) -> None:
    join_ranks()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    torch.manual_seed(4)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    labels = dict(enumerate(LABELS))
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, num_labels=len(LABELS), id2label=labels, label2id={name: index for index, name in labels.items()}
    )
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=6,
        save_steps=6,
        per_device_train_batch_size=2,
        learning_rate=3e-4,
        deepspeed=make_deepspeed_config(stage) | {"bf16": {"enabled": False}},
        use_cpu=True,
        optim="adamw_torch",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{**tokenizer(text), "labels": label} for text, label in TRAINING_TEXTS]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    asked = [dict(tokenizer(text, truncation=True, max_length=128)) for text in ASKED_TEXTS]
    logits = trainer.predict(asked).predictions
    if int(os.environ["RANK"]) == 0:
        content = {"texts": ASKED_TEXTS, "logits": logits.tolist(), "labels": LABELS}
        out.with_suffix(".json").write_text(json.dumps(content))


if __name__ == "__main__":
    for number in sys.argv[3].split(","):
        target = Path(sys.argv[2], f"zero{number}")
        fork_ranks(2, lambda _, target=target, stage=int(number): train(Path(sys.argv[1]), target, stage))
