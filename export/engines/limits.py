"""How large batches get and how many of them run at once: what engines build for and configurations say."""

# Rows in one execution. 32 rows keep the ONNX Runtime busy on every CPU and GPU; a request may bring as many itself.
MAX_BATCH_SIZE = 32

# Two single-threaded sessions answer more on two cores than one session with two threads, and long texts in one of
# them do not hold up the other.
INSTANCES = 2
INTRA_OP_THREADS = 1

# The folder of `backends/` that does in one process what the steps of an ensemble do.
LEAN_BACKEND = "python_lean"

# The parameter of a lean step that says how many threads its engine has, whichever it is.
LEAN_THREADS_PARAMETER = "modelyard_threads"
