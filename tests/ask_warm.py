"""Ask a warm process (see warm.py) to run a module, and end as it ended."""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.environ["MODELYARD_WARM"])
    asked = {"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
    socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
    code = int(connection.recv(16) or b"1")
# A process that a signal ended has the negative number of it here, and 128 more than it in a shell.
sys.exit(code if code >= 0 else 128 - code)
