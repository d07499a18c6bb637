"""From a trained checkpoint to a verified version in a Triton model repository."""

import os

# Before anything imports torch: its threads else wait for one another by spinning, and where another process wants the
# cores as well that takes up to a hundred times as long (30 runs of 31 tokens: 21 ms each against 2,700).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before anything imports numpy: nothing here multiplies large matrices with it, and the threads that it starts for that
# spin for a tenth of a second, on a core that reads checkpoints by then.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
