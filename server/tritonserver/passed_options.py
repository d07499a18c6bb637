"""Options that are handed on to tritonserver: which ones may be, and what to use instead of the others."""

from collections.abc import Sequence

from ..errors import UsageError

# What the launcher itself decides, or would lose sight of, and what to do about it.
_OWNED = {
    "model-repository": "pass --repository",
    "model-store": "pass --repository",
    "backend-directory": "put the backend beside the others",
    "http-address": "pass --host",
    "grpc-address": "pass --host",
    "metrics-address": "pass --host",
    "http-port": "pass --http-port before the --",
    "grpc-port": "pass --grpc-port before the --",
    "metrics-port": "pass --metrics-port before the --",
    "log-info": "pass --verbose",
    # The key that is taken out of every line of the log would stand in that file.
    "log-file": "redirect what the launcher writes to stderr",
    "allow-http": "leave it on: the launcher asks for signs of life there",
    "allow-metrics": "leave it on: the launcher asks there what is in flight",
    "allow-grpc": "leave it on, and close the port to others",
    "http-header-forward-pattern": "leave it: no backend reads other headers",
    "exit-timeout-secs": "leave it: the launcher ends tritonserver when nothing is in flight",
    "exit-on-error": "leave it: a broken model does not keep its neighbours from being served",
    "model-control-mode": "leave it: models are loaded, and brought back, by name",
    "model-namespacing": "leave it: models are loaded, and brought back, by name",
    "repository-poll-secs": "leave it: models are loaded by name",
    "model-config-name": "pass --model-config-name before the --",
    "load-model": "leave it: every model with a version is loaded",
    "disable-auto-complete-config": "leave it: every config is complete",
    "strict-model-config": "leave it: every config is complete",
    "http-restricted-api": "leave it: control is closed to everyone without the key",
    "grpc-restricted-protocol": "leave it: control is closed to everyone without the key",
    # Their ports load models without the key.
    "allow-sagemaker": "leave it off: that port has no key",
    "allow-vertex-ai": "leave it off: that port has no key",
}


def check_passed_options(words: Sequence[str]) -> None:
    """Refuse options that are not tritonserver's to have.

    Args:
        words: What followed `--`.

    Raises:
        UsageError: Naming the first of them, and what to use instead.
    """
    if words and not words[0].startswith("--"):
        raise UsageError(
            "what follows -- is handed on to tritonserver",
            expected="its options, such as --trace-config mode=opentelemetry",
            got=f"'{words[0]}'",
        )
    for word in words:
        name = word[2:].partition("=")[0]
        if not word.startswith("--") or not name:
            continue
        # tritonserver takes the beginning of a name for the whole, where no other begins so.
        for owned, remedy in _OWNED.items():
            if owned.startswith(name):
                raise UsageError(
                    f"--{owned} of tritonserver is not handed on",
                    expected="an option that the launcher does not set itself",
                    got=f"'{word}'",
                    remedy=remedy,
                )
