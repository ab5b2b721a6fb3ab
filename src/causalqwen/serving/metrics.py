"""What `/metrics` tells, in Prometheus' text format."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from causalqwen.serving.batching import Batcher

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/numbers", "/health", "/metrics")
_GONE = "499"  # the client left before its answer did


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, batcher: Batcher) -> None:
        self.registry = registry = CollectorRegistry()
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


class CountRequests:
    """ASGI middleware: one count and one duration per answer, streamed ones included."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), _GONE

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception:
            status = "500"
            raise
        finally:
            path = scope["path"] if scope["path"] in _PATHS else "other"
            self.metrics.requests.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - start)
