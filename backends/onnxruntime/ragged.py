"""Ragged batches as the native backends join them: rows of any lengths one behind another, and what tells them apart.

Semantics of `batch_input`: the comments of Triton's `model_config.proto`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_DTYPES = {"TYPE_INT32": np.dtype(np.int32), "TYPE_FP32": np.dtype(np.float32)}


def _count(arrays: Sequence[Array]) -> Array:
    return np.array([array.size for array in arrays])


def _list_item_shapes(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.tile(array.shape[1:], (len(array), 1)) for array in arrays])


# Kind → the values of one source input's arrays, one array a request, each with its batch first.
_KINDS: Mapping[str, Callable[[Sequence[Array]], Array]] = {
    "BATCH_ELEMENT_COUNT": _count,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda arrays: np.cumsum(_count(arrays)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda arrays: np.cumsum([0, *_count(arrays)]),
    # Its size is what it tells; its values are nobody's.
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda arrays: np.zeros(_count(arrays).max()),
    "BATCH_ITEM_SHAPE": _list_item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda arrays: _list_item_shapes(arrays).reshape(-1),
}


class Joiner:
    """Joins what several requests hold.

    Args:
        config: The model's configuration.

    Raises:
        ValueError: A batch input is of a type that native backends do not make.

    Attributes:
        ragged: Names of the inputs whose rows may be of different lengths.
        made: Names of the inputs that no request holds.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.ragged = {tensor["name"] for tensor in config["input"] if tensor.get("allow_ragged_batch")}
        self._batch_inputs = config.get("batch_input") or []
        # Those of which nothing else tells how long their rows are: they are as long as those of one that is told.
        told = {batch_input["source_input"][0] for batch_input in self._batch_inputs if batch_input["source_input"]}
        self._source = min(told & self.ragged, default="")
        self._untold = sorted(self.ragged - told) if self._source else []
        self.made = [name for batch_input in self._batch_inputs for name in batch_input["target_name"]]
        for batch_input in self._batch_inputs:
            if batch_input["data_type"] not in _DTYPES or len(batch_input["source_input"]) != 1:
                raise ValueError(
                    f"{config['name']} has the batch_input {', '.join(batch_input['target_name'])}: expected one "
                    f"source_input and one of {', '.join(_DTYPES)}, got {batch_input['data_type']} of "
                    f"{', '.join(batch_input['source_input']) or 'none'}"
                )

    def join(self, feeds: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        """Return the graph's inputs for all requests at once.

        Args:
            feeds: Input name → values of one request, the batch first; one mapping a request.

        Raises:
            ValueError: The rows of a request are longer or shorter in one input than in another: joined, they would
                push the rows of its neighbours out of their places.
        """
        for feed in feeds:
            self._check_lengths(feed)
        joined = {}
        for name in feeds[0]:
            arrays = [feed[name] for feed in feeds]
            joined[name] = np.concatenate([array.reshape(-1) for array in arrays] if name in self.ragged else arrays)
        for batch_input in self._batch_inputs:
            arrays = [feed[batch_input["source_input"][0]] for feed in feeds]
            values = _KINDS[batch_input["kind"]](arrays).astype(_DTYPES[batch_input["data_type"]])
            joined |= dict.fromkeys(batch_input["target_name"], values)
        return joined

    def _check_lengths(self, feed: Mapping[str, Array]) -> None:
        for name in self._untold:
            if feed[name].shape != feed[self._source].shape:
                raise ValueError(
                    f"{name} has another shape than {self._source}: expected {list(feed[self._source].shape)}, got "
                    f"{list(feed[name].shape)}; send both of one length"
                )
