"""From a trained checkpoint to a verified version in a Triton model repository."""

import os
import sys

# Before anything imports torch: its threads else wait for one another by spinning, and where another process wants the
# cores as well that takes up to a hundred times as long (30 runs of 31 tokens: 21 ms each against 2,700).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before anything imports numpy: nothing here multiplies large matrices with it, and the threads that it starts for that
# spin for a tenth of a second, on a core that reads checkpoints by then.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# OpenVINO, its GenAI and NNCF send statistics of use unless the package that sends them is missing; to them it now is.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
