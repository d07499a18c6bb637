"""How a model is asked that takes something else than what it was asked with."""

from .locations import name_command
from .model import Model
from .session import Session

# By its input.
_WAYS = {
    "text_input": "ask it with `infer --prompt`, or `generate`",
    "IMAGE": "ask it with `infer --image`, or `image`",
    "AUDIO": "ask it with `infer --audio`, or `audio`",
}

# How the graph is called that an ensemble has as a step.
_GRAPH_ENDING = "_model"
# And the one that makes tokens of texts.
_TEXTS_ENDING = "_preprocess"


async def find_way(session: Session, model: Model) -> str:
    """Return what the reader can do to have `model` answer.

    Raises:
        ClientError: The server does not answer.
    """
    if model.texts:
        return f"ask with {session.options.words.text}"
    for name, way in _WAYS.items():
        if name in model.inputs:
            return way
    # A graph that stands alone is no step of anything: tensors are all that can be sent.
    if any(tensor.datatype == "BYTES" for tensor in model.takes) or await _has_ensemble(session, model):
        return "ask the ensemble it belongs to"
    return f"it takes tensors: send them with tritonclient, or have `{name_command('check')}` ask it"


async def find_whole(session: Session, step: Model) -> str:
    """Return what the reader can do to ask the model that a step of texts belongs to.

    Raises:
        ClientError: The server does not answer.
    """
    name = step.name.removesuffix(_TEXTS_ENDING)
    if name != step.name and name in await session.list_models():
        return f"ask {name}"
    return "ask the ensemble it belongs to"


async def _has_ensemble(session: Session, model: Model) -> bool:
    name = model.name.removesuffix(_GRAPH_ENDING)
    return name != model.name and name in await session.list_models()
