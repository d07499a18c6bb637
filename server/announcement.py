"""What a server says of itself once it serves: where, and what to ask it."""

from .endpoints import Endpoints
from .following.model_text import read_inputs
from .following.published import Published
from .locations import name_command

# What `infer` is asked with, by the input that a model has.
_QUESTIONS = {"TEXT": '--text "Hello"', "text_input": '--prompt "Once upon a time"', "IMAGE": "--image photo.jpg"}


def announce(endpoints: Endpoints, models: list[Published]) -> str:
    """Return two lines: the addresses, and a command that asks one of `models`."""
    return (
        f"serving HTTP on {endpoints.host}:{endpoints.http_port}, gRPC on {endpoints.host}:{endpoints.grpc_port}, "
        f"metrics on {endpoints.host}:{endpoints.metrics_port}, status on {endpoints.host}:{endpoints.status_port}\n"
        f"Next: {_name_next(endpoints, models)}    (Ctrl-C here stops the server)"
    )


def _name_next(endpoints: Endpoints, models: list[Published]) -> str:
    """Return a command that asks one of the models; one of tensors has nothing that could be typed."""
    for model in models:
        for input_name, question in _QUESTIONS.items():
            if input_name in read_inputs(model.configs[model.name]):
                named = ("--model", model.name) if len(models) > 1 else ()
                return f"{name_command('infer', '--url', f'localhost:{endpoints.http_port}', *named)} {question}"
    return name_command("check")
