"""What a row of data is: told by its fields, here alone. `sources` says where rows come from.

Kinds of rows:
    text         {"text"} or {"content"}     a document
    completion   {"prompt", "completion"}    plain text, no chat template
    prompt       {"prompt"}                  a prompt without an answer (HumanEval)
    chat         {"messages": [{"role", "content"}, ...]}, with "tools" and "tool_calls" as OpenAI
                 has them, and thinking as "reasoning_content" where the template reads that
    chat         {"conversations": [{"from", "value"}, ...]}    ShareGPT
    question     {"question", "answer"}      GSM8K: a chat where the tokenizer has a template
    instruction  {"instruction", "input", "output"}             Alpaca: likewise
    turns        {"turns", "category"}       Spec-Bench, MT-bench: what a user says, turn by turn
"""

import json
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any

LAYOUTS = (
    '{"messages"}, {"conversations"} (ShareGPT), {"instruction", "input", "output"} (Alpaca), '
    '{"prompt", "completion"}, {"prompt"}, {"text"}, {"question", "answer"} (GSM8K) or {"turns"} '
    "(Spec-Bench)"
)
# Who speaks, in the words of ShareGPT's many descendants.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}

Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One row. `where` names it in messages: `path:line`, a hub's `name[i]`, or `stdlib:file`.
    ValueError for half of a surrogate pair, which JSON can spell and no encoding holds.
    """

    kind: str
    where: str
    prompt: str = ""
    completion: str = ""  # the answer; of a document, all of it
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()  # that a chat may call, as JSON schemas
    category: str = ""  # of a benchmark's prompt
    later: tuple[str, ...] = ()  # what the user says after the answer to the prompt, and so on
    reference: str = ""  # a known answer to the prompt that nothing is trained on
    error: tuple[int, int] | None = None  # of an answer that people found wrong, in its characters

    def __post_init__(self) -> None:
        said = (value for message in self.messages for value in message.values())
        own = (self.prompt, self.completion, self.category, self.reference)
        for text in map(_spelled, (*own, *self.later, *said, *self.tools)):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                near = text[max(0, error.start - 20) : error.start + 1]
                raise ValueError(
                    f"{self.where}: {near!r} ends in half of a character (a lone surrogate), "
                    r"expected whole ones, as \ud83d\ude00 is; mend the row or take it away"
                ) from error

    @property
    def text(self) -> str:
        """All words of the row, to train a tokenizer on or to tell two rows apart."""
        names = ("reasoning_content", "content", "tool_calls")
        parts = [_spelled(m[name]) for m in self.messages for name in names if m.get(name)]
        return "\n".join(part for part in (*parts, self.prompt, self.completion) if part)

    @property
    def blank(self) -> bool:
        """Without a word, so that it is left out: some sets part their articles by such rows."""
        return not self.text.strip()


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parse(fields: Any, where: str) -> Row:
    """One row from its fields. Raises ValueError with `where` if its layout is none of ours."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: got a {type(fields).__name__}, expected an object: {LAYOUTS}")
    if fields.get("prompt_ids") and fields.get("token_ids"):
        raise ValueError(
            f"{where}: got an answer as `draftsmith prepare` writes it; to train on these give "
            "their folder, and elsewhere the data that was answered, which prepare.json there names"
        )

    def word(name: str) -> str:
        value = fields[name]
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"{where}: {name!r} is {value!r:.60}, expected a text that isn't empty"
            )
        return value

    # HumanEval has no category, but each of its prompts a name: HumanEval/17.
    category = str(fields.get("category") or str(fields.get("task_id", "")).partition("/")[0])
    if "messages" in fields or "conversations" in fields:
        tools = tuple(_objects(fields["tools"], "tools", where) if fields.get("tools") else ())
        return Row("chat", where, messages=_messages(fields, where), tools=tools)
    if "instruction" in fields:
        return _instruction(fields, word("instruction"), where)
    if "turns" in fields:
        turns = fields["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise ValueError(f"{where}: 'turns' is {turns!r:.60}, expected a list of texts")
        first, *later = map(str, turns)
        known = fields.get("reference")  # one for each turn
        known = str(known[0]) if isinstance(known, list) and known else ""
        return Row("turns", where, first, category=category, later=tuple(later), reference=known)
    if "question" in fields and "answer" in fields:
        error = _error(fields, word("answer"), where)
        return Row("question", where, word("question"), word("answer"), error=error)
    if "prompt" in fields and "completion" in fields:
        error = _error(fields, word("completion"), where)
        return Row("completion", where, word("prompt"), word("completion"), error=error)
    if "prompt" in fields:
        return Row("prompt", where, word("prompt"), category=category)
    for name in ("text", "content"):  # the second as sets of source code have it
        if isinstance(fields.get(name), str):
            return Row("text", where, completion=fields[name])
    raise ValueError(f"{where}: got the fields {sorted(fields)}, expected {LAYOUTS}")


def _error(fields: dict[str, Any], answer: str, where: str) -> tuple[int, int] | None:
    """The marked error of an answer, None without one."""
    span = fields.get("error")
    match span:
        case None:
            return None
        case [int(first), int(end)] if 0 <= first < end <= len(answer):
            return first, end
    raise ValueError(
        f"{where}: 'error' is {span!r:.60}, expected [first, end] in characters of the answer, "
        f"which has {len(answer)}, or none where it is right"
    )


def _instruction(fields: dict[str, Any], instruction: str, where: str) -> Row:
    """Alpaca's; its published rows lack some outputs, and then nothing is left of them."""
    given, output = fields.get("input") or "", fields.get("output")
    if not isinstance(given, str) or not isinstance(output, str | None):
        raise ValueError(
            f"{where}: 'input' is {given!r:.40} and 'output' {output!r:.40}, expected texts"
        )
    if output is not None and not output.strip():
        return Row("instruction", where)
    asked = f"{instruction}\n\n{given}" if given.strip() else instruction
    return Row("instruction", where, asked, output or "")


def _messages(fields: dict[str, Any], where: str) -> tuple[Message, ...]:
    """A chat's. ShareGPT's are logs, cut to size: what comes before somebody asks is left out, and
    what comes after a turn without words; without a question nothing is left.
    """
    logged = "messages" not in fields
    name = "conversations" if logged else "messages"
    value = fields[name]
    if not isinstance(value, list) or not (value or logged):
        raise ValueError(f"{where}: {name!r} is {value!r:.60}, expected a list of messages")
    found = [_message(message, f"{where}: message {i}") for i, message in enumerate(value)]
    if logged:
        found = list(dropwhile(lambda message: message["role"] == "assistant", found))
        found = list(takewhile(_says, found))
        if not any(message["role"] == "user" for message in found):
            return ()
        if fields.get("system"):
            found.insert(0, {"role": "system", "content": str(fields["system"])})
    for number, message in enumerate(found):
        # Without words it would be taken for an answer that ends at once.
        if message["role"] == "assistant" and not _says(message):
            raise ValueError(
                f"{where}: message {number} is {value[number]!r:.80}, expected words of an "
                "assistant (a 'content' that isn't empty), or a call of a tool"
            )
    return tuple(found)


def _says(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _message(message: Any, where: str) -> Message:
    """With role, content and calls as chat templates read them."""
    given = _read(message, where)
    said = {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else {}
    role, content = said.get("role"), said.get("content", "" if "tool_calls" in said else None)
    if "from" in said:
        role, content = ROLES.get(str(said.pop("from")).lower()), said.pop("value", None)
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(
            f"{where} is {message!r:.80}, expected a text in 'role' and in 'content', or one of "
            f"{', '.join(ROLES)} in 'from' and a text in 'value' (images are not supported)"
        )
    if calls := said.pop("tool_calls", None):
        said["tool_calls"] = [_call(call, where) for call in _objects(calls, "tool_calls", where)]
    return {**said, "role": role, "content": content}


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call of a tool; its arguments, which OpenAI has as a text of JSON, as templates read it."""
    match call.get("function", call):
        case {"name": str(name), "arguments": str() | dict() as arguments}:
            if isinstance(arguments, str):
                arguments = _read(arguments, f"{where}: the arguments of {name}")
            own = {"id": call["id"]} if "id" in call else {}
            return own | {"type": "function", "function": {"name": name, "arguments": arguments}}
    raise ValueError(
        f"{where} is a tool call {call!r:.80}, expected 'function' with its 'name' and 'arguments'"
    )


def _objects(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    what = f"{where}: {name!r}"
    found = _read(value, what)
    found = [_read(item, what) for item in found] if isinstance(found, list) else []
    if not found or not all(isinstance(item, dict) for item in found):
        raise ValueError(f"{what} is {value!r:.60}, expected a list of objects")
    return found


def _read(value: Any, what: str) -> Any:
    """What is in a text of JSON, as tables have objects that are unlike; all else as it is."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{what} is {value!r:.60}, expected JSON ({error})") from error
