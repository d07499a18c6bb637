"""Every reason for which the server does not start, or does not go on.

ServerError                 exit code 1, one line on stderr
├── NotFoundError           no tritonserver, no repository, or nothing in it to serve
├── PortTakenError          another program listens where we would
├── KeyFileError            the file of the control key cannot be used, or is open to others
├── StartError              tritonserver ended, or no model could be loaded
├── ControlError            a running tritonserver refused an order, or did not answer
├── RolloutError            a version cannot be served in place of the one before it
├── CheckError              a running server does not answer as it was verified
└── GaveUpError             exit code 3: tritonserver died again and again
"""


class ServerError(Exception):
    """A refusal in one sentence: what and where, expected, got, remedy."""

    exit_code = 1


class NotFoundError(ServerError):
    """No tritonserver, no repository, or nothing in it to serve."""


class PortTakenError(ServerError):
    """Another program listens where we would."""


class KeyFileError(ServerError):
    """The file of the control key cannot be used, or is open to others."""


class StartError(ServerError):
    """tritonserver ended, or no model could be loaded."""


class ControlError(ServerError):
    """A running tritonserver refused an order, or did not answer."""


class RolloutError(ServerError):
    """A version cannot be served in place of the one before it."""


class CheckError(ServerError):
    """A running server does not answer as it was verified."""


class GaveUpError(ServerError):
    """Tritonserver died again and again."""

    exit_code = 3
