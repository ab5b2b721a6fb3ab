"""An OpenAI-compatible server for one machine; needs the extra `causalqwen[serve]`."""

try:
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(f"serving needs {error.name}, which is not installed: pip install 'causalqwen[serve]'") from error

from causalqwen.serving.app import create_app
from causalqwen.serving.batching import Batcher
from causalqwen.serving.settings import ServerSettings, load_individuals

__all__ = ["Batcher", "ServerSettings", "create_app", "load_individuals"]
