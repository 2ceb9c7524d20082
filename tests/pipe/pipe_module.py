"""Loads the pipe as a module. What Open WebUI brings along (aiohttp, pydantic) is needed only to serve
real requests; where it is not installed, names stand in for it."""

import importlib.util
import sys
import types
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "deploy" / "open-webui" / "askbus_pipe.py"


def stand_in(name, **names):
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = types.SimpleNamespace(**names)


stand_in("aiohttp", ClientError=OSError, ClientSession=None, ClientTimeout=None)
stand_in("pydantic", BaseModel=object, Field=lambda default=None, **_: default)

spec = importlib.util.spec_from_file_location("askbus_pipe", PATH)
pipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pipe)
