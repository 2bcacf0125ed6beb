"""`visualdl-tokens`: the standard VisualDL server, on loopback and without telemetry unless asked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

_PUBLIC_PATH = "/app"


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve VisualDL until interrupted."""
    parser = argparse.ArgumentParser(
        prog="visualdl-tokens",
        description="Serve VisualDL over logs of mlflow_tokens, with every page it has. "
        "Loopback and no telemetry by default.",
    )
    parser.add_argument(
        "--logdir", action="append", required=True, metavar="DIR", help="may be given several times"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8040, help="port to listen on (default: %(default)s)")
    options = parser.parse_args(arguments)

    # VisualDL's own run() starts another process and returns; this one is the server.
    from visualdl.server.app import create_app
    from visualdl.server.args import ParseArgs

    app = create_app(ParseArgs(logdir=options.logdir, host=options.host, port=options.port, telemetry=False))
    print(f"VisualDL  http://{options.host}:{options.port}{_PUBLIC_PATH}/", flush=True)
    app.run(host=options.host, port=options.port, debug=False, threaded=False)


if __name__ == "__main__":
    main()
