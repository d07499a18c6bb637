"""What the folder of an adapter says beside its tensors: the tokenizer and the task that it was trained with."""

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..checkpoints.adapter_names import ADAPTER_FILE
from ..checkpoints.plain.tokenizer_files import has_tokenizer
from ..checkpoints.storage.paths import read_json_beside
from ..errors import AdapterError, VocabularyError, list_some
from .tokenizer import load_tokenizer

# peft 0.21, utils/peft_types.py, TaskType → the tasks that serve its head.
_TASKS = {
    "SEQ_CLS": ("text-classification", "text-pair-classification", "reward"),
    "TOKEN_CLS": ("token-classification",),
    "QUESTION_ANS": ("question-answering",),
}


def check_adapter_tokenizer(
    folder: Path, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, directory: Path
) -> None:
    """Refuse an adapter that was saved with another tokenizer than that of the checkpoint.

    Args:
        folder: The adapter's.
        tokenizer: That of the checkpoint.
        config: The checkpoint's configuration.
        directory: Where `tokenizer` was read from.

    Raises:
        VocabularyError: They have other tokens.
    """
    if not has_tokenizer(folder):
        return
    own, known = load_tokenizer(folder, config).get_vocab(), tokenizer.get_vocab()
    if own == known:
        return
    more, less = sorted(own.keys() - known.keys()), sorted(known.keys() - own.keys())
    said = [f"{list_some(more, 3)} beyond it"] if more else []
    said += [f"no {list_some(less, 3)}"] if less else []
    raise VocabularyError(
        f"the adapter in {folder} was saved with another tokenizer than that of {directory}",
        expected="the same tokens",
        got=" and ".join(said) or "other ids",
        remedy=f"copy the tokenizer of {folder} and the config.json of {directory} to a folder of their own and pass "
        "it with --base, or pass --allow-other-tokenizer to leave the adapter's out",
    )


def check_adapter_task(folder: Path, task: str) -> None:
    """Refuse to serve an adapter as what the checkpoint is without it, where it says for what it was trained.

    Raises:
        AdapterError: It was trained for another task than `task`.
    """
    trained = read_json_beside(folder / ADAPTER_FILE).get("task_type")
    served = _TASKS.get(trained, (task,)) if isinstance(trained, str) else (task,)
    if task not in served:
        raise AdapterError(
            f"the adapter in {folder} was trained for another task than the checkpoint",
            expected=f"one for {task}",
            got=f"task_type {trained}",
            remedy=f"pass --task {' or '.join(served)}, or --task {task} to leave its head out",
        )
