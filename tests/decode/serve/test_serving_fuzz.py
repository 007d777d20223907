"""Whatever fits the server's own OpenAPI page, or nearly, gets an answer that the page promises."""

from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.serve.server import Backend, ServerConfig

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def backend(
    tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> Iterator[Backend]:
    how = ServerConfig(target="tiny", batch_size=16, max_queue=16, max_length=64, max_new_tokens=4)
    made = Backend(how, tiny_target, tiny_tokenizer)
    made.start()
    yield made
    assert not made.service.error
    made.stop()


POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
POSTS = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        *((path, mode) for path in POSTS for mode in GenerationMode),
        ("/v1/models/{model}", POSITIVE),
    ],
)
def test_no_answer_is_one_that_the_page_leaves_out(
    backend: Backend, path: str, mode: GenerationMode
) -> None:
    """In this process, without a socket."""
    page = schemathesis.openapi.from_asgi("/openapi.json", backend.app())
    statuses = Counter()

    @given(case=page[path]["POST" if path in POSTS else "GET"].as_strategy(generation_mode=mode))
    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def try_it(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # else nearly all of them are 404
        answer = case.call()
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    try_it()
    assert sum(statuses.values()) >= 20
    assert not {status for status in statuses if status >= 500}
    if mode == POSITIVE and path in POSTS:
        assert statuses[200] > 0, statuses
