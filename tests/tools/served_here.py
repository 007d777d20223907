"""A local HTTP server on a thread of its own, for as long as it is needed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import TypeVar

Kind = TypeVar("Kind", bound=ThreadingHTTPServer)


@contextmanager
def served(server: Kind) -> Iterator[Kind]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
