"""What `/metrics` tells, in Prometheus' text format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from causalqwen.serving.batching import Batcher

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server, in a registry of its own. `paths`: those that are counted by name."""

    def __init__(self, batcher: Batcher) -> None:
        self.registry = registry = CollectorRegistry()
        self.paths: frozenset[str] = frozenset()
        ProcessCollector(registry=registry)
        labels = ("path", "status")
        self.requests = Counter(
            "causalqwen_requests", "Answers by status; 499: the client left.", labels, registry=registry
        )
        self.seconds = Histogram(
            "causalqwen_request_seconds",
            "From request to end of answer.",
            ("path",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.tokens = Counter("causalqwen_tokens", "Tokens read and written.", ("kind",), registry=registry)
        rows = (1, 2, 4, 8, 16, 32, 64)
        self.batches = Histogram("causalqwen_batch_rows", "Texts per batch.", buckets=rows, registry=registry)
        Gauge("causalqwen_waiting", "Requests in the queue.", registry=registry).set_function(lambda: batcher.waiting)
        Gauge("causalqwen_running", "Requests in the batch.", registry=registry).set_function(lambda: batcher.running)
        batcher.observe = self.batches.observe

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        path = path if path in self.paths else "other"
        self.requests.labels(path, status).inc()
        self.seconds.labels(path).observe(seconds)
