"""From a trained checkpoint to a verified model repository, served by Triton and asked over the network.

The parts are `modelyard.export`, `modelyard.server`, `modelyard.client` and `modelyard.gateway`, and the command is
`modelyard`. Importing this package imports none of them.
"""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout the parts lie beside this folder. What is imported as `modelyard.export` is then the code beside this
# file, even where the environment holds another checkout or a wheel.
_BESIDE = Path(__file__).resolve().parent.parent
if (_BESIDE / "pyproject.toml").is_file():
    __path__.append(str(_BESIDE))
