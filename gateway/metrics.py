"""What Prometheus is told."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counts of one gateway."""

    def __init__(self) -> None:
        # When each count began: twice as many lines, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "modelyard_gateway_requests",
            "requests that are over; status 499: the caller left",
            ["route", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "modelyard_gateway_request_seconds",
            "from a request to the end of its answer",
            ["route"],
            buckets=_BOUNDS,
            registry=self._registry,
        )
        self.tokens = Counter(
            "modelyard_gateway_tokens", "tokens that were read and written", ["model", "kind"], registry=self._registry
        )
        self.in_flight = Gauge("modelyard_gateway_in_flight", "requests at work", registry=self._registry)
        self.ready = Gauge("modelyard_gateway_ready", "1 while there is a model to ask", registry=self._registry)

    def render(self) -> bytes:
        """Return all of them as Prometheus reads them."""
        return generate_latest(self._registry)
