"""Fresh processes: what somebody meets who opens a new terminal."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run a script; `arguments` are its `sys.argv[1:]`. The package is found, but not imported."""
    return _started("-c", script, *arguments)


def run_two(*program: object) -> "subprocess.CompletedProcess[str]":
    """Run a file, or `-m` and a module, and its arguments in two processes, as torchrun starts them."""
    return _started("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, *program)


def _started(*command: object) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=120
    )


def answer(script: str, *arguments: object) -> Any:
    """Run a script that must succeed, and read the last line that it prints, which is JSON."""
    done = run(script, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def complaint(result: tuple[int, str, str], error: str) -> str:
    """Return the one line that a refused command wrote to stderr, without the program's name in `error`."""
    code, stdout, stderr = result
    assert (code, stdout) == (2, "")
    assert stderr.startswith(error) and stderr.endswith("\n") and stderr.count("\n") == 1
    return stderr.removeprefix(error).strip()
