"""A server from its settings: target and lanes loaded, threads started, and ended in order."""

import copy
import ipaddress
import threading
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from fastapi import FastAPI
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.drafters.base import Drafter
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.engine.decoder import Decoder
from draftsmith.decode.evaluate.arms import default_K
from draftsmith.decode.serve.answers import Limits
from draftsmith.decode.serve.engine_thread import Service
from draftsmith.decode.serve.http import make_app
from draftsmith.decode.serve.learning import BufferWriter, DraftWatcher
from draftsmith.decode.serve.prometheus import Metrics
from draftsmith.decode.serve.schemas import Encoder
from draftsmith.decode.serve.server import DEFAULT, Serving
from draftsmith.decode.serve.versions import LEARNING
from draftsmith.models.target import TargetSpec, check_split, load_target

FLUSH_S = 5  # that answers have to reach their clients once they are whole


class Backend:
    """Everything behind the endpoints, and the application over it.

    Errors of `load_drafter` and `open_session` pass, as ValueErrors of the settings.
    """

    def __init__(
        self, settings: Serving, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.settings, self.target, self.tokenizer = settings, target, tokenizer
        self.metrics = Metrics()
        self.service = Service(self.metrics, rows=settings.rows, max_queue=settings.max_queue)
        online = Path(settings.online) if settings.online else None
        self.writer: BufferWriter | None = None
        if online is not None:
            kept = {"keep_top_k": settings.keep_top_k, "requests": settings.keep_requests}
            self.writer = BufferWriter(online, self.metrics, **kept)
        learning: dict[str, str] = {}
        for tag, path in settings.lanes.items():
            decoder, harvest = self.decoder(path), None
            can_learn = decoder.drafter is not None and decoder.drafter.kind in LEARNING
            if self.writer is not None and can_learn:
                self.writer.add_lane(tag)
                learning[tag], harvest = path, self.writer.offer
            model = settings.name if tag == DEFAULT else f"{settings.name}:{tag}"
            self.service.add_lane(tag, model, decoder, settings.max_len, harvest)
        self.watcher: DraftWatcher | None = None
        if online is not None:
            if not learning:
                raise ValueError(
                    f"online: got {settings.online} and no draft that can learn, expected one of "
                    f"kind {', '.join(LEARNING)}; leave online out, or give such a drafter"
                )
            self.watcher = DraftWatcher(self.service, online, learning, self.load)

    def load(self, path: str) -> Drafter | None:
        return load_drafter(path, self.target, self.tokenizer)

    def decoder(self, path: str) -> Decoder:
        how = self.settings
        return Decoder(
            self.target,
            self.tokenizer,
            self.load(path),
            batch_size=how.rows,
            K=how.K or default_K(path, how.tree),
            tree=how.tree,
            policy=how.policy,
        )

    def app(self) -> FastAPI:
        how = self.settings
        limits = Limits(how.max_tokens, how.timeout_s, how.max_body, how.seed)
        return make_app(self.service, Encoder(copy.deepcopy(self.tokenizer)), limits, how.api_key)

    def start(self) -> None:
        if self.writer is not None:
            self.writer.start()
        if self.watcher is not None:
            self.watcher.start()
        self.service.start()

    def stop(self) -> None:
        """End all threads; what was finished is written."""
        if self.watcher is not None:
            self.watcher.stop()
        self.service.stop()
        if self.writer is not None:
            self.writer.stop()


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
        backend.service.on_death = self.end_now

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

    def end_now(self) -> None:
        self.should_exit = True


def serve(settings: Serving, console: Console) -> int:
    """Load, serve, and end in order: 0, or 1 where decoding failed. ValueError for what can't be
    loaded or doesn't fit.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    spec = TargetSpec(settings.target, dtype=settings.dtype)
    target, tokenizer = load_target(spec, torch.device(settings.device))
    check_split(target)
    backend = Backend(settings, target, tokenizer)
    server = Server(backend)
    for lane in backend.service.lanes.values():
        drafter = lane.decoder.drafter
        kind = "plain decoding" if drafter is None else f"a draft of kind {drafter.kind}"
        console.print(f"{lane.model}: {kind}, {settings.rows} rows of {lane.session.context}")
    console.print(f"http://{settings.host}:{settings.port}/v1", markup=False)
    if not settings.api_key and not loopback(settings.host):
        console.print("[yellow]open to the network without a key; set DRAFTSMITH_API_KEY[/yellow]")
    backend.start()
    try:
        server.run()
    finally:
        backend.stop()
    return 1 if backend.service.error else 0


def loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
