"""The Ray Serve example on the page of servers: sound Python, with our vLLM line's options."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from house_rules import ROOT

from draftsmith.models.servers.export import launch


@pytest.fixture
def example() -> str:
    text = (ROOT / "docs/use/servers.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return code


def test_it_says_what_the_vllm_line_says(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for Ray, whose two names it uses."""
    served: list[Any] = []
    llm: Any = ModuleType("ray.serve.llm")
    llm.LLMConfig = lambda **about: SimpleNamespace(**about)
    llm.build_openai_app = lambda given: given["llm_configs"]
    ray: Any = ModuleType("ray")
    ray.serve = SimpleNamespace(run=lambda app, blocking: served.extend(app))
    for name, module in (("ray", ray), ("ray.serve", ray.serve), ("ray.serve.llm", llm)):
        monkeypatch.setitem(sys.modules, name, module)
    exec(compile(example, "serve_ray.py", "exec"), {"__name__": "__main__"})
    (config,) = served
    line = launch("vllm", "draft_model", Path("/models/drafter"), "/models/target", 4)
    *start, options = shlex.split(line)
    assert config.engine_kwargs["speculative_config"] == json.loads(options)
    assert config.model_loading_config["model_source"] == start[2]


def test_it_is_linted(example: str) -> None:
    pytest.importorskip("ruff", reason="ruff lints the example; it is in the extra dev")
    for command in (["check", "--select", "E,F,W,I,B,UP,SIM,RUF"], ["format", "--check"]):
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "100", "-"],
            input=example,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr
