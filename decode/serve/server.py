"""An OpenAI-compatible server whose drafts may learn while it serves.

    draftsmith serve target=TARGET drafter=DRAFTER
    draftsmith serve target=TARGET drafter=DRAFTER drafters='["code=DRAFTER_2"]' \\
        online=FOLDER        # train/online.py learns from FOLDER beside it: docs/methods/online.md

An answer is a function of target, prompt and seed alone: which draft helps, who else is being
served and what is learned meanwhile change how fast it comes. See docs/use/serve.md.

A server from its settings: target and lanes loaded, threads started, and ended in order.
"""

import logging
import math
import os
import re
import socket
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from fastapi import FastAPI
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.command import check_least, parse
from draftsmith.decode.drafters.load import load_decoded, load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.arms import unsaid
from draftsmith.decode.serve.engine_thread import Service
from draftsmith.decode.serve.http import make_app
from draftsmith.decode.serve.journal import Journal
from draftsmith.decode.serve.learning import Learning
from draftsmith.decode.serve.prometheus import Metrics
from draftsmith.decode.serve.schemas import Limits
from draftsmith.decode.serve.stores import Stores
from draftsmith.decode.serve.versions import learning_kinds
from draftsmith.models.fingerprint import fingerprint
from draftsmith.models.target import TargetSpec

DEFAULT = "default"  # the tag of the first lane
FLUSH_S = 5  # that answers have to reach their clients once they are whole


@dataclass
class ServerConfig:
    """What to serve, how it decodes, and what clients may ask for."""

    target: str
    drafter: str = "none"  # a folder, a hub name, ngram, or none: plain decoding
    drafters: tuple[str, ...] = ()  # more of them, TAG=DRAFTER, each served as NAME:TAG
    name: str = ""  # of the model; empty: the target folder's name
    host: str = "127.0.0.1"  # 0.0.0.0: every address of this machine
    port: int = 8000
    batch_size: int = 8  # answers of a lane that are decoded at a time
    max_length: int = 2048  # tokens of prompt and answer; at most the context
    K: int | None = None  # draft calls a round; none: the drafter folder's default
    tree: str = ""  # empty: the drafter folder's, else chain
    policy: str = "auto"  # how much to draft for how many answers; empty: the drafter folder's
    device: str = "auto"  # a GPU where there is one, else cpu
    dtype: str = "auto"
    quantise: str = ""  # int8 | int4: the target's weights, as `target.quantise` of a run
    parallel: int = 1  # processes, a GPU each, that have a part of the target's layers
    api_key: str = ""  # that clients must show; empty: DRAFTSMITH_API_KEY, and without it none
    max_queue: int = 64  # answers of a lane that may wait for a row
    max_new_tokens: int = 1024  # of one answer; a chat that doesn't say may have so many
    timeout_s: float = 300.0  # of one request
    drain_s: float = 30.0  # that requests on their way have when the server is told to end
    max_body: int = 1_048_576  # bytes of one request
    online: str = ""  # the folder that learning goes through; empty: nothing is kept
    keep_top_k: int = 64  # tokens listed at each position of what is kept
    keep_requests: int = 4096  # of a lane, that learning can draw from
    seed: int = 0  # of requests that have none
    log_s: float = 30.0  # between two lines a draft in the log, while it decodes; 0: none
    threads: int = 0  # of the CPU; 0: as torch chooses

    def __post_init__(self) -> None:
        check_least(self, max_length=2, keep_requests=2, max_queue=0, drain_s=0, log_s=0, threads=0)
        check_least(self, batch_size=1, max_new_tokens=1, max_body=1, keep_top_k=1, K=1)
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s: got {self.timeout_s}, expected more than 0, and finite")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port: got {self.port}, expected 0 to 65535")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed: got {self.seed}, expected a signed 64-bit integer")
        self.name = self.name or Path(self.target).resolve().name
        self.api_key = self.api_key or os.environ.get("DRAFTSMITH_API_KEY", "")
        self.lanes = {DEFAULT: self.drafter}  # by tag, the default one first
        for draft in self.drafters:
            tag, _, path = draft.partition("=")
            if not re.fullmatch(r"[\w-][\w.-]*", tag) or tag in self.lanes or not path:
                raise ValueError(
                    f"drafters: got {draft!r}, expected TAG=FOLDER with a tag of its own of "
                    "letters, digits, - and _"
                )
            self.lanes[tag] = path


class Backend:
    """Everything behind the endpoints. Errors of `load_drafter` and `open_session` pass."""

    def __init__(
        self, settings: ServerConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.load = partial(load_drafter, target=target, tokenizer=tokenizer)
        self.service = Service(Metrics(), rows=settings.batch_size, max_queue=settings.max_queue)
        mark = fingerprint(None, tokenizer)["tokenizer"]
        self.stores = Stores(self.service, self.load, mark)
        self.learning: Learning | None = None
        if settings.online:
            kept = (settings.keep_top_k, settings.keep_requests)
            self.learning = Learning(self.service, Path(settings.online), self.load, *kept)
        for tag, path in settings.lanes.items():
            drafter, harvest = self.stores.drafter(tag, path), None
            said = settings.K, settings.tree, settings.policy
            decoder = Decoder(
                target,
                tokenizer,
                drafter,
                batch_size=settings.batch_size,
                **unsaid(path, *said, *([drafter.levels] if drafter else ())),
            )
            if self.learning and drafter is not None and drafter.kind in learning_kinds():
                self.learning.add_lane(tag, path)
                harvest = self.learning.offer
            model = settings.name if tag == DEFAULT else f"{settings.name}:{tag}"
            self.service.add_lane(tag, model, decoder, settings.max_length, harvest)
        if self.learning and not self.learning.first:
            raise ValueError(
                f"online: got {settings.online} and no draft that can learn, expected one of "
                f"kind {', '.join(learning_kinds())}; leave online out, or give such a drafter"
            )
        self.journal = Journal(self.service, settings.log_s)

    def app(self) -> FastAPI:
        how = self.settings
        limits = Limits(how.max_new_tokens, how.timeout_s, how.max_body, how.seed)
        return make_app(self.service, self.tokenizer, limits, how.api_key, self.stores.of)

    def start(self) -> None:
        if self.learning is not None:
            self.learning.start()
        self.service.start()
        if self.settings.log_s:
            self.journal.start()

    def stop(self) -> None:
        """End all threads; what was finished is written."""
        self.service.stop()
        self.stores.close()
        self.journal.stop()
        if self.learning is not None:
            self.learning.stop()


class Server(uvicorn.Server):
    """uvicorn that ends by draining: on SIGTERM or SIGINT what is on its way is finished, while new
    requests hear 503; a second signal ends it at once.
    """

    def __init__(self, backend: Backend) -> None:
        how = backend.settings
        super().__init__(
            uvicorn.Config(
                backend.app(),
                host=how.host,
                port=how.port,
                log_level="warning",
                access_log=False,
                server_header=False,
                ws="none",
                lifespan="off",
                timeout_keep_alive=30,
                timeout_graceful_shutdown=FLUSH_S,
            )
        )
        self.backend = backend
        self.ending = False
        backend.service.on_death = partial(setattr, self, "should_exit", True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.ending:
            self.should_exit = self.force_exit = True
            return
        self.ending = True
        threading.Thread(target=self.drain, name="drain", daemon=True).start()

    def drain(self) -> None:
        service = self.backend.service
        if not service.drain(self.backend.settings.drain_s):
            service.stop()
        self.should_exit = True


def bound(host: str, port: int) -> socket.socket:
    """The address, taken before anything is loaded; ValueError for one that can't be."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        raise ValueError(
            f"got host={host} port={port} ({error.strerror}), expected a free port of an address "
            "of this machine; give another one, or end what uses it"
        ) from error
    return found


def main(argv: list[str]) -> int:
    """Serve until told to end: 0, or 1 where decoding failed. ValueError for what doesn't load."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings, console = parse(ServerConfig, argv), Console()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    place = bound(settings.host, settings.port)
    spec = TargetSpec(
        settings.target,
        dtype=settings.dtype,
        quantise=settings.quantise,
        parallel=settings.parallel,
    )
    target, tokenizer = load_decoded(spec, settings.device)
    backend = Backend(settings, target, tokenizer)
    server = Server(backend)
    for lane in backend.service.lanes.values():
        drafter = lane.decoder.drafter
        kind = "plain decoding" if drafter is None else f"a draft of kind {drafter.kind}"
        console.print(f"{lane.model}: {kind}, {settings.batch_size} rows of {lane.session.context}")
    console.print(f"http://{settings.host}:{settings.port}/v1", markup=False)
    loopback = settings.host.startswith("127.") or settings.host in ("localhost", "::1")
    if not settings.api_key and not loopback:
        console.print("[yellow]open to the network without a key; set DRAFTSMITH_API_KEY[/yellow]")
    backend.start()
    try:
        server.run([place])
    finally:
        backend.stop()
    if backend.service.lack is not None:
        raise backend.service.lack
    return 1 if backend.service.error else 0
