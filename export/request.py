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
        checkpoint: Folder with weights, configuration and tokenizer.
        name: That clients will use.
        repository: The Triton model repository.
        task: What the checkpoint is served as.
        added_tokens: Special tokens to add, in this order.
    """

    checkpoint: Path
    name: str
    repository: Path
    task: str = FEATURE_EXTRACTION
    added_tokens: tuple[AddedToken, ...] = ()
