"""Finds a tritonserver, starts it on a model repository, and watches over it. Run as `python -m server`."""
