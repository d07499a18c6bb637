"""What a user can ask the export for. Imports nothing heavy, so that `--help` answers at once."""

from dataclasses import dataclass
from pathlib import Path

FEATURE_EXTRACTION = "feature-extraction"
TASKS = (FEATURE_EXTRACTION,)


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A special token that the export adds.

    Attributes:
        token: Its text, such as `[ENT_START]`.
        description: What its embedding is the mean of.
    """

    token: str
    description: str


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The options of `python -m export run`.

    Attributes:
        checkpoint: Folder that a trainer or `save_pretrained` left.
        name: That clients will use.
        repository: The Triton model repository.
        tag: Which checkpoint of several in the folder; the trainer's own choice where None.
        base: Folder with configuration and tokenizer; the checkpoint's own where None.
        allow_non_finite: Whether NaN and infinite weights are let through the reader.
        task: What the checkpoint is served as.
        added_tokens: Special tokens to add, in this order.
    """

    checkpoint: Path
    name: str
    repository: Path
    tag: str | None = None
    base: Path | None = None
    allow_non_finite: bool = False
    task: str = FEATURE_EXTRACTION
    added_tokens: tuple[AddedToken, ...] = ()
