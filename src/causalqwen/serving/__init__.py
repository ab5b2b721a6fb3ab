"""An OpenAI-compatible server for one machine; needs the extra `causalqwen[serve]`."""

from causalqwen.extras import extra

with extra("serve", "serving"):
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401

from causalqwen.serving.app import create_app
from causalqwen.serving.keys import read_keys
from causalqwen.serving.listening import run
from causalqwen.serving.settings import ServerSettings, load_individuals

__all__ = ["ServerSettings", "create_app", "load_individuals", "read_keys", "run"]
