"""A chat template with the habits of Qwen3's: a think block, its switch, and tools."""

TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- set last = namespace(asked=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.asked = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- set content, thought = m.content, m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1].lstrip() %}
{%- endif %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if loop.index0 > last.asked and (loop.last or thought) %}
{{- '<think>\\n' ~ thought ~ '\\n</think>\\n' }}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{{ '<call>' ~ (call.function | tojson) }}{% endfor %}
{{- '<|end|>' }}
{%- else %}
{{- '<|user|>' ~ (m.role ~ ': ' if m.role != 'user' else '') ~ content ~ '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n' }}
{%- endif %}
{%- if effort is defined %}{{ effort }}{% endif %}
{%- endif %}"""
