"""Every reason for which the server does not start.

ServerError                 exit code 1, one line on stderr
├── NotFoundError           no tritonserver, no repository, or nothing in it to serve
├── PortTakenError          another program listens where we would
└── StartError              tritonserver ended, or no model could be loaded
"""


class ServerError(Exception):
    """A refusal in one sentence: what and where, expected, got, remedy."""


class NotFoundError(ServerError):
    """No tritonserver, no repository, or nothing in it to serve."""


class PortTakenError(ServerError):
    """Another program listens where we would."""


class StartError(ServerError):
    """tritonserver ended, or no model could be loaded."""
