"""What a request holds, of whatever kind."""

from typing import Any

import triton_python_backend_utils as pb_utils


def read_values(request: Any, name: str, refusal: type[ValueError]) -> Any:
    """Return the values of one input of a request, one a row.

    Raises:
        refusal: There is none.
    """
    values = pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
    if not len(values):
        raise refusal(f"{name} has no rows: expected shape [batch, 1] with a batch of at least 1")
    return values
