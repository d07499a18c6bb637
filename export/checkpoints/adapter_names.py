"""What low-rank factors are called beside the weights that they change."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..errors import list_some

# peft's settings of an adapter.
ADAPTER_FILE = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
# peft 0.21, tuners/lora/layer.py: the two factors of a linear layer and of an embedding.
PEFT_FACTOR = re.compile(
    r"(?P<path>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(?:\.(?!weight$)(?P<name>[^.]+))?(?:\.weight)?"
)
# DeepSpeed-Chat, lora.py, LinearLayer_LoRA.
CHAT_SIDES = (".lora_right_weight", ".lora_left_weight")

# peft keeps the changed layer within its own; DeepSpeed-Chat and loralib keep the weight in place.
_WEIGHTS = (".base_layer.weight", ".weight")


def holds_factors(names: Collection[str]) -> bool:
    """Tell whether an adapter's factors are among the names of a checkpoint's tensors."""
    return any(name.endswith(CHAT_SIDES) or PEFT_FACTOR.fullmatch(name) for name in names)


def describe_missing_base(names: Collection[str]) -> tuple[str, ...]:
    """Return what is missing, in words, where factors have none of the weights beside them that they change."""
    paths = {match["path"] for name in names if (match := PEFT_FACTOR.fullmatch(name))}
    paths |= {name.removesuffix(side) for side in CHAT_SIDES for name in names if name.endswith(side)}
    orphans = [path for path in paths if not any(path + weight in names for weight in _WEIGHTS)]
    if not orphans:
        return ()
    return (f"the weights that an adapter's factors change, of {list_some(orphans, 3)}: this is not a whole model",)
