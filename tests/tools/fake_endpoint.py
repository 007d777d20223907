"""An OpenAI-compatible server on loopback that fails as it is told."""

import json
import threading
import time
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from served_here import served
from transformers import PreTrainedTokenizerFast

from draftsmith.decode.sampling import SamplingParams

PARAMS = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, max_new_tokens=8)
OK = (200, {})


class Server(ThreadingHTTPServer):
    """Answers each prompt by an echo of it. `faults` are spent one a request, then all is well.

    A fault is (status, headers), "drop" (the connection is cut), "half" (within the body), or
    "silent" (until it is asked again).
    """

    daemon_threads = True

    def __init__(self, tokenizer: PreTrainedTokenizerFast, **habits: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer = tokenizer
        self.faults: list[Any] = []
        self.habits: dict[str, Any] = {
            "apis": "tokens chat text",
            "ids": True,
            "gate": lambda: None,  # what every request waits for
        } | habits
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.headers: list[dict[str, str]] = []
        self.now = self.most = 0
        self.asked_again = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that gave up waiting


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        names = self.server.habits.get("models", ["the-model"])
        self.reply(200, {"data": [{"id": name} for name in names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.times.append(time.monotonic())
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            server.now += 1
            server.most = max(server.most, server.now)
            fault = server.faults.pop(0) if server.faults else OK
            if len(server.bodies) > 1:
                server.asked_again.set()
        server.habits["gate"]()
        with server.lock:
            server.now -= 1  # once it has its answer, the client may send the next one
        self.answer(body, fault)

    def answer(self, body: dict[str, Any], fault: Any) -> None:
        if fault == "drop":
            self.close_connection = True
            self.connection.close()
            return
        if fault == "silent":
            self.server.asked_again.wait(600)
        elif fault not in (OK, "half"):
            self.reply(fault[0], {"error": "not now"}, **fault[1])
            return
        apis, tokenizer = self.server.habits["apis"], self.server.tokenizer
        if "messages" in body:
            asked, text = "chat", body["messages"][-1]["content"]
        elif isinstance(body["prompt"], list):
            asked, text = "tokens", tokenizer.decode(body["prompt"])
        else:
            asked, text = "text", body["prompt"]
        if asked not in apis.split():
            self.reply(400, {"error": f"no {asked} here"})
            return
        ids = tokenizer(text)["input_ids"]
        reason = "stop" if len(ids) < body["max_tokens"] else "length"
        ids = ids[: body["max_tokens"]]
        ends = self.server.habits.get("ends", [tokenizer.eos_token_id])
        written = ids + ends * (reason == "stop")
        choice: dict[str, Any] = {"finish_reason": reason}
        said = {"content": tokenizer.decode(ids)} | self.server.habits.get("message", {})
        choice |= {"message": said} if asked == "chat" else {"text": said["content"]}
        if self.server.habits["ids"] and body.get("return_token_ids"):
            choice["token_ids"] = written
        if "logprobs" in body:  # by the habit `likely`: token -> {token: log-probability}
            likely = [self.server.habits["likely"](token) for token in written]
            told = [{f"token_id:{i}": value for i, value in row.items()} for row in likely]
            choice["logprobs"] = {"top_logprobs": told}
        count = len(written) + self.server.habits.get("extra_tokens", 0)
        usage = {"completion_tokens": count, "prompt_tokens": len(tokenizer(text)["input_ids"])}
        self.reply(200, {"choices": [choice], "usage": usage}, half=fault == "half")

    def reply(
        self, status: int, answer: dict[str, Any], half: bool = False, **headers: str
    ) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self.close_connection = True


def running(tokenizer: PreTrainedTokenizerFast, **habits: Any) -> AbstractContextManager[Server]:
    return served(Server(tokenizer, **habits))
