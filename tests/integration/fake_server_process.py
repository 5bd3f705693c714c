"""The fake vLLM server of server_kit.py as a process, which can be stopped like a real one that hangs.

``python fake_server_process.py``; prints its address and serves until its standard input is closed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from server_kit import FakeServer

if __name__ == "__main__":
    print(FakeServer().url, flush=True)
    sys.stdin.read()
