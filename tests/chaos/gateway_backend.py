"""The scripted backend as a separate process that can be killed: `python -m tests.chaos.gateway_backend PORT`."""

import sys

import uvicorn

from tests.support.gateway_lab import Script, backend_app

if __name__ == "__main__":
    script = Script(adapters={"assistant@v1"}, pause_s=0.02)
    uvicorn.run(backend_app(script), port=int(sys.argv[1]), log_level="warning", access_log=False)
