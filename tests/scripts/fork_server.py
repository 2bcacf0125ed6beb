"""Runs scripts in forks of one process, which loads what is slow to load once.

Reads one JSON object a line, {"script", "arguments", "environ", "cwd", "output"}, where the script may be
a module as well, and answers with the process id; when the fork has ended, its exit status is in the file
"output" + ".status". A fork is a process as any other: the script is its main module, on its main thread,
and it ends through Python's usual exit. The arguments are modules to load as well.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
from pathlib import Path

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
import paddle.io  # noqa: F401

for module in sys.argv[1:]:
    importlib.import_module(module)


def become(request):
    """Make the fork look as if it had been started with the script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):  # nohup, for one, has them ignored
        signal.signal(number, signal.SIG_DFL)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(request["cwd"])
    os.environ.update(request["environ"])
    sys.argv = [request["script"], *request["arguments"]]


def serve():
    """In a fork, the script that it is to run; None when nobody wants anything any more."""
    outputs = {}
    while True:
        if select.select([0], [], [], 0.02)[0]:
            # Nothing is left in the buffer: the next request comes after the answer to this one.
            line = sys.stdin.buffer.readline()
            if not line:
                for pid in outputs:
                    os.kill(pid, signal.SIGKILL)
                return None
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                become(request)
                return request["script"]
            outputs[pid] = request["output"]
            print(pid, flush=True)
        for pid in list(outputs):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                path = outputs.pop(pid) + ".status"
                Path(path + ".new").write_text(str(os.waitstatus_to_exitcode(status)))
                os.rename(path + ".new", path)


gc.collect()
gc.freeze()  # what is there already is not looked through again by every fork
script = serve()
if script is not None:
    run = runpy.run_path if script.endswith(".py") else runpy.run_module
    run(script, run_name="__main__")
