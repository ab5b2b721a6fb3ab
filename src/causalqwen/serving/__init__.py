"""An OpenAI-compatible server for one machine; needs the extra `causalqwen[serve]`."""

import socket

try:
    import prometheus_client  # noqa: F401
    import uvicorn
    from fastapi import FastAPI
except ImportError as error:
    raise ImportError(f"serving needs {error.name}, which is not installed: pip install 'causalqwen[serve]'") from error

from causalqwen.serving.app import create_app
from causalqwen.serving.settings import ServerSettings, load_individuals

__all__ = ["ServerSettings", "create_app", "load_individuals", "run"]


def run(app: FastAPI, listener: socket.socket) -> None:
    """Serve on a listening socket until SIGINT or SIGTERM; answers under way get 30 seconds to end."""
    uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=30)).run(sockets=[listener])
