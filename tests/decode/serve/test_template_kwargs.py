"""`chat_template_kwargs` of a request: what the chat template is given besides the chat."""

from typing import Any

from live_server import live
from thinking_template import TEMPLATE
from transformers import LlamaForCausalLM

from draftsmith.decode.prompts.chat import chat_prompt
from draftsmith.models.tokenizer import stand_in_tokenizer


def test_a_request_says_whether_to_think(tiny_target: LlamaForCausalLM) -> None:
    tokenizer = stand_in_tokenizer(320)
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "f?"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "seed": 1, "temperature": 0}
    with live(tiny_target, tokenizer, batch_size=2) as server:

        def post(**more: Any) -> Any:
            reply = server.post({**body, **more}, "chat/completions")
            return reply.status_code, reply.json()

        for kwargs in (None, {}, {"enable_thinking": False}, {"effort": "low"}):
            status, said = post(chat_template_kwargs=kwargs)
            prompt = chat_prompt(messages, tokenizer, more=kwargs)
            assert status == 200 and said["usage"]["prompt_tokens"] == len(prompt)
        assert len(chat_prompt(messages, tokenizer, more={"enable_thinking": False})) > len(
            chat_prompt(messages, tokenizer)
        )
        for kwargs in ({"enable_thinkin": False}, {"chat_template": "{{ 1 }}"}, {"tokenize": True}):
            status, said = post(chat_template_kwargs=kwargs)
            assert status == 400 and said["error"]["param"] == "chat_template_kwargs"
            assert "expected effort, enable_thinking" in said["error"]["message"]
        assert post(chat_template_kwargs=[1])[0] == 400
        plain = {"model": "tiny", "prompt": "a", "chat_template_kwargs": {}}
        assert server.post(plain).status_code == 400, "a plain prompt goes through no template"
