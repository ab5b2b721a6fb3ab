"""An OpenAI-compatible server for one machine; needs the extra `causalqwen[serve]`."""

import socket

from causalqwen.extras import extra

with extra("serve", "serving"):
    import prometheus_client  # noqa: F401
    import uvicorn
    from fastapi import FastAPI

from causalqwen.serving.app import create_app
from causalqwen.serving.settings import ServerSettings, load_individuals

__all__ = ["ServerSettings", "create_app", "load_individuals", "run"]


def run(app: FastAPI, listener: socket.socket) -> None:
    """Serve on a listening socket until SIGINT or SIGTERM; answers under way get 30 seconds to end."""
    uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=30)).run(sockets=[listener])
