"""The command that serves a model over HTTP: `collective serve MODEL [--port N]`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

# Without a GPU, TensorFlow's import always says that it can't register CUDA's libraries.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
_DESCRIPTION = """\
Serves a model over HTTP, in the form of TensorFlow Serving's REST interface, and loads new versions
as they come.

MODEL is a SavedModel, a folder of versions of one (those of strategy.export_saved_model), or a
checkpoint or a folder of checkpoints whose code was stored (scope(save_code=True), --run-code).

  POST /v1/models/NAME[/versions/V]:predict   {"instances": [row, …]} or {"inputs": {name: column}}
  GET  /v1/models/NAME[/versions/V]           state; with /metadata the signatures
  GET  /healthz, /metrics                     for probes and for Prometheus

SIGTERM and Ctrl-C end it: requests that have begun are answered, and its exit code is 0.
"""


def main(arguments: Sequence[str] | None = None, prog: str = "collective serve") -> int:
    """Runs the command and returns its exit code."""
    options = _parser(prog).parse_args(arguments)
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        print(
            f"{prog}: {error}. It needs Starlette and uvicorn: "
            "pip install 'collective-strategy[serve]'.",
            file=sys.stderr,
        )
        return 1
    try:
        listening = _listen(options.host, options.port)
    except OSError as error:
        reason = error.strerror or error
        print(
            f"{prog}: {options.host}:{options.port} can't be listened at: {reason}. "
            "--host and --port choose another address.",
            file=sys.stderr,
        )
        return 1
    with listening:
        return _serve(options, listening, uvicorn, prog)


def _serve(options: Any, listening: socket.socket, uvicorn: Any, prog: str) -> int:
    import tensorflow.compat.v1 as tf

    from collective.inference.context import InferenceContext
    from collective.inference.server.application import Limits, ModelApplication

    # It has nothing to say to who serves: that functions of version 1 are deprecated, say.
    tf.logging.set_verbosity(tf.logging.ERROR)
    name = options.name or os.path.basename(os.path.abspath(options.model))
    limits = Limits(
        body_bytes=options.max_body << 20,
        batch_rows=options.max_batch,
        requests=options.max_requests,
        body_seconds=options.body_timeout,
        threads=options.threads,
    )
    try:
        context = InferenceContext(
            options.model,
            run_code=options.run_code,
            interval=options.interval,
            wait=options.wait,
        )
    except (ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    with context:
        application = ModelApplication(context, name, limits)
        config = uvicorn.Config(
            application.asgi,
            log_level=options.log_level,
            access_log=options.log_level in ("debug", "info"),
            timeout_graceful_shutdown=options.grace,
            server_header=False,
            lifespan="off",
        )
        listening.listen(config.backlog)  # from here on, who connects is answered
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(
            f"collective: version {context.version} of model '{name}' answers at "
            f"http://{shown}:{port}/v1/models/{name}:predict",
            file=sys.stderr,
            flush=True,
        )
        # uvicorn raises the signal that ended it once more, for whoever had a handler before.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Binds an address, before a model is loaded for nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError:
        listening.close()
        raise
    return listening


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, or a checkpoint's prefix")
    add("--name", metavar="NAME", help="of the model, in addresses; MODEL's last part if not given")
    add("--host", default="127.0.0.1", help="0.0.0.0 for all; default: %(default)s, this machine")
    add("--port", type=_count(0, 65535), default=8501, help="0: any free one; default: %(default)s")
    add(
        "--max-body",
        type=_count(1, 1 << 20),
        default=16,
        metavar="MB",
        help="of a request; default: %(default)s",
    )
    add(
        "--max-batch",
        type=_count(1),
        default=8192,
        metavar="ROWS",
        help="of a request; default: %(default)s",
    )
    add(
        "--max-requests",
        type=_count(1),
        default=256,
        metavar="N",
        help="at the same time; more are told to try again (503); default: %(default)s",
    )
    add(
        "--threads",
        type=_count(1, 1024),
        default=len(os.sched_getaffinity(0)) + 1,
        metavar="N",
        help="that compute; default: one more than there are processors, %(default)s here",
    )
    add(
        "--body-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="for a request's body to come; default: %(default)g",
    )
    add(
        "--grace",
        type=_count(0),
        default=30,
        metavar="SECONDS",
        help="for requests that have begun, at the end; default: %(default)s",
    )
    add(
        "--interval",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="between two looks for a new version; default: %(default)g",
    )
    add(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="for the first version to come; default: %(default)g",
    )
    add(
        "--run-code",
        action="store_true",
        help="of checkpoints: execute the code that is stored with them",
    )
    add(
        "--log-level",
        choices=("critical", "error", "warning", "info", "debug"),
        default="warning",
        help="info logs each request; default: %(default)s",
    )
    return parser


def _count(least: int, most: int = 1 << 31) -> Any:
    def convert(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
        return int(text)

    return convert


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
