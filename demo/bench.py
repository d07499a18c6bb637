"""Publish and serve the demo's model, and measure it: `python -m demo.bench`, or `make bench`."""

import subprocess
import sys

from demo.serving import REPOSITORY, ServingError, publish_demo_model, run_python, serve


def main() -> int:
    """Run the benchmark and return the exit code; further arguments go to `client.bench`."""
    try:
        publish_demo_model()
        with serve(REPOSITORY) as addresses:
            run_python("-m", "client.bench", "--url", addresses.http, "--grpc-url", addresses.grpc, *sys.argv[1:])
    except (ServingError, subprocess.CalledProcessError) as exc:
        print(f"error: nothing was measured: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
