"""The reward models of DeepSpeed-Chat: a model without a head, behind a name, and beside it a head of one value.

DeepSpeed-Chat, reward_model.py. What stands beside is the configuration of the model that it was trained from.
"""

from collections.abc import Collection

VALUE_HEAD = "v_head.weight"

# The second is its saves' of 2023.
VALUE_MODEL_PREFIXES = ("rwtransformer.", "rwtranrsformer.")


def find_value_model(names: Collection[str]) -> str:
    """Return what stands in front of the model's names, where these are a reward model's; else empty."""
    others = [name for name in names if name != VALUE_HEAD]
    if not others or len(others) == len(names):
        return ""
    return next((front for front in VALUE_MODEL_PREFIXES if all(name.startswith(front) for name in others)), "")
